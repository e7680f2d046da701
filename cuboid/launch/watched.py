"""Ranks under a watchdog that names a hang, where no supervisor watches them: those of a command that starts its own,
and those that torchrun or srun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cuboid.errors import RankError
from cuboid.launch.place import Place
from cuboid.launch.readings import judge_with_all, stand_still_everywhere
from cuboid.resilience.stacks import offer_stack
from cuboid.resilience.watchdog import Watchdog, shared_folder
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT


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
    see. Its ranks are those that show themselves in a folder of the node, whatever their numbers: `srun
    --distribution=cyclic` deals them round the nodes, and nodes may have different numbers of them."""
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
    with Watchdog(run, place.local_world_size, judge, everywhere, folder, announce):
        yield
