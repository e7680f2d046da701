"""1F1B, with one stage per rank and interleaved."""

from __future__ import annotations

from itertools import pairwise

from cuboid.schedule.table import Action, Kind

# 1F1B: after a short warm-up every forward is followed by a backward (Narayanan et al. 2019, PipeDream-Flush).
#
# Rank i of p warms up with p - i - 1 forwards, so at most min(m, p - i) micro-batches are in flight on it.


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_rank_actions(rank, ranks, micro_batches) for rank in range(ranks)]


def _rank_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    forwards = [Action(Kind.FORWARD, rank, batch) for batch in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, rank, batch) for batch in range(micro_batches)]
    return warm_up_then_alternate(forwards, backwards, warm_up=ranks - rank - 1)


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
    forwards = [Action(Kind.FORWARD, s, batch) for batches in rounds for s in stages for batch in batches]
    backwards = [Action(Kind.BACKWARD, s, batch) for batches in rounds for s in reversed(stages) for batch in batches]
    return warm_up_then_alternate(forwards, backwards, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * len(rounds[0]))
