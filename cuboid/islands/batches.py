"""Which batches of the global order an island takes, as runs of numbers: (first, distance, how many)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Run = tuple[int, int, int]


class Batches:
    """In the order in which they are taken."""

    def __init__(self, runs: Iterable[Iterable[int]] = ()) -> None:
        self.runs: list[Run] = []
        for first, distance, count in runs:
            self.add(first, distance, count)

    def __len__(self) -> int:
        return sum(count for _, _, count in self.runs)

    def __iter__(self) -> Iterator[int]:
        for first, distance, count in self.runs:
            yield from range(first, first + distance * count, distance)

    def add(self, first: int, distance: int = 1, count: int = 1) -> None:
        """Behind all others."""
        if count < 1:
            return
        if self.runs:
            begin, step, many = self.runs[-1]
            if many == 1:
                step = first - begin
            if first == begin + step * many and (count == 1 or distance == step) and step > 0:
                self.runs[-1] = (begin, step, many + count)
                return
        self.runs.append((first, distance if count > 1 else 1, count))

    def claim(self, wanted: Batches) -> bool:
        """Certain ones, which are no longer here, wherever they were; false, and nothing changes, if some are not."""
        asked = set(wanted)
        kept = [batch for batch in self if batch not in asked]
        if len(self) - len(kept) < len(asked):
            return False
        self.runs = Batches((batch, 1, 1) for batch in kept).runs
        return True

    def take(self, count: int) -> Batches:
        """The next ones, which are no longer here."""
        taken = Batches()
        while count and self.runs:
            first, distance, many = self.runs.pop(0)
            own = min(count, many)
            taken.add(first, distance, own)
            count -= own
            if own < many:
                self.runs.insert(0, (first + own * distance, distance, many - own))
        return taken
