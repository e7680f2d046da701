"""ZB-H1: 1F1B with the backward split, weight halves put off to fill the bubble (Qi et al. 2023, "Zero Bubble").

Rank i of p warms up with p - i - 1 forwards as in 1F1B, and runs the weight half of a micro-batch i micro-batches
after its input half. So every rank holds at most min(m, p) micro-batches, the most any rank of 1F1B holds, while
later ranks answer sooner: for W ≤ F, W ≤ I and m ≥ p the bubble shrinks from (p - 1)(F + I + W) to (p - 1)(F + I -
W).
"""

from __future__ import annotations

from cuboid.schedule.table import Action, Kind


def zero_bubble_h1(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_rank_actions(rank, ranks, micro_batches) for rank in range(ranks)]


def _rank_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    warm_up = ranks - rank - 1
    actions = [Action(Kind.FORWARD, rank, batch) for batch in range(min(warm_up, micro_batches))]
    for batch in range(micro_batches):
        if batch + warm_up < micro_batches:
            actions.append(Action(Kind.FORWARD, rank, batch + warm_up))
        actions.append(Action(Kind.INPUT, rank, batch))
        if batch >= rank:
            actions.append(Action(Kind.WEIGHT, rank, batch - rank))
    put_off = range(max(0, micro_batches - rank), micro_batches)
    return actions + [Action(Kind.WEIGHT, rank, batch) for batch in put_off]
