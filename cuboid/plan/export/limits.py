"""Which layouts another engine's files can say, over whole columns: what `plan --for-engine` searches.

Each exporter checks a single plan again, and names what it cannot say."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, SCHEDULES

Columns = dict[str, NDArray[np.int64]]
FIXED: dict[str, dict[str, Any]] = {
    "megatron": {"recompute_layers": 0},
    "deepspeed": {"recompute_layers": 0, "sequence_parallel": False, "cp": 1, "offload": False},
    "torchtitan": {"recompute_layers": 0, "offload": False},
    "nanotron": {"recompute_layers": 0, "cp": 1, "ep": 1, "offload": False},
}
"""Target -> fields that it leaves no choice of."""
KNOWN = {
    "megatron": ("1f1b", "interleaved"),
    "deepspeed": ("1f1b",),
    "torchtitan": ("1f1b", "interleaved", "zbv", "dualpipev"),
    "nanotron": ("1f1b", "gpipe"),
}
"""Target -> its schedules."""


def sayable(target: str, columns: Columns, global_batch: int) -> NDArray[np.bool_]:
    """Which of the layouts the target has words for."""
    dp, tp, pp, zero, recompute = (columns[name] for name in ("dp", "tp", "pp", "zero", "recompute"))
    schedule, count = columns["schedule"], global_batch // (columns["dp"] * columns["micro_batch"])
    works = (pp == 1) | np.isin(schedule, [SCHEDULES.index(name) for name in KNOWN[target]])
    interleaved = (pp > 1) & (schedule == SCHEDULES.index("interleaved"))
    works &= ~interleaved | (count % pp == 0)
    whole = (columns["shard"] == 0) | (columns["shard"] == dp) | (zero == 0)
    selective = recompute == RECOMPUTE.index("selective")
    if target == "megatron":
        works &= (zero < 2) | (pp == 1)
    elif target == "deepspeed":
        works &= ((zero < 2) | (pp == 1)) & ((zero < 3) | (tp == 1)) & ~selective & whole
    elif target == "torchtitan":
        alone = (tp == 1) & (pp == 1) & (columns["cp"] == 1)
        works &= (dp == 1) | (zero >= 2) | ((zero == 0) & alone)
        works &= (tp == 1) | (columns["sequence_parallel"] > 0)
        works &= (columns["cp"] == 1) | (columns["cp_method"] == CONTEXT_METHODS.index("allgather"))
        works &= (schedule != SCHEDULES.index("dualpipev")) | (count >= 2 * pp)
    else:
        works &= (zero < 2) & ~selective & whole
    return np.asarray(works)
