"""Make a schedule by name: `make_schedule("1f1b", ranks=4, micro_batches=8)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from cuboid.errors import UserError
from cuboid.schedule.dualpipev import dual_pipe_v
from cuboid.schedule.one_forward_one_backward import interleaved, one_forward_one_backward
from cuboid.schedule.table import Action, Kind, Schedule
from cuboid.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v

# GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is in flight when the backwards begin.


def gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [
        [Action(kind, rank, batch) for kind in (Kind.FORWARD, Kind.BACKWARD) for batch in range(micro_batches)]
        for rank in range(ranks)
    ]


def looped_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go round the ranks: 0 1 2 3 0 1 2 3."""
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))


def v_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go down the ranks and come back: 0 1 2 3 3 2 1 0. The first and the last stage share a rank."""
    return tuple(min(stage, 2 * ranks - 1 - stage) for stage in range(ranks * stages_per_rank))


@dataclass(frozen=True)
class Family:
    """A kind of schedule: how it orders actions and where it puts stages."""

    generate: Callable[[int, int, int], list[list[Action]]]
    """(ranks, micro_batches, stages_per_rank) -> actions per rank; may plan for more micro-batches than asked."""
    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = 1
    place: Callable[[int, int], tuple[int, ...]] = looped_placement

    @property
    def allowed_stages_per_rank(self) -> str:
        least, most = self.least_stages_per_rank, self.most_stages_per_rank
        return str(least) if least == most else f"{least} or more"


FAMILIES: dict[str, Family] = {
    "gpipe": Family(lambda ranks, micro_batches, _: gpipe(ranks, micro_batches)),
    "1f1b": Family(lambda ranks, micro_batches, _: one_forward_one_backward(ranks, micro_batches)),
    "interleaved": Family(interleaved, least_stages_per_rank=2, most_stages_per_rank=None),
    "zb1p": Family(lambda ranks, micro_batches, _: zero_bubble_h1(ranks, micro_batches)),
    "zbv": Family(lambda ranks, micro_batches, _: zero_bubble_v(ranks, micro_batches), 2, 2, v_placement),
    "dualpipev": Family(lambda ranks, micro_batches, _: dual_pipe_v(ranks, micro_batches), 2, 2, v_placement),
}


@lru_cache(maxsize=256)
def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """The named schedule for any number of ranks and micro-batches, also fewer micro-batches than stages."""
    family = _family(name)
    for field, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if value < 1:
            raise UserError(f"{field} {value} of a pipeline schedule; it must be 1 or more")
    most = family.most_stages_per_rank
    if stages_per_rank < family.least_stages_per_rank or (most is not None and stages_per_rank > most):
        raise UserError(
            f"stages_per_rank {stages_per_rank} with schedule {name}; it takes {family.allowed_stages_per_rank}"
        )
    stage_rank = family.place(ranks, stages_per_rank)
    planned = family.generate(ranks, micro_batches, stages_per_rank)
    # Micro-batches depend on each other only through the order of a rank's list, so a valid schedule
    # stays valid when all actions of some micro-batches are taken out.
    existing = ([action for action in row if action.micro_batch < micro_batches] for row in planned)
    actions = tuple(tuple(_join_halves(row, stage_rank)) for row in existing)
    return Schedule(name, ranks, micro_batches, stage_rank, actions)


def _join_halves(actions: list[Action], stage_rank: tuple[int, ...]) -> list[Action]:
    """Make I followed at once by its W a whole B where no other rank waits for I: splitting would bring nothing."""
    merged: list[Action] = []
    for action in actions:
        if action.kind is Kind.WEIGHT:
            stage, batch = action.stage, action.micro_batch
            local = stage == 0 or stage_rank[stage - 1] == stage_rank[stage]
            if local and merged[-1] == Action(Kind.INPUT, stage, batch):
                merged[-1] = Action(Kind.BACKWARD, stage, batch)
                continue
        merged.append(action)
    return merged


def _family(name: str) -> Family:
    if name not in FAMILIES:
        nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"schedule {name!r} is unknown; {hint}known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
