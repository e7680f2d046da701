"""An error that was located: the first wrong tensor, and where, when and why it is wrong. `cuboid verify` and the
checks of a running training report it in the same words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal[
    "weights", "forward", "loss", "input gradient", "weight gradient", "reduction", "norm", "update", "save", "load"
]


@dataclass(frozen=True)
class Located:
    """The first tensor, in execution order, that is further off than it may be."""

    tensor: str
    module: str
    """Which computed it."""
    where: Pass
    step: int
    """Counted from 1, as micro-batches are."""
    micro_batch: int | None
    """None: of the whole step."""
    rank: int | None
    """None: of all ranks."""
    error: float
    allowed: float
    cause: str
    """In words."""


def module_of(parameter: str) -> str:
    """The module of a parameter or of an activation inside attention."""
    path, _, last = parameter.rpartition(".")
    return path if last in ("weight", "bias", "sinks", "query", "key", "value", "mixed") else parameter


def sentence(found: Located) -> str:
    """What is reported."""
    place = [f"{found.where} of {found.tensor}"]
    place += [f"micro-batch {found.micro_batch}"] if found.micro_batch is not None else []
    place += [f"rank {found.rank}"] if found.rank is not None else []
    size = f" is {found.error:.1e} off, {found.allowed:.1e} is allowed" if found.allowed else " is wrong"
    return f"{', '.join(place)},{size}; module {found.module}; likely cause: {found.cause}"
