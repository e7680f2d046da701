"""What the ranks of all nodes noted last, brought together through the store where they met: who holds up a job may be
on another node than those that wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from cuboid.launch.place import Place
from cuboid.resilience.diagnosis import Diagnosis, diagnose
from cuboid.resilience.reading import Reading

JUDGEMENT = "judgement"
PATIENCE = 5.0
"""Seconds between the first node that finds the job standing still and the last: they read the same silence."""


def judge_with_all(places: tuple[Place, ...], patience: float = PATIENCE) -> Callable[[list[Reading]], Diagnosis]:
    """For a watchdog: who holds up the job, by what all nodes noted that showed it in time. The first node judges for
    all: if each read what all others noted, that would grow with the square of the nodes. `places`: of this node's
    ranks."""
    here = places[0]
    if len(places) == here.world_size:
        return diagnose

    def judge(own: list[Reading]) -> Diagnosis:
        from cuboid.launch.rendezvous import reach_store  # which brings torch

        until = time.monotonic() + patience
        try:
            # The first node may wait so long for the others.
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=2 * patience))
            if here.rank:
                store.set(_key(here.rank), json.dumps([reading.as_json() for reading in own]))
                culprits, sentence = json.loads(store.get(JUDGEMENT))
                return Diagnosis(tuple(culprits), sentence)
            found = list(own)
            for first in range(len(places), here.world_size, len(places)):
                with suppress(RuntimeError):
                    store.wait([_key(first)], timedelta(seconds=max(0.01, until - time.monotonic())))
                    found += [Reading.from_json(table) for table in json.loads(store.get(_key(first)))]
            judged = diagnose(found)
            store.set(JUDGEMENT, json.dumps([judged.culprits, judged.sentence]))
            return judged
        except RuntimeError:  # a node that is cut off judges by what it sees itself
            return diagnose(own)

    return judge


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
        from cuboid.launch.rendezvous import reach_store

        with suppress(RuntimeError):
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=patience))
            number = store.add("nodes that stand still", int(stands) - int(counted))
            counted = stands
            return stands and int(number) >= nodes
        return False

    return everywhere


def _key(first_rank: int) -> str:
    return f"readings/{first_rank}"
