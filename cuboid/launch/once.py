"""One job on all ranks of a layout, once: on this machine, among the ranks of torchrun or Slurm, or on many nodes.

`cuboid train` has supervisors, which start ranks again. A proof has none: what fails on one node ends it on all. Nodes
meet at a store that the one at the rendezvous serves, and so do their ranks. Every process gets the result of rank 0,
so that all of them end with the same exit code."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cuboid.errors import RankError, UserError
from cuboid.launch.network import Endpoint, listen_if_host
from cuboid.launch.place import Place, find_place, local_places
from cuboid.launch.pool import Pool, Watch
from cuboid.launch.start import NodeOptions, Nodes, Role, find_nodes
from cuboid.launch.store_tunnel import MeetingStore
from cuboid.launch.supervisor import check_machine
from cuboid.launch.watched import beside, watched, watched_by_the_first
from cuboid.resilience.faults import arm
from cuboid.resilience.hang_dumps import offer_record
from cuboid.secure_channel import found_secret
from cuboid.spec.run import Run, dump_run
from cuboid.telemetry.heartbeat import HEARTBEAT

PATIENCE = 3600.0
"""Seconds in which all nodes must have come, and then in which the job must be done."""
FAREWELL = 20.0
"""Seconds for which the node that serves the store waits for the others to leave."""


@dataclass
class Heard:
    """What is known of the backend and the GPUs once ranks have joined, as `Pool.run` tells it."""

    silent: bool
    backend: dict[str, Any] = field(default_factory=lambda: {"backend": None, "gpus": 0, "gpu_shared": False})
    """For `--json`. One rank has nobody to talk to."""
    _sentence: str = ""

    def __call__(self, told: dict[str, Any]) -> None:
        self.backend = {name: told[name] for name in self.backend}
        if not self.silent and told["sentence"] != self._sentence:
            print(told["sentence"], flush=True)
        self._sentence = told["sentence"]


@dataclass(frozen=True)
class Post(Role):
    """The role of this process in a job that is done once."""

    def call(self, function: str, arguments: tuple[Any, ...], joined: Heard, asked: str = "") -> Any:
        """`function(rank, *arguments)` on every rank, with the arguments of the process that speaks; returns what it
        returned on rank 0. `asked`: what, besides the run, has to be the same on all nodes."""
        if self.nodes is not None:
            return Node(self.run, self.nodes, self.listener, asked).call(function, arguments, joined)
        if self.place is not None:
            return _call_as_rank(self.run, self.place, function, arguments, joined)
        ranks = self.run.layout.world_size
        return call_here(self.run, local_places(ranks, 0, ranks, "", 0, ""), function, arguments, joined)


def take_post(
    run: Run, options: NodeOptions, oversubscribe: bool = False, given: Mapping[str, str | None] | None = None
) -> Post:
    """Refuses what cannot work. The node at the rendezvous listens there when this returns. `given`: device and backend
    as the command line has them."""
    nodes = find_nodes(run, options)
    place = find_place(os.environ) if nodes is None else None
    check_machine(run, place, given)
    Post(run, place=place, nodes=nodes).check_room(oversubscribe)
    if nodes is None:
        return Post(run, place=place)
    return Post(run, nodes=nodes, listener=listen_if_host(nodes.endpoint, nodes.interface))


def call_here(
    run: Run, places: tuple[Place, ...], function: str, arguments: tuple[Any, ...], joined: Heard | None = None
) -> Any:
    """`function(rank, *arguments)` on ranks of this machine, under a watchdog; returns what the first one returned.
    They are new ones: NCCL reads its settings once in a process, and they depend on whether ranks share GPUs."""
    kept, training = beside(run), run.training
    settings: dict[str, Any] = {"device": training.device, "backend": training.backend, "timeout": PATIENCE}
    with Pool() as pool, watched(kept, places) as heartbeats:
        watch = Watch(heartbeats, kept.output.folder)
        settings |= {"ranks": len(places), "places": places, "joined": joined, "watch": watch}
        return pool.run(function, arguments, **settings)[0]


def call_together(rank: int, function: str, arguments: tuple[Any, ...]) -> Any:
    """`function(rank, *arguments)` with the arguments of rank 0; returns what it returned there."""
    import torch.distributed as dist

    def from_the_first(value: Any) -> Any:
        values = [value]
        if dist.is_initialized():
            with HEARTBEAT.everybody().collective("agreement"):
                dist.broadcast_object_list(values, src=0)
        return values[0]

    return from_the_first(resolve_name(function)(rank, *from_the_first(arguments)))


def _call_as_rank(run: Run, place: Place, function: str, arguments: tuple[Any, ...], joined: Heard) -> Any:
    import torch
    import torch.distributed as dist

    from cuboid.launch.backend import join_world
    from cuboid.launch.rank import store_of
    from cuboid.parallel.device import choose_device
    from cuboid.training.device_progress import device_progress

    torch.set_num_threads(run.training.threads_per_rank)
    device = choose_device(run.training.device, place.local_rank)
    if place.world_size == 1:
        return call_together(place.rank, function, arguments)
    run = beside(run)
    with watched_by_the_first(run, place):
        arm(HEARTBEAT, place.rank, HEARTBEAT.folder or run.output.folder)
        if device.type == "cuda":
            offer_record(run.output.folder, HEARTBEAT.folder, torch.__version__)
        with HEARTBEAT.everybody("world", place.world_size).collective("join"):
            limit = timedelta(seconds=PATIENCE)
            found = join_world(store_of(place), place.rank, place.world_size, device, run.training.backend, limit)
        if place.rank == 0:
            joined({**found.as_json(), "sentence": found.sentence})
        with device_progress(device):
            result = call_together(place.rank, function, arguments)
        dist.destroy_process_group()
    return result


class Node:
    """One node of many, and its ranks."""

    def __init__(self, run: Run, nodes: Nodes, listener: socket.socket | None, asked: str) -> None:
        self._run, self._nodes, self._serves = run, nodes, listener is not None
        # Ranks inherit these. A user who knows the network has set them already.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", nodes.interface.name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={nodes.interface.name}")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every rank warns of addresses that have no name
        self._where = nodes.endpoint if listener is None else Endpoint(*listener.getsockname()[:2])
        text = f"{nodes.most} {nodes.ranks} {asked}\n{dump_run(run)}"
        self._command = hashlib.sha256(text.encode()).hexdigest()
        self._store = self._meet(listener)

    def _meet(self, listener: socket.socket | None) -> Any:
        from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # type: ignore[attr-defined]

        from cuboid.launch.rendezvous import reach_store

        secret = found_secret(os.environ, Path(self._run.output.folder))
        self._meeting = MeetingStore(listener, self._where, secret, PATIENCE)
        if listener is not None:
            print(f"{self._nodes.most} nodes meet at {self._where}", file=sys.stderr, flush=True)
            store = PrefixStore("nodes", self._meeting.served)
            store.set("command", self._command)
            return store
        try:
            store = reach_store(self._meeting.host, self._meeting.port, "nodes", timedelta(seconds=PATIENCE))
            same = store.get("command").decode() == self._command
        except (DistNetworkError, DistStoreError):
            raise RankError(f"rendezvous={self._where} did not answer within {PATIENCE:g} s") from None
        if not same:
            raise UserError(
                "this node was given another run, or other options, than the others; "
                "start all nodes with the same command"
            )
        return store

    def call(self, function: str, arguments: tuple[Any, ...], joined: Heard) -> Any:
        nodes, where = self._nodes, self._meeting
        number = 0 if self._serves else self._store.add("came", 1)
        if number >= nodes.most:
            raise UserError(f"nodes={nodes.most} have come already; start {nodes.most}, or use --nodes {number + 1}")
        world = self._run.layout.world_size
        places = local_places(nodes.ranks, number * nodes.ranks, world, where.host, where.port, "ranks")
        try:
            with self._ended_with_the_others() as reasons:
                try:
                    return call_here(self._run, places, f"{__name__}:call_together", (function, arguments), joined)
                except BaseException as error:
                    if reasons:  # what its ranks died of is known, and is not theirs
                        raise RankError(reasons[0]) from None
                    lines = str(error).strip().splitlines() or ["it was stopped"]
                    self._store.set("failure", f"another node failed: {' '.join(dict.fromkeys((lines[0], lines[-1])))}")
                    raise
        finally:
            self._leave()
            self._meeting.close()

    @contextmanager
    def _ended_with_the_others(self) -> Iterator[list[str]]:
        """Meanwhile the ranks of this node are ended, hung as they may be, once another node has failed. Why is in the
        list."""
        ended, reasons = threading.Event(), list[str]()

        def watch() -> None:
            while not ended.wait(0.5):
                try:
                    if not self._store.check(["failure"]):
                        continue
                    reasons.append(self._store.get("failure").decode())
                except RuntimeError:
                    reasons.append(f"the node at rendezvous={self._where} is gone")
                for rank in multiprocessing.active_children():
                    rank.kill()
                return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield reasons
        finally:
            ended.set()
            watcher.join()

    def _leave(self) -> None:
        """The store ends with the node that serves it, which is the last to leave."""
        with suppress(RuntimeError):
            if not self._serves:
                self._store.add("left", 1)
                return
            until = time.monotonic() + FAREWELL
            while self._store.add("left", 0) < self._store.add("came", 0) and time.monotonic() < until:
                time.sleep(0.05)
