"""What the ranks of all nodes noted last, brought together through the store where they met: who holds up a job may be
on another node than those that wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from cuboid.launch.place import Place
from cuboid.launch.rendezvous import reach_store
from cuboid.resilience.reading import Reading

PATIENCE = 5.0
"""Seconds between the first node that finds the job standing still and the last: they read the same silence."""


def share_with_all(places: tuple[Place, ...], patience: float = PATIENCE) -> Callable[[list[Reading]], list[Reading]]:
    """For a watchdog: shows a node's own readings to the others and returns those of all that showed theirs in time.
    `places`: of this node's ranks."""
    here = places[0]
    if len(places) == here.world_size:
        return list

    def share(own: list[Reading]) -> list[Reading]:
        until = time.monotonic() + patience
        found = list(own)
        with suppress(RuntimeError):  # a node that is cut off judges by what it sees itself
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=patience))
            store.set(_key(here.rank), json.dumps([reading.as_json() for reading in own]))
            for first in range(0, here.world_size, len(places)):
                if first != here.rank:
                    left = timedelta(seconds=max(0.1, until - time.monotonic()))
                    with suppress(RuntimeError):
                        store.wait([_key(first)], left)
                        found += [Reading.from_json(table) for table in json.loads(store.get(_key(first)))]
        return found

    return share


def stand_still_everywhere(places: tuple[Place, ...], patience: float = PATIENCE) -> Callable[[bool], bool]:
    """For a watchdog: counts the nodes whose ranks all wait for others, in one number of the store. It says whether
    that is every node. A node that cannot reach the store leaves the judgement to the others."""
    here = places[0]
    nodes = here.world_size // len(places)
    if nodes == 1:
        return bool
    counted = False

    def everywhere(stands: bool) -> bool:
        nonlocal counted
        with suppress(RuntimeError):
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=patience))
            number = store.add("nodes that stand still", int(stands) - int(counted))
            counted = stands
            return stands and int(number) >= nodes
        return False

    return everywhere


def _key(first_rank: int) -> str:
    return f"readings/{first_rank}"
