"""A pipeline schedule as data: for every rank the list of actions it runs, in order.

The executor, the simulator, the validator and the drawings all read this one table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What an action computes for one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of inputs and of weights."""
    INPUT = "I"
    """Only the gradient of the stage's inputs, which the previous stage waits for."""
    WEIGHT = "W"
    """Only the gradients of the stage's weights, which nobody waits for."""

    # Members are singletons, so identity is a valid hash and much faster than Enum's own.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a schedule, written `F3.0`: forward of stage 3 for micro-batch 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Everything the ranks of one pipeline do in one step."""

    name: str
    ranks: int
    """Pipeline ranks; each holds one or more stages."""
    micro_batches: int
    stage_rank: tuple[int, ...]
    """For each stage the rank that holds it."""
    actions: tuple[tuple[Action, ...], ...] = field(hash=False, repr=False)
    """For each rank its actions in order. Not in the hash, to keep schedules cheap cache keys."""

    @property
    def stages(self) -> int:
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into its input and weight halves."""
        return any(action.kind is Kind.INPUT for rank_actions in self.actions for action in rank_actions)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {join(actions)}" for rank, actions in enumerate(self.actions))


def join(actions: Iterable[Action]) -> str:
    """Actions in one line, `F0.0 F0.1 B0.0`."""
    return " ".join(map(str, actions))
