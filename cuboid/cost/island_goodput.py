"""How much islands get done when islands are lost: one that is lost costs its own part, and the others one wait.

An island is lost after exponential time. Its steps since the last round of each fragment are gone, half an interval on
average; then it starts again, fetches the outer state of another island, and enters. The others wait for it once, at
most `grace` seconds."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1


@dataclass(frozen=True)
class IslandFailures:
    """Of one island, in seconds."""

    mtbf: float
    down: float
    """From its loss until it trains again: known, started, state fetched, entered."""
    redone: float
    """Training that is lost with it, on average."""

    @property
    def present(self) -> float:
        """The fraction of time in which it does what is kept. It can be lost while it starts, too."""
        rate = 1 / self.mtbf
        exponent = rate * self.down
        if exponent > 700:
            return 0.0
        return max(0.0, 1 - rate * self.redone) / (1 + expm1(exponent))


@dataclass(frozen=True)
class IslandGoodput:
    expected: float
    """The fraction of what all would do without failures."""
    present: tuple[float, ...]
    """… of each island."""
    survivors_lose: float
    """The fraction of its time that an island waits for others that are lost."""


def island_goodput(islands: Sequence[IslandFailures], grace: float) -> IslandGoodput:
    """In closed form."""
    present = tuple(each.present for each in islands)
    lost = [each.present / each.mtbf * grace for each in islands]
    waits = [max(0.0, 1 - (sum(lost) - own)) for own in lost]
    whole = sum(own * wait for own, wait in zip(present, waits, strict=True))
    return IslandGoodput(whole / len(islands), present, max(1 - wait for wait in waits))


def simulate_islands(islands: Sequence[IslandFailures], grace: float, failures: int = 2000, seed: int = 0) -> float:
    """The same, failure by failure: kept training of all / time of all."""
    source = random.Random(seed)
    up_since = [0.0 for _ in islands]
    kept, now = 0.0, 0.0
    events = [(source.expovariate(1 / each.mtbf), number, True) for number, each in enumerate(islands)]
    heapq.heapify(events)
    for _ in range(failures):
        while True:
            now, number, fails = heapq.heappop(events)
            own = islands[number]
            if fails:
                break
            up_since[number] = now
            heapq.heappush(events, (now + source.expovariate(1 / own.mtbf), number, True))
        was_up = up_since[number] >= 0
        if was_up:
            kept += max(0.0, now - up_since[number] - own.redone)
            kept -= grace * sum(other != number and since >= 0 for other, since in enumerate(up_since))
        up_since[number] = -1.0
        again = source.expovariate(1 / own.mtbf)
        back = (now + again, number, True) if again < own.down else (now + own.down, number, False)
        heapq.heappush(events, back)
    kept += sum(now - since for since in up_since if since >= 0)
    return kept / (now * len(islands))
