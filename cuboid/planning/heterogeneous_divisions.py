"""Ways to divide groups of accelerators into lines of replicas, and lines into stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import gcd

from cuboid.planning.heterogeneous import Line, Machines
from cuboid.planning.space import divisors

FEW = 4
"""Up to so many groups every division is tried."""
DEEPEST = 64
"""The most pipeline ranks."""


def line_sets(machines: Machines) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to divide two groups or more into lines, each a tuple of groups in pipeline order."""
    groups = machines.groups.groups
    every = range(len(groups))
    if len(groups) <= FEW:
        for size in range(2, len(groups) + 1):
            for some in combinations(every, size):
                for parts in _partitions(some):
                    yield from product(*map(_orders, parts))
        return
    kinds: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        kinds.setdefault(group.cluster.accelerator, []).append(place)
    names = list(kinds)
    for size in range(len(names), 0, -1):
        for chosen in combinations(names, size):
            some = tuple(sorted(place for name in chosen for place in kinds[name]))
            if len(some) < 2:
                continue
            sites: dict[str, list[int]] = {}
            for place in some:
                sites.setdefault(groups[place].site, []).append(place)
            yield tuple((place,) for place in some)
            if len(some) <= 2 * FEW:
                yield (some,)
            if 1 < len(sites) < len(some):
                yield tuple(tuple(part) for part in sites.values())
                yield tuple(tuple(reversed(part)) for part in sites.values())


def _partitions(members: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide them into parts, by the first member of each."""
    if not members:
        yield []
        return
    first, rest = members[0], members[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = [each for each in rest if each not in others]
            for parts in _partitions(left):
                yield [(first, *others), *parts]


def _orders(part: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(permutations(part)) if len(part) <= 3 else [part, part[::-1]]


def cut(chosen: tuple[tuple[int, ...], ...], sizes: dict[int, int], tp: int, layers: int) -> Iterator[tuple[Line, ...]]:
    """Every pp at which each group has whole stages, and all lines have the same number of stages."""
    totals = [sum(sizes[group] for group in line) for line in chosen]
    common = gcd(*totals)
    for pp in divisors(common // tp) if common % tp == 0 else ():
        if pp > min(layers, DEEPEST):
            break
        lines = []
        for line, total in zip(chosen, totals, strict=True):
            replicas = total // (tp * pp)
            if any(sizes[group] % (replicas * tp) for group in line):
                break
            stages = tuple(group for group in line for _ in range(sizes[group] // (replicas * tp)))
            lines.append(Line(stages, replicas))
        else:
            yield tuple(lines)
