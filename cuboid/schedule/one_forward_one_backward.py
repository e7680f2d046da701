"""1F1B: after a short warm-up every forward is followed by a backward (Narayanan et al. 2019, PipeDream-Flush).

Rank i of p warms up with p - i - 1 forwards, so at most min(m, p - i) micro-batches are in flight on it.
"""

from __future__ import annotations

from cuboid.schedule.table import Action, Kind


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
