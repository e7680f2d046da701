"""The other islands, as one rank asks them for blocks of a fragment: each of their ranks for the blocks that both
own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor

from cuboid.islands.links import Counts, Link
from cuboid.spec.block_owners import overlap, runs_of_blocks
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run

AT_ONCE = 16
"""Owners of other islands that are asked at once, at most."""


class Peers:
    """As this rank knows them."""

    def __init__(self, run: Run, number: int, rank: int, secret: bytes, counts: Counts) -> None:
        self._run, self._number, self._secret, self._counts = run, number, secret, counts
        self.known: dict[int, dict[str, Any]] = {}
        """Layouts and addresses of islands."""
        self.blocks = [runs_of_blocks(run, each, rank) for each in range(run.islands.fragments)]
        """Of each fragment what this rank owns."""
        self._runs: dict[tuple[int, str], Run] = {}
        self._links: dict[tuple[str, int], Link] = {}

    def learn(self, islands: dict[int, dict[str, Any]]) -> None:
        self.known |= islands

    def questions(
        self,
        kind: bytes,
        number: int,
        fragment: int,
        round_: int,
        into: Tensor,
        wanted: Callable[[], bool],
        patience: float,
    ) -> list[Callable[[], list[int]]]:
        """For each rank of another island that has some of what this rank owns."""
        other, addresses = self._run_of(number), self.known[number]["addresses"]
        own = self.blocks[fragment]
        places, before = [], 0
        for first, stop in own:
            places.append((first, before))
            before += stop - first
        found: list[Callable[[], list[int]]] = []
        for rank, (host, port) in enumerate(addresses):
            shared = overlap(own, runs_of_blocks(other, fragment, rank))
            if not shared:
                continue
            link = self._links.setdefault((host, port), Link(host, port, self._secret, self._counts))
            parts = []
            for first, stop in shared:
                begin = next(place + first - low for low, place in reversed(places) if low <= first)
                parts.append(((first, stop), into[begin : begin + stop - first]))

            def ask(link: Link = link, parts: list[Any] = parts) -> list[int]:
                return [link.fetch(kind, fragment, round_, run, part, wanted, patience) for run, part in parts]

            found.append(ask)
        return found

    def _run_of(self, number: int) -> Run:
        """This run as another island has it, for what its ranks keep."""
        key = number, self.known[number]["layout"]
        if key not in self._runs:
            spec, training = self._run.islands, self._run.training
            batch = training.global_batch // spec.weight_of(self._number) * spec.weight_of(number)
            training = replace(training, global_batch=batch)
            self._runs[key] = replace(self._run, layout=Layout.parse(key[1]), training=training)
        return self._runs[key]


def at_once(todo: list[Callable[[], object]]) -> None:
    if len(todo) < 2:
        for each in todo:
            each()
        return
    with ThreadPoolExecutor(min(len(todo), AT_ONCE)) as pool:
        for future in [pool.submit(each) for each in todo]:
            future.result()
