"""Every schedule, by name: GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-V and DualPipeV.

`make_schedule("1f1b", ranks=4, micro_batches=8)` is the table of actions that the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise

import numpy as np

from cuboid.errors import UserError
from cuboid.schedule.table import Kind, Row, Schedule, Table, rows_as_table, uncollected

FORWARD, BACKWARD, INPUT, WEIGHT = range(len(Kind))  # as positions, which is how a row has them


def _each(kind: int, stage: int, micro_batches: Row, stages: int) -> Row:
    """One action for each micro-batch."""
    return (micro_batches * stages + stage) * len(Kind) + kind


# 1F1B: after a short warm-up every forward is followed by a backward (Narayanan et al. 2019, PipeDream-Flush).
#
# Rank i of p warms up with p - i - 1 forwards, so at most min(m, p - i) micro-batches are in flight on it.


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[Row]:
    every = np.arange(micro_batches)
    return [
        warm_up_then_alternate(
            _each(FORWARD, rank, every, ranks), _each(BACKWARD, rank, every, ranks), warm_up=ranks - rank - 1
        )
        for rank in range(ranks)
    ]


def warm_up_then_alternate(forwards: Row, backwards: Row, warm_up: int) -> Row:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = np.stack([forwards[warm_up:], backwards[: len(forwards) - warm_up]], axis=1).ravel()
    return np.concatenate([forwards[:warm_up], steady, backwards[len(forwards) - warm_up :]])


# Interleaved 1F1B: every rank holds v stages, spaced p apart (Narayanan et al. 2021, Megatron-LM).
#
# Micro-batches travel in rounds. Forwards go round by round; within a round through the rank's stages in order, each
# with all the round's micro-batches; backwards the same with the stages reversed. With rounds of p, as published, rank
# i warms up with 2(p - i - 1) + (v - 1)p forwards. Where p does not divide m the rounds are a little longer than p,
# never shorter, since a short round would leave ranks waiting for each other: so the bubble is (p - 1)(F + B) for every
# m ≥ p.


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> list[Row]:
    rounds = _rounds(ranks, micro_batches)
    stages, chunks = ranks * stages_per_rank, range(stages_per_rank)
    forwards, backwards = (
        np.concatenate([_each(kind, chunk * ranks, batches, stages) for batches in rounds for chunk in order])
        for kind, order in ((FORWARD, chunks), (BACKWARD, chunks[::-1]))
    )
    most = (stages_per_rank - 1) * len(rounds[0])
    return [
        warm_up_then_alternate(forwards + later, backwards + later, 2 * (ranks - rank - 1) + most)
        for rank, later in enumerate(len(Kind) * np.arange(ranks))  # the stage is that of the first rank, so many later
    ]


def _rounds(ranks: int, micro_batches: int) -> list[Row]:
    """As many rounds as have at least `ranks` micro-batches each, longer ones first; one round if there are fewer."""
    count = max(1, micro_batches // ranks)
    least, longer = divmod(micro_batches, count)
    starts = [number * least + min(number, longer) for number in range(count + 1)]
    return [np.arange(start, stop) for start, stop in pairwise(starts)]


# The other schedules write a rank's list in letters: F, B, I and W for its stage, or its stage on the way down a V; f,
# b and i for the one on the way back. W is the weight half that has waited longest.


def _spelled(letters: str, stages: tuple[int, ...], count: int) -> Row:
    """A rank's list from its letters: every stage takes its micro-batches in order. `count`: stages of all ranks."""
    written = np.frombuffer(letters.encode(), dtype=np.uint8)
    kinds = _KINDS[written]
    row = np.zeros(len(written), dtype=np.int64)
    for stage, lower in zip(stages, (False, True), strict=False):
        here = (written >= ord("a")) == lower
        for which in (kinds == FORWARD, (kinds == BACKWARD) | (kinds == INPUT)):
            where = np.flatnonzero(here & which)
            row[where] = (np.arange(len(where)) * count + stage) * len(Kind) + kinds[where]
    waited = row[kinds == INPUT]
    row[kinds == WEIGHT] = waited + (WEIGHT - INPUT)
    return row


_KINDS = np.zeros(128, dtype=np.int64)
for _kind, _name in enumerate(Kind):
    _KINDS[[ord(_name.value), ord(_name.value.lower())]] = _kind


# ZB-H1: 1F1B with the backward split, weight halves put off to fill the bubble (Qi et al. 2023, "Zero Bubble").
#
# Rank i of p warms up with p - i - 1 forwards as in 1F1B, and runs the weight half of a micro-batch i micro-batches
# after its input half. So every rank holds at most min(m, p) micro-batches, the most any rank of 1F1B holds, while
# later ranks answer sooner: for W ≤ F, W ≤ I and m ≥ p the bubble shrinks from (p - 1)(F + I + W) to (p - 1)(F + I -
# W).


def zero_bubble_h1(ranks: int, micro_batches: int) -> list[Row]:
    return [_spelled(_h1_letters(rank, ranks, micro_batches), (rank,), ranks) for rank in range(ranks)]


def _h1_letters(rank: int, ranks: int, micro_batches: int) -> str:
    warm_up, waiting = min(ranks - rank - 1, micro_batches), min(rank, micro_batches)
    forwards = micro_batches - warm_up  # that are each followed by an input half
    both = min(forwards, waiting)
    later = "FIW" * (forwards - both) + "I" * (waiting - both) + "IW" * (micro_batches - max(forwards, waiting))
    return "F" * warm_up + "FI" * both + later + "W" * waiting


# ZB-V: two stages per rank laid out as a V, backward split (Qi et al. 2023, "Zero Bubble", section 6).
#
# The rank that runs the first stage also runs the last, so the first backward starts where the first forward did. When
# forward, input and weight halves take equal time no bubble is left but the p - 1 forwards of start-up; a rank holds at
# most 2p half-size activations, as much as the first rank of 1F1B. The pattern needs 2p - 1 micro-batches; for fewer it
# is made for 2p - 1, and `make_table` drops those that do not exist.


def zero_bubble_v(ranks: int, micro_batches: int) -> list[Row]:
    return _folded([_v_letters(rank, ranks, max(micro_batches, 2 * ranks - 1)) for rank in range(ranks)])


def _folded(letters: list[str]) -> list[Row]:
    """The lists of a V."""
    stages = 2 * len(letters)
    return [_spelled(each, (rank, stages - 1 - rank), stages) for rank, each in enumerate(letters)]


def _v_letters(rank: int, ranks: int, micro_batches: int) -> str:
    after = ranks - rank
    filling = "F" * (2 * after - 1) + "fF" * rank + "fiW" * after
    # By now 2p - 1 - rank forwards of half 0 and p of half 1 are done; the steady state does the rest of half 1.
    steady = micro_batches - ranks
    forwards = min(micro_batches - (2 * ranks - 1 - rank), steady)
    draining = "Ii" * rank + "IW" * after
    weights = "W" * (2 * rank)  # of the input halves that none followed
    return filling + "FIWfiW" * forwards + "IWfiW" * (steady - forwards) + draining + weights


# DualPipeV: DualPipe cut in half, so that one copy of the model lies as a V over p ranks (DeepSeek 2025).
#
# The eight steps and their counts are the published ones. In the middle a forward of one half is paired with a backward
# of the other so that their communication can overlap; the pair is written here as forward, then whole backward. The
# split backwards at both ends fill the bubble. A rank holds at most 2p + 1 half-size activations. The pattern needs 2p
# micro-batches; for fewer it is made for 2p, and `make_table` drops those that do not exist.


def dual_pipe_v(ranks: int, micro_batches: int) -> list[Row]:
    return _folded([_dual_pipe_letters(rank, ranks, max(micro_batches, 2 * ranks)) for rank in range(ranks)])


def _dual_pipe_letters(rank: int, ranks: int, micro_batches: int) -> str:
    after = ranks - rank - 1  # ranks further down the V
    # Step 6: the second half of these backwards is split.
    halves = "".join("iI"[number % 2] if number > rank else "bB"[number % 2] for number in range(2 * (rank + 1)))
    steps = (
        "F" * (2 * after),
        "Ff" * (rank + 1),
        "iWf" * after,
        "FbfB" * (micro_batches - 2 * ranks + rank + 1),  # the steady state
        "bfB" * after,
        halves,
        "WI" * after,
        "W" * (rank + 1),
    )
    return "".join(steps)


# GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is in flight when the backwards begin.


def gpipe(ranks: int, micro_batches: int) -> list[Row]:
    letters = "F" * micro_batches + "B" * micro_batches
    return [_spelled(letters, (rank,), ranks) for rank in range(ranks)]


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

    generate: Callable[[int, int, int], list[Row]]
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
    return make_table(name, ranks, micro_batches, stages_per_rank).schedule


@lru_cache(maxsize=64)
def make_table(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Table:
    """The same as arrays, for who asks of many schedules what they take: soon made, and soon read."""
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
        beyond = micro_batches * len(stage_rank) * len(Kind)
        planned = [row[row < beyond] for row in planned]
    # Stages whose input gradient no other rank waits for.
    local = {stage for stage in range(len(stage_rank)) if not stage or stage_rank[stage - 1] == stage_rank[stage]}
    for stage in local:
        planned[stage_rank[stage]] = _join_halves(planned[stage_rank[stage]], stage, len(stage_rank))
    return rows_as_table(name, micro_batches, stage_rank, planned)


def _join_halves(row: Row, stage: int, stages: int) -> Row:
    """Make I followed at once by its W a whole B where no other rank waits for I: splitting would bring nothing."""
    halves = np.flatnonzero((row % (len(Kind) * stages) == len(Kind) * stage + INPUT)[:-1] & (np.diff(row) == 1))
    row = row.copy()
    row[halves] += BACKWARD - INPUT
    return np.delete(row, halves + 1)


def _family(name: str) -> Family:
    if name not in FAMILIES:
        nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"schedule {name!r} is unknown; {hint}known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
