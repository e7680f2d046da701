"""Start the probe's ranks on this host and let them meet: through a file on one host, at HOST:PORT on several."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from cuboid.errors import RankError, UserError, either
from cuboid.launch.backend import Wanted
from cuboid.launch.network import Endpoint
from cuboid.launch.pool import follow_parent, fork_server
from cuboid.launch.store_tunnel import MeetingStore
from cuboid.probe.samples import Sample
from cuboid.probe.session import RankPlace, measure
from cuboid.secure_channel import given_secret

PATIENCE = 300.0
"""Seconds to wait for the other hosts."""
MARK = "probe"
"""Before everything hosts and ranks of a probe say to one another."""
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Meeting:
    """Where several hosts meet."""

    nodes: int
    host: str
    port: int
    interface: str
    """What the ranks talk through."""


def interface_to(host: str, port: int) -> str:
    """The interface through which this machine reaches another, or itself under that name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        try:
            there.connect((host, port))
        except OSError as problem:
            why = problem.strerror or problem
            raise UserError(
                f"rendezvous={host}:{port} cannot be reached: {why}; use the name or IPv4 address of the leading host"
            ) from None
        address = there.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(there.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise UserError(f"rendezvous={host}:{port} is reached by no interface with an address; name one with --interface")


def check_interface(names: str) -> None:
    """Refuse what the ranks would not find; they take several, with commas between."""
    known = [name for _, name in socket.if_nameindex()]
    if not set(names.split(",")) <= set(known):
        raise UserError(f"interface={names} is not on this host; use {either(known)}")


def is_here(host: str) -> bool:
    """Whether a name is this machine's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Probed:
    samples: list[Sample] | None
    """Of all ranks, on the host that leads; None on the others."""
    joined: dict[str, Any]
    """What carried the collectives (`Joined.as_json`), on the host that leads and where there are several ranks."""


def run_probe(
    ranks: int,
    seconds: float,
    device: str,
    meeting: Meeting | None,
    tell: Callable[[str], None],
    backend: Wanted = "auto",
) -> Probed:
    if meeting is not None:
        # Read by the ranks when they are started. A user who has set them knows the network better.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", meeting.interface)
        wanted = {"ranks": ranks, "nodes": meeting.nodes, "seconds": seconds, "device": device, "backend": backend}
        tell(f"{meeting.nodes} hosts meet at {meeting.host}:{meeting.port}")
        met, store, node = _meet(meeting, wanted)
        tell(f"host {node + 1} of {meeting.nodes}, {ranks} ranks, over {meeting.interface}")
        found = _run_ranks(ranks, node, meeting.nodes, seconds, device, (met.host, met.port), tell, backend)
        del store
        met.close()  # the leader's server, which the ranks needed until now
        return found
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory(prefix="cuboid-") as folder:
        return _run_ranks(ranks, 0, 1, seconds, device, folder, tell, backend)


def _meet(meeting: Meeting, settings: Mapping[str, object]) -> tuple[MeetingStore, Any, int]:
    """How the store that all hosts share is reached, the store, and this host's number. `settings`: options that must
    be the same on all."""
    from cuboid.launch.rendezvous import reach_store

    where = Endpoint(meeting.host, meeting.port)
    secret = given_secret(os.environ)
    if is_here(meeting.host):
        try:
            met = MeetingStore(socket.create_server((meeting.host, meeting.port)), where, secret, PATIENCE)
        except OSError as problem:
            raise UserError(f"rendezvous={where} cannot be opened: {problem.strerror}; use another port") from None
        store = met.served
        for name, value in settings.items():
            store.set(f"{MARK}/{name}", str(value))
        until = time.monotonic() + PATIENCE
        while (came := 1 + int(store.add(f"{MARK}/hosts", 0))) < meeting.nodes:
            if time.monotonic() > until:
                raise UserError(
                    f"nodes={meeting.nodes}, and {came} met at {where} within {PATIENCE:g} s; "
                    "start cuboid probe on the others too, or use fewer --nodes"
                )
            time.sleep(0.05)
        return met, store, 0
    met = MeetingStore(None, where, secret, PATIENCE)
    try:
        store = reach_store(met.host, met.port, MARK, timedelta(seconds=PATIENCE))
        leading = {name: store.get(name).decode() for name in settings}
        for name, value in settings.items():
            if str(value) != leading[name]:
                raise UserError(
                    f"{name}={value} is not what the leading host has; use --{name} {leading[name]} on every host"
                )
        number = int(store.add("hosts", 1))  # last, so that a host that was refused may come again
    except RuntimeError:
        raise UserError(f"rendezvous={where} does not answer; start cuboid probe on that host too") from None
    if number >= meeting.nodes:
        raise UserError(f"nodes={meeting.nodes} hosts are there already; start no more, or use --nodes {number + 1}")
    return met, store, number


def _run_ranks(
    ranks: int,
    node: int,
    nodes: int,
    seconds: float,
    device: str,
    meeting: str | tuple[str, int],
    tell: Callable[[str], None],
    backend: Wanted,
) -> Probed:
    context = fork_server()
    started = []
    for local in range(ranks):
        ours, theirs = context.Pipe()
        place = RankPlace(node * ranks + local, ranks, nodes, seconds, device)
        process = context.Process(target=_serve, args=(theirs, place, meeting, backend), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        return _listen([connection for _, connection in started], node * ranks, seconds, tell)
    finally:
        for process, connection in started:
            connection.close()
            process.kill()
            process.join()


def _listen(connections: list[Connection], first: int, seconds: float, tell: Callable[[str], None]) -> Probed:
    """Pass on what rank 0 says, and wait for all to be done."""
    result: list[Sample] | None = None
    joined: dict[str, Any] = {}
    waiting = {connection: first + index for index, connection in enumerate(connections)}
    until = time.monotonic() + PATIENCE + 20 * seconds
    while waiting:
        ready = wait(list(waiting), max(until - time.monotonic(), 0.0))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of the probe gave no answer; is every host still there?")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                what, value = connection.recv()
            except (EOFError, ConnectionResetError):
                raise RankError(f"rank {rank} of the probe died") from None
            if what == "doing":
                tell(value)
            elif what == "joined":
                joined = value
            elif what == "refused":
                raise UserError(value)
            elif what == "failed":
                raise RankError(f"rank {rank} of the probe failed:\n{value}")
            else:
                del waiting[connection]
                result = value if rank == 0 else result
    return Probed(result, joined)


def _serve(connection: Connection, place: RankPlace, meeting: str | tuple[str, int], backend: Wanted) -> None:
    """A rank process."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from cuboid.launch.backend import join_world
    from cuboid.launch.oom import out_of_memory_in
    from cuboid.launch.rendezvous import reach_store
    from cuboid.parallel.device import choose_device

    follow_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of precisions that the processor lacks: their times say so
    try:
        if place.world > 1:
            limit = timedelta(seconds=PATIENCE)
            store = (
                FileStore(os.path.join(meeting, "store"), place.world)
                if isinstance(meeting, str)
                else reach_store(*meeting, MARK)
            )
            device = choose_device(place.device, place.rank % place.local)
            joined = join_world(store, place.rank, place.world, device, backend, limit)
            if place.rank == 0:
                connection.send(("doing", joined.sentence))
                connection.send(("joined", joined.as_json()))
        found = measure(place, lambda text: connection.send(("doing", text)) if place.rank == 0 else None)
        if place.world > 1:
            dist.barrier()
            dist.destroy_process_group()
        connection.send(("done", found if place.rank == 0 else None))
    except UserError as error:
        connection.send(("refused", str(error)))
    except Exception as error:
        short = out_of_memory_in(error)
        if short is None:
            connection.send(("failed", traceback.format_exc()))
            return
        first = str(short).splitlines()[0].rstrip(".")
        connection.send(("refused", f"ranks={place.local} run out of memory: {first}; free some, or use fewer --ranks"))
