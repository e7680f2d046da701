"""Write one rank's list of a V-shaped schedule by rules like "forward the first half, then the second"."""

from __future__ import annotations

from collections import deque

from cuboid.schedule.table import Action, Kind


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
