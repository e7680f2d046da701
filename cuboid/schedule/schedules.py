"""Every schedule, by name: GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-V and DualPipeV.

`make_schedule("1f1b", ranks=4, micro_batches=8)` is the table of actions that the pipeline runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import pairwise, repeat

from cuboid.errors import UserError
from cuboid.schedule.table import Action, Kind, Schedule, uncollected

FORWARD, BACKWARD, INPUT, WEIGHT = Kind  # by name, because looking one up in the enumeration takes longer

# 1F1B: after a short warm-up every forward is followed by a backward (Narayanan et al. 2019, PipeDream-Flush).
#
# Rank i of p warms up with p - i - 1 forwards, so at most min(m, p - i) micro-batches are in flight on it.


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_one_forward_one_backward_actions(rank, ranks, micro_batches) for rank in range(ranks)]


def _one_forward_one_backward_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    forwards, backwards = (_each(kind, rank, range(micro_batches)) for kind in (FORWARD, BACKWARD))
    return warm_up_then_alternate(forwards, backwards, warm_up=ranks - rank - 1)


def _each(kind: Kind, stage: int, micro_batches: Iterable[int]) -> list[Action]:
    """One action for each of them; made as plain tuples are, in a third of the time."""
    return list(map(_new_action, zip(repeat(kind), repeat(stage), micro_batches, strict=False)))


_new_action: Callable[[tuple[Kind, int, int]], Action] = partial(tuple.__new__, Action)


def warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


# Interleaved 1F1B: every rank holds v stages, spaced p apart (Narayanan et al. 2021, Megatron-LM).
#
# Micro-batches travel in rounds. Forwards go round by round; within a round through the rank's stages in order, each
# with all the round's micro-batches; backwards the same with the stages reversed. With rounds of p, as published, rank
# i warms up with 2(p - i - 1) + (v - 1)p forwards. Where p does not divide m the rounds are a little longer than p,
# never shorter, since a short round would leave ranks waiting for each other: so the bubble is (p - 1)(F + B) for every
# m ≥ p.


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    rounds = _rounds(ranks, micro_batches)
    return [_interleaved_actions(rank, ranks, rounds, stages_per_rank) for rank in range(ranks)]


def _rounds(ranks: int, micro_batches: int) -> list[range]:
    """As many rounds as have at least `ranks` micro-batches each, longer ones first; one round if there are fewer."""
    count = max(1, micro_batches // ranks)
    least, longer = divmod(micro_batches, count)
    starts = [number * least + min(number, longer) for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _interleaved_actions(rank: int, ranks: int, rounds: list[range], stages_per_rank: int) -> list[Action]:
    stages = [rank + chunk * ranks for chunk in range(stages_per_rank)]
    forwards = [action for batches in rounds for stage in stages for action in _each(FORWARD, stage, batches)]
    stages.reverse()
    backwards = [action for batches in rounds for stage in stages for action in _each(BACKWARD, stage, batches)]
    return warm_up_then_alternate(forwards, backwards, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * len(rounds[0]))


# ZB-H1: 1F1B with the backward split, weight halves put off to fill the bubble (Qi et al. 2023, "Zero Bubble").
#
# Rank i of p warms up with p - i - 1 forwards as in 1F1B, and runs the weight half of a micro-batch i micro-batches
# after its input half. So every rank holds at most min(m, p) micro-batches, the most any rank of 1F1B holds, while
# later ranks answer sooner: for W ≤ F, W ≤ I and m ≥ p the bubble shrinks from (p - 1)(F + I + W) to (p - 1)(F + I -
# W).


def zero_bubble_h1(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_h1_actions(rank, ranks, micro_batches) for rank in range(ranks)]


def _h1_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    warm_up = ranks - rank - 1
    forwards, inputs, weights = (_each(kind, rank, range(micro_batches)) for kind in (FORWARD, INPUT, WEIGHT))
    actions = forwards[:warm_up]
    for batch, half in enumerate(inputs):
        if batch + warm_up < micro_batches:
            actions.append(forwards[batch + warm_up])
        actions.append(half)
        if batch >= rank:
            actions.append(weights[batch - rank])
    return actions + weights[max(0, micro_batches - rank) :]


# Write one rank's list of a V-shaped schedule by rules like "forward the first half, then the second".


class RankWriter:
    """Appends actions of a rank's two stages, counting micro-batches itself.

    Half 0 is the rank's stage on the way down the V, half 1 the one on the way back.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._weights_due: deque[Action] = deque()

    def forward(self, half: int) -> None:
        batch = self._forwards[half]
        self.actions.append(Action(FORWARD, self._stages[half], batch))
        self._forwards[half] = batch + 1

    def backward(self, half: int, kind: Kind = BACKWARD) -> None:
        """A whole backward, or only its input half; the weight half then waits for `weight`."""
        stage, batch = self._stages[half], self._backwards[half]
        self.actions.append(Action(kind, stage, batch))
        self._backwards[half] = batch + 1
        if kind is INPUT:
            self._weights_due.append(Action(WEIGHT, stage, batch))

    def weight(self) -> None:
        """The weight half that has waited longest."""
        self.actions.append(self._weights_due.popleft())

    def split_backward(self, half: int) -> None:
        """Both halves, one after the other: the previous stage gets its gradient before the weight half runs."""
        self.backward(half, INPUT)
        self.weight()

    def remaining_weights(self) -> None:
        while self._weights_due:
            self.weight()


# ZB-V: two stages per rank laid out as a V, backward split (Qi et al. 2023, "Zero Bubble", section 6).
#
# The rank that runs the first stage also runs the last, so the first backward starts where the first forward did. When
# forward, input and weight halves take equal time no bubble is left but the p - 1 forwards of start-up; a rank holds at
# most 2p half-size activations, as much as the first rank of 1F1B. The pattern needs 2p - 1 micro-batches; for fewer it
# is made for 2p - 1, and `make_schedule` drops those that do not exist.


def zero_bubble_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_v_actions(rank, ranks, max(micro_batches, 2 * ranks - 1)) for rank in range(ranks)]


def _v_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    write = RankWriter(rank, ranks)
    for _ in range(2 * (ranks - rank) - 1):
        write.forward(0)
    for _ in range(rank):
        write.forward(1)
        write.forward(0)
    for _ in range(ranks - rank):
        write.forward(1)
        write.split_backward(1)
    # By now 2p - 1 - rank forwards of half 0 and p of half 1 are done; the steady state does the rest of half 1.
    first = 2 * ranks - 1 - rank
    for batch in range(first, first + micro_batches - ranks):
        if batch < micro_batches:
            write.forward(0)
        write.split_backward(0)
        write.forward(1)
        write.split_backward(1)
    for _ in range(rank):
        write.backward(0, INPUT)
        write.backward(1, INPUT)
    for _ in range(ranks - rank):
        write.backward(0, INPUT)
        write.weight()
    write.remaining_weights()
    return write.actions


# DualPipeV: DualPipe cut in half, so that one copy of the model lies as a V over p ranks (DeepSeek 2025).
#
# The eight steps and their counts are the published ones. In the middle a forward of one half is paired with a backward
# of the other so that their communication can overlap; the pair is written here as forward, then whole backward. The
# split backwards at both ends fill the bubble. A rank holds at most 2p + 1 half-size activations. The pattern needs 2p
# micro-batches; for fewer it is made for 2p, and `make_schedule` drops those that do not exist.


def dual_pipe_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_dual_pipe_actions(rank, ranks, max(micro_batches, 2 * ranks)) for rank in range(ranks)]


def _dual_pipe_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    write = RankWriter(rank, ranks)
    after = ranks - rank - 1  # ranks further down the V
    for _ in range(2 * after):  # step 1
        write.forward(0)
    for _ in range(rank + 1):  # step 2
        write.forward(0)
        write.forward(1)
    for _ in range(after):  # step 3
        write.split_backward(1)
        write.forward(1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):  # step 4, the steady state
        write.forward(0)
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for _ in range(after):  # step 5
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for number in range(2 * (rank + 1)):  # step 6: the second half of these backwards is split
        write.backward(1 - number % 2, INPUT if number > rank else BACKWARD)
    for _ in range(after):  # step 7
        write.weight()
        write.backward(0, INPUT)
    write.remaining_weights()  # step 8
    return write.actions


# GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is in flight when the backwards begin.


def gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [
        [Action(kind, rank, batch) for kind in (FORWARD, BACKWARD) for batch in range(micro_batches)]
        for rank in range(ranks)
    ]


def looped_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go round the ranks: 0 1 2 3 0 1 2 3."""
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))


def v_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go down the ranks and come back: 0 1 2 3 3 2 1 0. The first and the last stage share a rank."""
    return tuple(min(stage, 2 * ranks - 1 - stage) for stage in range(ranks * stages_per_rank))


MOST_PLANNED = 2
"""Micro-batches a rank that a pattern needs at most, and is made for where there are fewer."""


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
@uncollected()
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
    if micro_batches < MOST_PLANNED * ranks:
        # Micro-batches depend on each other only through the order of a rank's list, so a valid schedule
        # stays valid when all actions of some micro-batches are taken out.
        planned = [[action for action in row if action.micro_batch < micro_batches] for row in planned]
    # Stages whose input gradient no other rank waits for.
    local = {stage for stage in range(len(stage_rank)) if not stage or stage_rank[stage - 1] == stage_rank[stage]}
    holders = {stage_rank[stage] for stage in local}
    rows = (_join_halves(row, local) if rank in holders else row for rank, row in enumerate(planned))
    return Schedule(name, ranks, micro_batches, stage_rank, tuple(map(tuple, rows)))


def _join_halves(actions: list[Action], local: set[int]) -> list[Action]:
    """Make I followed at once by its W a whole B where no other rank waits for I: splitting would bring nothing."""
    merged: list[Action] = []
    for action in actions:
        kind, stage, batch = action
        if kind is WEIGHT and stage in local and merged[-1] == (INPUT, stage, batch):
            merged[-1] = Action(BACKWARD, stage, batch)
            continue
        merged.append(action)
    return merged


def _family(name: str) -> Family:
    if name not in FAMILIES:
        nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"schedule {name!r} is unknown; {hint}known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
