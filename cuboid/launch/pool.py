"""A pool of rank processes on this machine, for jobs of a second: torch is imported once, and processes are reused.

    with Pool() as pool:
        results = pool.run("package.module:function", (argument,), ranks=8)  # calls function(rank, argument)

A fork server imports torch and Cuboid once; each rank is a fork of it, so it starts in milliseconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name
from typing import Any, NamedTuple

import psutil

from cuboid.errors import RankError, UserError
from cuboid.launch.place import Place, local_places
from cuboid.telemetry.shared_memory import name_semaphores, place_sockets, sweep

# A rank process ends with the process that asked for it, however that one ends.


def follow_parent() -> None:
    """Called by a rank process as it begins. Its parent in the system is the fork server, which lives as long as any
    rank does, so nothing else would end a rank whose launcher was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too; it has nothing to say about it
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()


def _leave_with_parent(server: int) -> None:
    """`server`: the fork server."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # A rank that is stopped (SIGSTOP) notices nothing, and would stay for ever: whoever notices ends it too.
        with suppress(psutil.Error):
            if os.getppid() == server:
                for rank in psutil.Process(server).children():
                    if rank.pid != os.getpid():
                        rank.kill()
        os._exit(1)


PRELOADED = ["cuboid.launch.preload"]
LINGER = 2.0
"""Seconds after a failure in which other ranks are still heard: one of them may have been the first to fail."""


class Watch(NamedTuple):
    """What ranks tell a watchdog of the process that asks for their job."""

    heartbeats: str
    """The folder in which it sees what they do."""
    reports: str
    """The folder in which their flight recorders write."""


class Answer(NamedTuple):
    """What a rank says when its job is over."""

    outcome: str
    """done, refused (the user's to mend), failed, or died; joined or said: its job continues."""
    value: Any
    """The result, the sentence, the traceback, what the ranks found when they joined, or what it said."""
    moment: float
    """On the clock all processes of the machine share."""


def fork_server() -> Any:
    """The multiprocessing context whose processes come with torch imported."""
    # Read when torch is imported, so set before: setting torch's own number later leaves a helper thread running.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch's allocator gives freed memory back after ten milliseconds, in which a rank that shares a core may not run
    # at all; taking it again page by page costs a tenth of a step.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # NCCL's group warns of each communicator for messages, which the pipeline makes on purpose.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Of what a rank that was ended leaves behind, Python's tracker clears what it warns of.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    sweep()
    name_semaphores()
    place_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(connection: Connection) -> None:
    """A rank process: run what is asked, one job after another, until the pipe closes."""
    import torch
    import torch.distributed as dist

    from cuboid.launch.backend import join_world
    from cuboid.launch.rendezvous import reach_store
    from cuboid.launch.watched import show
    from cuboid.parallel.device import choose_device
    from cuboid.resilience.faults import arm
    from cuboid.resilience.hang_dumps import offer_record
    from cuboid.telemetry.heartbeat import HEARTBEAT
    from cuboid.training.device_progress import device_progress

    follow_parent()
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, place, folder, timeout, device, backend, talks, watch = connection.recv()
        except EOFError:
            return
        try:
            rank, ranks = place.rank, place.world_size
            progress: AbstractContextManager[None] = nullcontext()
            if watch is not None:
                show(watch.heartbeats, rank)
                arm(HEARTBEAT, rank, watch.heartbeats)
            if ranks > 1:
                if place.attempt:
                    store = reach_store(place.master_address, place.master_port, place.attempt)
                else:
                    store = dist.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
                limit = timedelta(seconds=timeout)
                chosen = choose_device(device, place.local_rank)
                if watch is not None and chosen.type == "cuda":
                    offer_record(watch.reports, watch.heartbeats, torch.__version__)
                with HEARTBEAT.everybody("world", ranks).collective("join"):
                    joined = join_world(store, rank, ranks, chosen, backend, limit)
                    own = [chosen.index] if joined.backend == "nccl" else None
                    dist.barrier(device_ids=own)  # a rank with little to do would leave before another has reached it
                if watch is not None:
                    progress = device_progress(chosen)
                if rank == 0:
                    told = {**joined.as_json(), "sentence": joined.sentence}
                    connection.send(Answer("joined", told, time.monotonic()))
            say = (lambda value: connection.send(Answer("said", value, time.monotonic())),) if talks else ()
            with progress:
                result = resolve_name(function)(rank, *say, *arguments)
            if ranks > 1:
                dist.destroy_process_group()
            # Engines hold on to themselves in circles, and to groups whose threads would wake a hundred times a second.
            gc.collect()
            connection.send(Answer("done", result, time.monotonic()))
        except UserError as error:
            connection.send(Answer("refused", str(error), time.monotonic()))
        except BaseException:
            connection.send(Answer("failed", traceback.format_exc(), time.monotonic()))
            return


def _receive(connection: Connection) -> Answer:
    try:
        answer: Answer = connection.recv()
        return answer
    except (EOFError, ConnectionResetError):
        # Who said nothing died before anybody could miss it.
        return Answer("died", None, 0.0)


class Pool:
    def __init__(self) -> None:
        self._context = fork_server()
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: str,
        arguments: tuple[Any, ...] = (),
        *,
        ranks: int,
        timeout: float = 300,
        device: str = "cpu",
        backend: str = "auto",
        heard: Callable[[Any], None] | None = None,
        joined: Callable[[dict[str, Any]], None] | None = None,
        places: tuple[Place, ...] = (),
        watch: Watch | None = None,
    ) -> list[Any]:
        """`function(rank, *arguments)` on each of `ranks` processes joined in one process group; their results in
        order. `device` and `backend`: as a run's settings have them. With `heard` it is `function(rank, say,
        *arguments)`: what a rank says on its way is heard here at once. `joined` is told the backend and the GPUs
        (`Joined.as_json`, and its `sentence`) when several ranks have joined. `places`: of these ranks among those of
        other machines; by default they are all there are. `watch`: where a watchdog looks at them.

        The function is given by name, so that this process need not import what only the ranks use."""
        self._start(ranks)
        with tempfile.TemporaryDirectory(prefix="cuboid-") as folder:
            connections = [connection for _, connection in self._ranks[:ranks]]
            places = places or local_places(ranks, 0, ranks, "", 0, "")
            for place, connection in zip(places, connections, strict=True):
                talks = heard is not None
                connection.send((function, arguments, place, folder, timeout, device, backend, talks, watch))
            return self._results(connections, timeout, heard, joined, places[0].rank)

    def run_apart(
        self,
        function: str,
        jobs: Sequence[tuple[tuple[Any, ...], int]],
        *,
        timeout: float = 300,
        device: str = "cpu",
        backend: str = "auto",
    ) -> list[list[Any]]:
        """Several jobs at once, each with its arguments on so many ranks, which know nothing of the others."""
        self._start(sum(ranks for _, ranks in jobs))
        with tempfile.TemporaryDirectory(prefix="cuboid-") as folder:
            begins, first = [], 0
            for number, (arguments, ranks) in enumerate(jobs):
                own = os.path.join(folder, str(number))
                os.mkdir(own)
                for place in local_places(ranks, 0, ranks, "", 0, ""):
                    _, connection = self._ranks[first + place.rank]
                    connection.send((function, arguments, place, own, timeout, device, backend, False, None))
                begins.append(first)
                first += ranks
            found = self._results([connection for _, connection in self._ranks[:first]], timeout)
        return [found[begin : begin + ranks] for begin, (_, ranks) in zip(begins, jobs, strict=True)]

    def _start(self, ranks: int) -> None:
        """So many, at least."""
        if any(connection.poll() for _, connection in self._ranks):
            self.close()  # an idle rank has nothing to say: what can be read there is its end
        while len(self._ranks) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _results(
        self,
        connections: list[Connection],
        timeout: float,
        heard: Callable[[Any], None] | None = None,
        joined: Callable[[dict[str, Any]], None] | None = None,
        number: int = 0,
    ) -> list[Any]:
        """`number`: of the first rank."""
        listeners = {"said": heard, "joined": joined}
        results: dict[int, Any] = {}
        while len(results) < len(connections):
            ready = wait([c for rank, c in enumerate(connections) if rank not in results], timeout)
            if not ready:
                silent = [number + rank for rank in range(len(connections)) if rank not in results]
                self._abandon(f"ranks {silent} gave no answer in {timeout} s")
            answers = {rank: _receive(c) for rank, c in enumerate(connections) if c in ready}
            for rank in [rank for rank, answer in answers.items() if answer.outcome in listeners]:
                listener = listeners[answers[rank].outcome]
                if listener is not None:
                    listener(answers[rank].value)
                del answers[rank]
            if any(answer.outcome != "done" for answer in answers.values()):
                # Ranks that miss a failed one fail in turn, and may be heard of sooner: the first to fail is the cause.
                until = time.monotonic() + LINGER
                while rest := {rank: c for rank, c in enumerate(connections) if rank not in {**results, **answers}}:
                    ready = wait(rest.values(), max(0.0, until - time.monotonic()))
                    if not ready:
                        break
                    more = {rank: _receive(c) for rank, c in rest.items() if c in ready}
                    answers |= {rank: answer for rank, answer in more.items() if answer.outcome not in listeners}
                failures = [rank for rank, answer in answers.items() if answer.outcome != "done"]
                first = min(failures, key=lambda rank: answers[rank].moment)
                self._fail(number + first, answers[first])
            results |= {rank: answer.value for rank, answer in answers.items()}
        return [results[rank] for rank in range(len(connections))]

    def _fail(self, rank: int, answer: Answer) -> None:
        if answer.outcome == "refused":
            self.close()
            raise UserError(answer.value)
        self._abandon(f"rank {rank} died" if answer.outcome == "died" else f"rank {rank} failed:\n{answer.value}")

    def _abandon(self, reason: str) -> None:
        """The other ranks may wait for the failed one forever: end them all; the next job starts fresh ones."""
        self.close()
        raise RankError(reason)

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()
