"""Somebody watches the watchdog where it is a thread of a rank: real processes that are stopped, killed, or stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.command import SHORT, environment, run, train

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Rank:
    def __init__(self, folder: Path, does: str, floor: float, setup: float = 60) -> None:
        words = ["-m", "tests.resilience.watched_rank", folder, does, floor, setup]
        pipe, variables = subprocess.PIPE, environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", CUBOID_NODE="a")
        command = [sys.executable, *map(str, words)]
        self.process = subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"begun\n"
        (self.watch,) = psutil.Process(self.process.pid).children()
        maps = Path(f"/proc/{self.watch.pid}/maps")
        wait_until(lambda: f"{folder}/rank-00000" in maps.read_text())  # it looks

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def ended(self) -> tuple[int, str]:
        """Nobody else keeps its pipes open."""
        told = self.process.communicate(timeout=60)[1].decode()
        wait_until(lambda: not is_alive(self.watch))
        return self.process.returncode, told


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def begin(does: str, floor: float, setup: float = 60) -> Rank:
        ranks.append(Rank(tmp_path, does, floor, setup))
        return ranks[-1]

    yield begin
    for rank in ranks:
        for process in (rank.process, rank.watch):
            with suppress(psutil.Error):
                process.kill()
        rank.process.communicate(timeout=60)


def test_a_rank_that_keeps_pythons_lock_is_named_and_ended(begin: Callable[..., Rank]) -> None:
    assert begin("keeps the lock", 2).ended() == (
        -signal.SIGKILL,
        "error: rank 0 hangs in step 8, and the watchdog of this node with it; silent for 2.0 s, limit 2.0 s "
        "(resilience.hang_floor_seconds=2)\n",
    )


def test_a_rank_that_is_stopped_while_it_sets_up_has_the_time_of_that(begin: Callable[..., Rank]) -> None:
    rank = begin("sets up", 1, 4)
    rank.stop()
    began = time.monotonic()
    code, told = rank.ended()
    assert time.monotonic() - began > 3.5
    assert code == -signal.SIGKILL
    assert told.startswith("error: rank 0 is stopped by a signal while it sets up, and the watchdog of this node with")
    assert told.endswith("(resilience.setup_seconds=4)\n")


@pytest.mark.parametrize("does", ["looks", "trains"])
def test_one_that_still_looks_or_trains_is_left_alone(begin: Callable[..., Rank], does: str) -> None:
    """A watchdog that waits for a disk is no reason to end a rank that gets on; nor is a rank that waits for others."""
    rank = begin(does, 1)
    os.killpg(rank.process.pid, signal.SIGINT)  # as a terminal does, and a scheduler: the rank answers
    os.killpg(rank.process.pid, signal.SIGTERM)
    time.sleep(5)
    assert rank.process.poll() is None and is_alive(rank.watch)


def test_time_in_which_nobody_runs_does_not_count(begin: Callable[..., Rank]) -> None:
    """As when the machine is suspended, its clock is set, or a scheduler stops the whole job."""
    rank = begin("looks", 3)
    os.killpg(rank.process.pid, signal.SIGSTOP)
    time.sleep(6)
    rank.watch.send_signal(signal.SIGCONT)
    time.sleep(0.7)
    rank.process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert rank.process.poll() is None and is_alive(rank.watch)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_watch_ends_at_once_with_its_rank(begin: Callable[..., Rank], stopped: bool) -> None:
    rank = begin("looks", 60)
    assert not [name for name in rank.watch.environ() if name.startswith(("RANK", "LOCAL_", "WORLD_SIZE", "CUBOID_"))]
    if stopped:
        rank.watch.send_signal(signal.SIGSTOP)
    rank.process.kill()
    assert rank.ended() == (-signal.SIGKILL, "")


def test_a_first_rank_of_torchrun_that_is_stopped_does_not_keep_the_job(tmp_path: Path) -> None:
    fields = [*SHORT, "training.steps=100000", "resilience.hang_floor_seconds=5"]
    ended = run([*LAUNCHER, *train("--layout", "dp=2", "--inject", "stop rank=0 step=8", fields=fields)], tmp_path)
    assert ended.returncode
    assert "error: rank 0 is stopped by a signal in step 8, and the watchdog of this node with it" in ended.stderr
