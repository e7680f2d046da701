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
from cuboid.telemetry.heartbeat_reader import Reading

JUDGEMENT = "judgement"
PATIENCE = 5.0
"""Seconds between the first node that finds the job standing still and the last: they read the same silence."""


def judge_with_all(here: Place, patience: float = PATIENCE) -> Callable[[list[Reading]], Diagnosis]:
    """For a watchdog: who holds up the job, by what all nodes noted that showed it in time. The node of rank 0 judges
    for all: if each read what all others noted, that would grow with the square of the nodes. Which ranks a node has,
    and how many, its readings tell. `here`: the place of a rank of this node."""
    if here.local_world_size == here.world_size:
        return diagnose

    def judge(own: list[Reading]) -> Diagnosis:
        from cuboid.launch.rendezvous import reach_store  # which brings torch

        until = time.monotonic() + patience
        try:
            # The node that judges may wait so long for the others.
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=2 * patience))
            if all(reading.rank for reading in own):
                key = _key(store.add("nodes that show", 1))
                store.set(key, json.dumps([reading.as_json() for reading in own]))
                culprits, sentence = json.loads(store.get(JUDGEMENT))
                return Diagnosis(tuple(culprits), sentence)
            found, number = list(own), 1
            with suppress(RuntimeError):  # no more nodes have come in time
                while len(found) < here.world_size:
                    store.wait([_key(number)], timedelta(seconds=max(0.01, until - time.monotonic())))
                    found += [Reading.from_json(table) for table in json.loads(store.get(_key(number)))]
                    number += 1
            judged = diagnose(found)
            store.set(JUDGEMENT, json.dumps([judged.culprits, judged.sentence]))
            return judged
        except RuntimeError:  # a node that is cut off judges by what it sees itself
            return diagnose(own)

    return judge


def stand_still_everywhere(here: Place, patience: float = PATIENCE) -> Callable[[bool], bool]:
    """For a watchdog: counts the ranks of nodes whose ranks all wait for others, in one number of the store. It says
    whether that is every rank. A node that cannot reach the store leaves the judgement to the others."""
    if here.local_world_size == here.world_size:
        return bool
    counted = False

    def everywhere(stands: bool) -> bool:
        nonlocal counted
        from cuboid.launch.rendezvous import reach_store

        with suppress(RuntimeError):
            store = reach_store(here.master_address, here.master_port, here.attempt, timedelta(seconds=patience))
            number = store.add("ranks that stand still", (int(stands) - int(counted)) * here.local_world_size)
            counted = stands
            return stands and int(number) >= here.world_size
        return False

    return everywhere


def _key(number: int) -> str:
    return f"readings/{number}"
