"""Starts the ranks of a training on this machine through PyTorch's elastic launcher, or joins those already started,
and starts them again when one fails, as long as the training gets on.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cuboid.errors import RankError, UserError, printable
from cuboid.launch.disk_room import DiskRoom
from cuboid.launch.place import Place, find_place, local_places
from cuboid.launch.pool import fork_server
from cuboid.launch.watched import judge_with_all, stand_still_everywhere
from cuboid.resilience.goodput import Failure, note_failure, seconds_since
from cuboid.resilience.preemption import REQUEUE, Forwarder, Listener
from cuboid.resilience.rebalance import Pace
from cuboid.resilience.watchdog import Watchdog
from cuboid.schedule.table import uncollected
from cuboid.spec.fitting import check_world_size
from cuboid.spec.run import Run
from cuboid.training.run_folder import REPORTS, forget_reports, newest_kept

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome

# Starts a training again when a rank fails, for as long as it gets on.


class Restarts:
    """Whether a run that failed is worth another attempt; keeps the log of its failures."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._fruitless = 0
        self._reached = newest_kept(run)

    def failed(self, kind: str, node: str, reason: str, layout: str) -> str:
        """The sentence to give up with; empty: start again."""
        step = newest_kept(self._run)
        self._fruitless = 0 if step > self._reached else self._fruitless + 1
        self._reached = max(step, self._reached)
        most = self._run.resilience.restarts
        # 0 is never: not even after an attempt that made a checkpoint, which is not fruitless.
        again = self._run.checkpoint.keeps and most > 0 and self._fruitless <= most
        now, lost = datetime.now(UTC).isoformat(timespec="seconds"), seconds_since(self._run, step)
        note_failure(self._run, Failure(now, reason, step, again, kind, node, layout, lost))
        if again:
            return ""
        return f"{reason}; {self._fruitless} attempts in a row made no checkpoint" if self._fruitless > 1 else reason


def supervise(run: Run, attempt: Callable[[], Outcome], asked: Callable[[], bool] = lambda: False) -> Outcome:
    """`attempt` trains to the end, from the newest checkpoint; it raises `RankError` when a rank fails. `asked`:
    whether the job is to stop.

    What the user must mend (`UserError`) and what the user asked for (a signal) passes through."""
    restarts, has_room = Restarts(run), DiskRoom(run)
    while True:
        try:
            return attempt()
        except RankError as error:
            if verdict := restarts.failed(error.kind, "", str(error), str(run.layout)):
                raise RankError(verdict) from None
            print(printable(f"warning: {error}; starting again"), file=sys.stderr, flush=True)
            while not has_room():
                if asked():  # there is nothing to save
                    raise SystemExit(REQUEUE) from None
                time.sleep(1)


# Start a training: the ranks of this machine through PyTorch's elastic launcher, or join those already started.


def check_machine(run: Run, place: Place | None, options: Mapping[str, str | None] | None = None) -> None:
    """What depends on where the run starts, refused before it does: the ranks there are, the GPU that is asked for or
    that something else needs. `options`: device and backend as the command line has them, to be named so."""
    if place is not None:
        check_world_size(run.layout, place.world_size)
    needs = [name for name in ("overlap_tensor", "cuda_graphs") if getattr(run.training, name) == "on"]
    if run.training.device == "cuda" or run.training.backend == "nccl" or needs:
        from cuboid.launch.backend import refuse_backend  # they bring torch, for which others need not wait
        from cuboid.parallel.device import choose_device

        def named(name: str) -> str:
            return f"--{name}" if (options or {}).get(name) == getattr(run.training, name) else f"training.{name}"

        device = choose_device(run.training.device, 0, named("device"))
        refuse_backend(run.training.backend, device, named("backend"))
        if needs and device.type != "cuda":
            raise UserError(
                f"training.{needs[0]}=on needs a GPU and this machine has no usable one; use training.{needs[0]}=auto"
            )


def start_training(run: Run, quiet: bool = False) -> Outcome:
    if find_place(os.environ) is None and run.layout.world_size > 1:
        with Forwarder(run) as signals:
            return supervise(run, lambda: _launch_here(run, quiet, signals), lambda: signals.asked)
    with Listener(run) as signals:
        from cuboid.launch.rank import run_joined_rank

        return run_joined_rank(run, signals, quiet)


def _launch_here(run: Run, quiet: bool, signals: Forwarder) -> Outcome:
    """One attempt with all ranks on this machine: they meet on loopback, whatever the host's name resolves to, and
    nobody else can."""
    forget_reports(run)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    listener = socket.create_server(("127.0.0.1", 0))
    ranks, port = run.layout.world_size, listener.getsockname()[1]
    start_fork_server(run, signals)
    from cuboid.launch.rendezvous import serve_store

    store = serve_store(listener)
    try:
        return launch(run, quiet, signals, local_places(ranks, 0, ranks, "127.0.0.1", port, "attempt"))
    finally:
        del store  # which served the ranks until here


def start_fork_server(run: Run, signals: Forwarder) -> None:
    """It imports torch for all ranks while this process imports it for the agent. What ranks find in their environment
    is what stands in it now."""
    os.environ["OMP_NUM_THREADS"] = str(run.training.threads_per_rank)
    fork_server()
    resource_tracker.ensure_running()  # which leaves SIGTERM unblocked
    signals.block()
    forkserver.ensure_running()
    with uncollected():  # of what is imported nothing is garbage, and looking took a sixth of the time
        import_module("cuboid.launch.rank")


def launch(
    run: Run,
    quiet: bool,
    signals: Forwarder,
    places: tuple[Place, ...],
    told: Callable[[Pace], None] | None = None,
) -> Outcome:
    """One attempt with these ranks on this machine: from the newest checkpoint to the end, or to the first failure.
    `told`: as `Watchdog` has it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from cuboid.launch.rank import run_started_rank
    from cuboid.launch.rendezvous import BACKEND

    configure = partial(
        LaunchConfig,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(places),
        rdzv_backend=BACKEND,
        local_addr="127.0.0.1",
        run_id=f"cuboid-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT" if signals.active else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    logging.disable(logging.ERROR)  # the agent tells at length what is said below in one sentence
    pids = fork_server().RawArray("q", len(places))
    signals.follow(pids)
    ranks_here = [place.rank for place in places]
    watchdog = Watchdog(run, ranks_here, judge_with_all(places[0]), stand_still_everywhere(places[0]), told=told)
    reports: list[Report] = []
    try:
        with watchdog:
            # Else the agent makes a folder for them that nobody removes.
            logs = DefaultLogsSpecs(log_dir=str(watchdog.folder / "agent"))
            ranks = elastic_launch(configure(logs_specs=logs), run_started_rank)
            try:
                outcomes: dict[int, Outcome] = ranks(run, quiet, places, pids, str(watchdog.folder))
            finally:
                reports += failure_reports(watchdog.folder)
    except SignalException as stop:
        _stopped_by(stop.sigval)
    except ChildFailedError as error:
        watchdog.explain()
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:  # Ctrl-C reaches ranks and agent alike, and a rank was seen first
            _stopped_by(signal.SIGINT)
        code = signals.code or failure.exitcode
        if signals.active and code in (REQUEUE, 128 + signal.SIGTERM):  # said by the process that decided it
            raise SystemExit(code) from None
        _explain_failure(run, places[rank].rank, failure.exitcode, reports)
    finally:
        signals.follow([])  # the system may give their numbers to others
        logging.disable(logging.NOTSET)
    return outcomes[0]


def _stopped_by(sent: signal.Signals) -> NoReturn:
    print(f"stopped by {sent.name}", file=sys.stderr)
    raise SystemExit(128 + sent)


@dataclass(frozen=True)
class Report:
    """What a rank left of its failure."""

    rank: int
    time: int
    path: Path
    text: str


def failure_reports(folder: Path) -> list[Report]:
    found = []
    for path in folder.glob(REPORTS):
        with suppress(OSError, ValueError):
            rank = int(path.stem.partition("-")[2])
            found.append(Report(rank, path.stat().st_mtime_ns, path, path.read_text(errors="replace")))
    return found


def _explain_failure(run: Run, rank: int, exit_code: int, aside: Sequence[Report] = ()) -> NoReturn:
    """`rank` is the first that was seen to end. If it left no report it was killed, else the first report is the cause:
    whoever fails because another has failed reports later. `aside`: reports that the run's folder did not take."""
    kept = failure_reports(Path(run.output.folder))
    reports = [*kept, *aside]
    if all(report.rank != rank for report in reports):
        raise RankError(f"rank {rank} failed: {_ending(exit_code)}") from None
    first = min(reports, key=lambda report: report.time)
    sentence = first.text.partition("\n")[0] or "it left an empty report"
    for kind in (UserError, RankError):  # whose sentences say it all
        if sentence.startswith(f"cuboid.errors.{kind.__name__}: "):
            raise kind(sentence.partition(": ")[2]) from None
    where = f"; its traceback is in {first.path}" if first in kept else ""
    raise RankError(f"rank {first.rank} failed: {sentence}{where}") from None


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"it was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
