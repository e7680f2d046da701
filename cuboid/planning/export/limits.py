"""Which layouts another engine's files can say, over whole columns: what `plan --for-engine` searches.

Each exporter checks a single plan again, and names what it cannot say."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.planning.export import torchtitan
from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, SCHEDULES
from cuboid.spec.model import ModelSpec

Columns = dict[str, NDArray[np.int64]]
FIXED: dict[str, dict[str, Any]] = {
    "megatron": {"recompute_layers": 0},
    "deepspeed": {"recompute_layers": 0, "sequence_parallel": False, "cp": 1},
    "torchtitan": {"recompute_layers": 0, "offload": False},
    "nanotron": {"recompute_layers": 0, "cp": 1, "ep": 1, "offload": False},
}
"""Target -> fields that it leaves no choice of."""
KNOWN = {
    "megatron": ("1f1b", "interleaved"),
    "deepspeed": ("1f1b",),
    "torchtitan": ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"),
    "nanotron": ("1f1b", "gpipe"),
}
"""Target -> its schedules."""


def sayable(target: str, columns: Columns, global_batch: int, model: ModelSpec) -> NDArray[np.bool_]:
    """Which of the layouts of a model the target has words for."""
    dp, tp, pp, zero, recompute = (columns[name] for name in ("dp", "tp", "pp", "zero", "recompute"))
    schedule, count = columns["schedule"], global_batch // (columns["dp"] * columns["micro_batch"])
    works = np.isin(schedule, [SCHEDULES.index(name) for name in KNOWN[target]])
    interleaved = (pp > 1) & (schedule == SCHEDULES.index("interleaved"))
    works &= ~interleaved | (count % pp == 0)
    whole = (columns["shard"] == 0) | (columns["shard"] == dp) | (zero == 0)
    selective = recompute == RECOMPUTE.index("selective")
    away = columns["offload"] > 0
    if target == "megatron":
        works &= ((zero < 2) | (pp == 1)) & (~away | (zero == 1))
    elif target == "deepspeed":
        works &= ((zero < 2) | (pp == 1)) & ((zero < 3) | (tp == 1)) & ~selective & whole
        works &= (~away | (zero > 0)) & ((tp == 1) | (pp == 1))
    elif target == "torchtitan":
        name, _ = torchtitan.FLAVORS.get(model.name, ("", ""))
        works &= (pp == 1) | (name in torchtitan.PIPELINED)
        works &= (columns["cp"] == 1) | ((name in torchtitan.CONTEXT) & (zero >= 2))
        alone = (tp == 1) & (pp == 1) & (columns["cp"] == 1)
        works &= (dp == 1) | (zero >= 2) | ((zero == 0) & alone)
        works &= (tp == 1) | (columns["sequence_parallel"] > 0)
        works &= (columns["cp"] == 1) | (columns["cp_method"] == CONTEXT_METHODS.index("allgather"))
        works &= (schedule != SCHEDULES.index("dualpipev")) | (count >= 2 * pp)
    else:
        works &= (zero < 2) & ~selective & whole & (tp <= model.kv_heads)
    return np.asarray(works)
