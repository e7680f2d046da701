"""Zero-bubble schedules, the backward split into input and weight gradients: ZB-H1, and ZB-V over a V of stages."""

from __future__ import annotations

from collections import deque

from cuboid.schedule.table import Action, Kind

# ZB-H1: 1F1B with the backward split, weight halves put off to fill the bubble (Qi et al. 2023, "Zero Bubble").
#
# Rank i of p warms up with p - i - 1 forwards as in 1F1B, and runs the weight half of a micro-batch i micro-batches
# after its input half. So every rank holds at most min(m, p) micro-batches, the most any rank of 1F1B holds, while
# later ranks answer sooner: for W ≤ F, W ≤ I and m ≥ p the bubble shrinks from (p - 1)(F + I + W) to (p - 1)(F + I -
# W).


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
        self._weights_due: deque[tuple[int, int]] = deque()

    def forward(self, half: int) -> None:
        self.actions.append(Action(Kind.FORWARD, self._stages[half], self._forwards[half]))
        self._forwards[half] += 1

    def backward(self, half: int, kind: Kind = Kind.BACKWARD) -> None:
        """A whole backward, or only its input half; the weight half then waits for `weight`."""
        stage, batch = self._stages[half], self._backwards[half]
        self.actions.append(Action(kind, stage, batch))
        self._backwards[half] += 1
        if kind is Kind.INPUT:
            self._weights_due.append((stage, batch))

    def weight(self) -> None:
        """The weight half that has waited longest."""
        self.actions.append(Action(Kind.WEIGHT, *self._weights_due.popleft()))

    def split_backward(self, half: int) -> None:
        """Both halves, one after the other: the previous stage gets its gradient before the weight half runs."""
        self.backward(half, Kind.INPUT)
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
        write.backward(0, Kind.INPUT)
        write.backward(1, Kind.INPUT)
    for _ in range(ranks - rank):
        write.backward(0, Kind.INPUT)
        write.weight()
    write.remaining_weights()
    return write.actions
