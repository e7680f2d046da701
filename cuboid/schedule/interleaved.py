"""Interleaved 1F1B: every rank holds v stages, spaced p apart (Narayanan et al. 2021, Megatron-LM).

Micro-batches travel in rounds of p. Forwards go round by round; within a round through the rank's stages in order, each
with the round's micro-batches; backwards the same with the stages reversed. Rank i warms up with 2(p - i - 1) + (v - 1)p
forwards. A last round that p does not fill is planned whole: `make_schedule` leaves out micro-batches that do not exist.
"""

from __future__ import annotations

from cuboid.schedule.one_forward_one_backward import warm_up_then_alternate
from cuboid.schedule.table import Action, Kind


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    return [_rank_actions(rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)]


def _rank_actions(rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> list[Action]:
    stages = [rank + chunk * ranks for chunk in range(stages_per_rank)]
    rounds = [range(start, start + ranks) for start in range(0, micro_batches, ranks)]
    forwards = [Action(Kind.FORWARD, s, batch) for batches in rounds for s in stages for batch in batches]
    backwards = [Action(Kind.BACKWARD, s, batch) for batches in rounds for s in reversed(stages) for batch in batches]
    return warm_up_then_alternate(forwards, backwards, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
