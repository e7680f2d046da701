"""Which of several sources stands at a position of the global order: decided by the weights, computed from a table of
one period.

After any number N of positions each source has its weight of them, to less than one sample either way."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from cuboid.errors import UserError

LONGEST_PERIOD = 100_000


class Pattern:
    """The sources of one period, whose length is the least in which every weight is a whole number of samples."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = _whole_shares(weights)
        self.period = sum(shares)
        self._shares = shares
        order = np.array(_order(shares), dtype=np.int32)
        self._order = order
        self._before = np.empty(len(order), dtype=np.int64)
        for source in range(len(shares)):
            places = np.flatnonzero(order == source)
            self._before[places] = np.arange(len(places))

    def at(self, position: int) -> tuple[int, int]:
        """The source at a position, and how many positions it had before."""
        period, place = divmod(position, self.period)
        source = int(self._order[place])
        return source, period * self._shares[source] + int(self._before[place])

    def positions(self, sizes: Sequence[int]) -> int:
        """After how many positions every source has had as many as `sizes` says."""
        return max(-(-size // share) for size, share in zip(sizes, self._shares, strict=True)) * self.period


def _whole_shares(weights: Sequence[float]) -> list[int]:
    # A weight is the decimal number its owner wrote, not the binary one beside it.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * scale) for weight in exact]
    common = math.gcd(*shares)
    shares = [share // common for share in shares]
    if sum(shares) > LONGEST_PERIOD:
        total = sum(shares)
        rounded = ", ".join(f"{max(round(share / total, 4), 0.0001)}" for share in shares)
        raise UserError(
            f"data.mixture has weights {', '.join(map(str, weights))}, which are whole numbers of samples only after "
            f"{total:,}; use rounder ones, like {rounded}"
        )
    return shares


def _order(shares: list[int]) -> list[int]:
    """Gives each place to the source that must have it soonest, among those that may have it.

    Sample k of a source with share s of n may not come before place k·n/s (rounded down), lest the source be a whole
    sample ahead, and must come before place (k+1)·n/s (rounded up), lest it be a whole sample behind. That the
    earliest-deadline order keeps all these promises is a theorem on fair schedules (Baruah et al., 1996)."""
    period = sum(shares)
    waiting = [(0, source, 0) for source in range(len(shares))]
    ready: list[tuple[int, int, int]] = []
    order = []
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(sample + 1) * period // shares[source]), source, sample))
        _, source, sample = heapq.heappop(ready)
        order.append(source)
        if sample + 1 < shares[source]:
            heapq.heappush(waiting, ((sample + 1) * period // shares[source], source, sample + 1))
    return order
