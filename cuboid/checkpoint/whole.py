"""The tensors of a checkpoint put together in one process, to be looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.manifest import Place
from cuboid.checkpoint.reader import DTYPES, Reader
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.state import KINDS


def whole_tensors(checkpoint: Place) -> dict[str, Tensor]:
    """By the names of the index: `parameter/…`, `exp_avg/…`, `exp_avg_sq/…`."""
    reader = Reader(checkpoint)
    state: dict[str, Scattered] = {}
    for name, entry in reader.index.items():
        if name.partition("/")[0] not in KINDS:  # random generators are a rank's, not the model's
            continue
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        whole = Box((0,) * len(shape), shape, 0)
        state[name] = Scattered(shape, dtype, ((whole, torch.full(shape, float("nan"), dtype=dtype)),))
    reader.fill(state)
    return {name: held.boxes[0][1] for name, held in state.items()}
