"""ZB-V: two stages per rank laid out as a V, backward split (Qi et al. 2023, "Zero Bubble", section 6).

The rank that runs the first stage also runs the last, so the first backward starts where the first forward did. When
forward, input and weight halves take equal time no bubble is left but the p - 1 forwards of start-up; a rank holds at
most 2p half-size activations, as much as the first rank of 1F1B. The pattern needs 2p - 1 micro-batches; for fewer it
is made for 2p - 1, and `make_schedule` leaves out those that do not exist.
"""

from __future__ import annotations

from cuboid.schedule.table import Action, Kind
from cuboid.schedule.writer import RankWriter


def zero_bubble_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_rank_actions(rank, ranks, max(micro_batches, 2 * ranks - 1)) for rank in range(ranks)]


def _rank_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
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
        write.backward(0, Kind.INPUT)
        write.backward(1, Kind.INPUT)
    for _ in range(ranks - rank):
        write.backward(0, Kind.INPUT)
        write.weight()
    write.remaining_weights()
    return write.actions
