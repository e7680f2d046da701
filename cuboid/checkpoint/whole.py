"""The tensors of a checkpoint put together in one process, to be looked at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.manifest import Place
from cuboid.checkpoint.reader import Reader
from cuboid.checkpoint.scattered import LoadPlanner, Scattered
from cuboid.checkpoint.state import KINDS


def whole_tensors(checkpoint: Place) -> dict[str, Tensor]:
    """By the names of the index: `parameter/…`, `exp_avg/…`, `exp_avg_sq/…`."""
    reader = Reader(checkpoint)
    state: dict[str, Scattered] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.partition("/")[0] not in KINDS:  # random generators are a rank's, not the model's
            continue
        assert isinstance(entry, TensorStorageMetadata)
        shape, dtype = tuple(entry.size), entry.properties.dtype
        whole = Box((0,) * len(shape), shape, 0)
        state[name] = Scattered(shape, dtype, ((whole, torch.full(shape, float("nan"), dtype=dtype)),))
    load_state(state, storage_reader=reader, planner=LoadPlanner(flatten_state_dict=False), no_dist=True)
    return {name: held.boxes[0][1] for name, held in state.items()}
