"""The state of a rank's random generators, kept as tensors beside the model's. Nothing draws from them today (weights
and samples come from keyed generators of their own), so a layout may change; what will draw continues bit for bit."""

from __future__ import annotations

import torch

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.scattered import Scattered
from cuboid.parallel.parallelize import Engine


def seed_generators(seed: int, rank: int) -> None:
    """PyTorch begins with another state in every process; a run begins with its own, on each rank another."""
    torch.manual_seed(((seed << 24) + rank) % (1 << 63))


def generators(engine: Engine) -> dict[str, Scattered]:
    """A copy of their state now, under names of this rank's own."""
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    rank = engine.groups.world.index
    return {
        f"generator/{kind}/{rank:05d}": Scattered(
            tuple(state.shape), state.dtype, ((Box((0,), tuple(state.shape), 0), state),)
        )
        for kind, state in states.items()
    }


def restore_generators(engine: Engine, states: dict[str, Scattered]) -> None:
    for name, held in states.items():
        state = held.boxes[0][1]
        if name.split("/")[1] == "cuda":
            torch.cuda.set_rng_state(state, engine.device)
        else:
            torch.set_rng_state(state)
