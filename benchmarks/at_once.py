"""Cases of a benchmark tried several at once: each by a pool of ranks of its own, on its own share of the cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from cuboid.launch.pool import Pool

Case = TypeVar("Case")
Row = TypeVar("Row")


class Place(NamedTuple):
    """Where one case at a time is tried."""

    pool: Pool
    cores: tuple[int, ...]

    def run(self, function: str, arguments: tuple[Any, ...], ranks: int, timeout: float, **settings: Any) -> Any:
        """What rank 0 returns. Ranks that say nothing for so many seconds are ended: `RankError`. `settings`: of
        `Pool.run`."""
        pinned = (self.cores, function, arguments)
        return self.pool.run("at_once:pinned", pinned, ranks=ranks, timeout=timeout, **settings)[0]


def pinned(rank: int, cores: tuple[int, ...], function: str, arguments: tuple[Any, ...]) -> Any:
    """What a rank runs: `function`, on these cores alone, also in threads that exist already."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    return resolve_name(function)(rank, *arguments)


def tried(cases: Sequence[Case], jobs: int, attempt: Callable[[Place, Case], Row]) -> Iterator[Row]:
    """`attempt` of every case, in the order of the cases, `jobs` of them at a time."""
    cores = sorted(os.sched_getaffinity(0))
    idle: SimpleQueue[Place] = SimpleQueue()
    places = [Place(Pool(), tuple(cores[job % len(cores) :: jobs])) for job in range(jobs)]
    for place in places:
        idle.put(place)

    def one(case: Case) -> Row:
        place = idle.get()
        try:
            return attempt(place, case)
        finally:
            idle.put(place)

    try:
        with ThreadPoolExecutor(jobs) as threads:
            yield from threads.map(one, cases)
    finally:
        for place in places:
            place.pool.close()


def part_of(cases: Sequence[Case], part: str) -> Sequence[Case]:
    """`2/3`: the second of three equal parts."""
    number, _, parts = part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise SystemExit(f'--part "{part}" is no part; write it like 1/2 and 2/2')
    size = -(-len(cases) // int(parts))
    return cases[(int(number) - 1) * size : int(number) * size]
