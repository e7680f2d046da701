"""Ranks under a watchdog that names a hang, on one node or on all of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from cuboid.errors import RankError
from cuboid.launch.place import Place
from cuboid.resilience.diagnosis import Diagnosis, diagnose
from cuboid.resilience.hang_dumps import offer_stack
from cuboid.resilience.second_watch import Looks, second_watch
from cuboid.resilience.watchdog import Watchdog, shared_folder
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT, Reading

# What the ranks of all nodes noted last, brought together through the store where they met: who holds up a job may be
# on another node than those that wait.


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


# Ranks under a watchdog that names a hang, where no supervisor watches them: those of a command that starts its own,
# and those that torchrun or srun started.


def show(folder: str | Path, rank: int) -> None:
    """Called by a rank as it begins: the watchdog sees what it does in this folder, and gets its stacks there."""
    offer_stack(folder, rank)
    HEARTBEAT.open(folder, rank)


def beside(run: Run) -> Run:
    """For commands that write nothing into the run's folder: reports of a hang go beside it."""
    return replace(run, output=replace(run.output, folder=f"{run.output.folder}-hangs"))


@contextmanager
def watched(run: Run, places: tuple[Place, ...]) -> Iterator[str]:
    """Around the ranks that this process starts on this machine; gives the folder for `show`. A rank that is missed
    because the watchdog has ended it is a `HangError`."""
    ranks = [place.rank for place in places]
    with Watchdog(run, ranks, judge_with_all(places[0]), stand_still_everywhere(places[0])) as watchdog:
        try:
            yield str(watchdog.folder)
        except RankError:
            watchdog.explain()
            raise


def attempt() -> str:
    """torchrun starts failed ranks again at the same store, where what they had said still stands."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def watched_by_the_first(run: Run, place: Place | None) -> Iterator[None]:
    """Around a rank that torchrun or srun started, or the only one. No supervisor watches such ranks, so the first rank
    of each node does: it names a hang, keeps stacks and flight recorders, and ends the ranks for their launcher to
    see; a process beside it ends the first rank if that does so no more. Its ranks are those that show themselves in a
    folder of the node, whatever their numbers: `srun --distribution=cyclic` deals them round the nodes, and nodes may
    have different numbers of them."""
    if place is None or place.world_size == 1:
        yield
        return
    # Slurm and torchrun number nodes; several may be one machine.
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    # The port tells jobs apart that one process starts, at once or one after another.
    folder = shared_folder(f"{attempt()}-{node}-{place.master_port}")
    show(folder, place.rank)
    if place.local_rank:
        yield
        return
    here = replace(place, attempt=f"{attempt()}/watch")

    def announce(sentence: str) -> None:
        print(f"error: {sentence}", file=sys.stderr, flush=True)

    judge, everywhere = judge_with_all(here), stand_still_everywhere(here)
    looks, spec = Looks(folder), run.resilience
    second = second_watch(folder, place.rank, spec.hang_floor_seconds, spec.setup_seconds)
    with (
        second if spec.hang_factor else nullcontext(),  # a job that may stand still for ever
        Watchdog(run, place.local_world_size, judge, everywhere, folder, announce, looks=looks),
    ):
        yield
