"""`cuboid train` in a process of its own: run to its end, or in flight with all its ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

SHORT = ["training.steps=3", "training.global_batch=4", "training.sequence=16", "training.device=cpu"]
MARK = "CUBOID_TEST_MARK"
"""A variable whose value tells the processes of one test from all others."""


def train(*arguments: str, fields: list[str] | None = None) -> list[str]:
    settings = [argument for field in fields or SHORT for argument in ("--set", field)]
    return ["-m", "cuboid.cli.main", "train", *arguments, *settings]


def environment(**more: str) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not re.match("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_", key)
    }
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=900
    )


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Training:
    """A long training in flight, and all its processes."""

    def __init__(
        self, folder: Path, layout: str, *fields: str, options: Sequence[str] = (), variables: Mapping[str, str] = {}
    ) -> None:
        self.mark = uuid4().hex
        self.folder = folder
        fields = (*SHORT, "training.steps=100000", *fields)
        self.log = folder / f"{self.mark}.log"
        """What it prints; a pipe that nobody reads would stop it when full."""
        self.command = subprocess.Popen(
            [sys.executable, *train("--layout", layout, *options, fields=list(fields))],
            cwd=folder,
            env=environment(**{MARK: self.mark}, **variables),
            stdout=self.log.open("w"),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell that runs this in the background leaves Ctrl-C ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait_for_a_step(self, step: int = 1) -> None:
        metrics = self.folder / "runs/default/metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """While the training continues."""
        limit = time.monotonic() + 600
        while not happened():
            assert self.command.poll() is None, self.command.communicate()
            assert time.monotonic() < limit
            time.sleep(0.05)

    def processes(self) -> dict[int, int]:
        """Process -> its parent, of all that live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        found[int(folder.name)] = int(parent)
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Rank processes, which are children of a child of the command, in the order they were started. The system
        counts its processes up to a limit, and then from the beginning again."""
        found = self.processes()
        ranks = sorted(process for process, parent in found.items() if found.get(parent) == self.command.pid)
        limit = int(Path("/proc/sys/kernel/pid_max").read_text())
        begun_again = bool(ranks) and ranks[-1] - ranks[0] > limit // 2
        return sorted(ranks, key=lambda process: process + limit * (begun_again and process < limit // 2))

    def listening(self) -> set[str]:
        """Addresses, as the system writes them in hexadecimal, on which any process of the training listens."""
        return {place.partition(":")[0] for place in self._listening(self.processes())}

    def listening_ports(self, of_ranks: bool = True) -> set[int]:
        """`of_ranks`: also those of its ranks."""
        processes = self.processes() if of_ranks else [self.command.pid]
        return {int(place.partition(":")[2], 16) for place in self._listening(processes)}

    def _listening(self, processes: Iterable[int]) -> set[str]:
        sockets = set()
        for process in processes:
            for handle in Path(f"/proc/{process}/fd").glob("*"):
                with suppress(OSError):
                    sockets.add(os.readlink(handle))
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said, but for slow ranks: what else the machine does decides which are."""
        _, errors = self.command.communicate(timeout=300)
        kept = [line for line in errors.splitlines(keepends=True) if " is slow: " not in line]
        return self.command.returncode, "".join(kept)

    def assert_nothing_is_left(self) -> None:
        limit = time.monotonic() + 120
        while self.processes():
            assert time.monotonic() < limit, self.processes()
            time.sleep(0.05)
