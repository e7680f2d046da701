"""The supervisor of one node of many: answers the coordinator, and trains with the others when it is told to."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuboid.console import say
from cuboid.errors import RankError, UserError
from cuboid.launch.coordinator import Coordinator, Order, Rules, Status
from cuboid.launch.coordinator_rpc import CoordinatorClient, CoordinatorServer
from cuboid.launch.network import Endpoint, listen
from cuboid.launch.place import local_places
from cuboid.launch.start import Nodes
from cuboid.launch.supervisor import Restarts, launch, start_fork_server
from cuboid.resilience.preemption import REQUEUE, Forwarder
from cuboid.resilience.replan import Replanner
from cuboid.secure_channel import NAME as SECRET
from cuboid.secure_channel import given_secret, make_secret, read_secret
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.run_folder import forget_reports, newest_kept

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome

SOONER = 0.6
"""Part of resilience.contact_seconds after which a node that hears nothing ends its ranks: before the others, which
wait for the whole of it, start theirs."""


def supervise_node(run: Run, nodes: Nodes, listener: socket.socket | None, quiet: bool) -> Outcome:
    """Until the job ends everywhere. Who was given the rendezvous' `listener` leads."""
    with Forwarder(run) as signals:
        order = _supervise(run, nodes, listener, quiet, signals)
    _leave(order)
    from cuboid.training.trainer import Outcome

    return Outcome(float("nan"), preempted=order.status == REQUEUE, saved=newest_kept(run))


def _supervise(run: Run, nodes: Nodes, listener: socket.socket | None, quiet: bool, signals: Forwarder) -> Order:
    name = f"{nodes.interface.address}/{os.getpid()}"
    # Ranks inherit these. A user who knows the network (several cards, InfiniBand) has set them already.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", nodes.interface.name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={nodes.interface.name}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every rank warns of addresses that have no name
    limit, desk, where, meeting = run.resilience.contact_seconds, None, nodes.endpoint, None
    listens = (
        f"ranks of this node listen on {nodes.interface.name} ({nodes.interface.address}), at ports the system gives"
    )
    if listener is None:
        _tell(f"joining the coordinator at {nodes.endpoint}; {listens}", quiet)
    else:
        where = Endpoint(*listener.getsockname()[:2])
        meeting = listen(where.host, 0)
        _tell(f"coordinator at {where}; ranks meet at {Endpoint(*meeting.getsockname()[:2])}; {listens}", quiet)
        desk = _lead(run, nodes, name, listener, quiet)
    contact = CoordinatorClient(where, lambda: secret_of(run), name, nodes.fingerprint(run), SOONER * limit)
    start_fork_server(run, signals)
    store = _serve(meeting, desk) if meeting is not None and desk is not None else None
    status, reason = 1, "the leading node failed"
    try:
        order = _follow(run, name, contact, quiet, signals)
        status, reason = order.status, order.reason
        return order
    except SystemExit as leaving:
        status, reason = int(leaving.code or 0), "the leading node was stopped"
        raise
    except KeyboardInterrupt:
        status, reason = 130, "the leading node was stopped"
        raise
    finally:
        contact.close()
        if desk is not None:
            desk.end(status, reason, patience=limit)
        del store  # which served the ranks until here


def _lead(run: Run, nodes: Nodes, name: str, listener: socket.socket, quiet: bool) -> CoordinatorServer:
    spec, restarts = run.resilience, Restarts(run)
    rules = Rules(nodes.least, nodes.most, spec.contact_seconds, spec.gather_seconds, spec.rejoin_seconds)

    def announce(order: Order) -> None:
        if order.task == "train":
            forget_reports(run)  # of ranks that have ended everywhere
            _tell(order.reason, quiet)
        elif order.task == "wait":
            say(order.reason, as_warning=True)

    choose = Replanner(run, nodes.ranks).choose
    coordinator = Coordinator(name, rules, choose, restarts.failed, lambda: newest_kept(run), number=int(time.time()))
    secret = given_secret(os.environ) or make_secret(Path(run.output.folder))
    return CoordinatorServer(listener, secret, coordinator, nodes.fingerprint(run), announce)


def secret_of(run: Run) -> bytes | None:
    """What a launcher passed, or what the leading node made in the run's folder; None: it has made none yet."""
    path = Path(run.output.folder) / SECRET
    return given_secret(os.environ) or (read_secret(path) if path.exists() else None)


def _serve(meeting: socket.socket, desk: CoordinatorServer) -> object:
    from cuboid.launch.rendezvous import serve_store

    address, port = meeting.getsockname()[:2]
    store = serve_store(meeting)
    desk.meet_at(address, port)
    return store


def _follow(run: Run, name: str, contact: CoordinatorClient, quiet: bool, signals: Forwarder) -> Order:
    """Do what is ordered until the last word, which is returned."""
    status = Status()

    def may_leave() -> bool:
        """A preempted node leaves at once if it has nothing to save, else when all have saved or its time is over."""
        return signals.asked and (status.state == "ready" or signals.code is not None)

    while True:
        order = contact.next(status.order, run.resilience.rejoin_seconds, may_leave)
        if contact.refused:
            raise UserError(contact.refused)
        if order is None and may_leave():
            raise SystemExit(signals.code or REQUEUE)
        if order is None:
            waited = f"resilience.rejoin_seconds={run.resilience.rejoin_seconds:g}"
            raise RankError(f"the leading node was not heard of within {waited}")
        if order.task == "end":
            return order
        status = Status(order.number, "ready")
        if order.task == "train" and name in order.members:
            contact.tell(Status(order.number, "training"))
            status = _attempt(run, name, order, contact, quiet, signals)
        contact.tell(status)


def _attempt(run: Run, name: str, order: Order, contact: CoordinatorClient, quiet: bool, signals: Forwarder) -> Status:
    """This node's part of one attempt, and how it ended."""
    first, world = order.members.index(name) * order.ranks, len(order.members) * order.ranks
    places = local_places(order.ranks, first, world, order.address, order.port, f"order-{order.number}")
    run = replace(run, layout=Layout.parse(order.layout))
    try:
        with _on_a_leash(contact, order.number) as cut:
            outcome = launch(run, quiet, signals, places)
    except UserError as error:
        return Status(order.number, "refused", str(error))
    except RankError as error:
        if cut:  # what its ranks died of is known, and is not theirs
            return Status(order.number, "failed", f"node {name} lost contact with the leading node", "node")
        return Status(order.number, "failed", str(error), error.kind)
    return Status(order.number, "preempted" if outcome.preempted else "done")


@contextmanager
def _on_a_leash(contact: CoordinatorClient, number: int) -> Iterator[list[bool]]:
    """Meanwhile this node's ranks are ended, stopped or hung as they may be, once another order is given or contact is
    lost; whether they were is in the list."""
    ended, cut = threading.Event(), list[bool]()

    def watch() -> None:
        while not ended.wait(0.2):
            if contact.lost or (contact.order is not None and contact.order.number != number):
                if not cut and contact.lost:
                    say("contact with the leading node is lost: the ranks of this node are ended", as_warning=True)
                cut[:] = [True]
                for rank in multiprocessing.active_children():
                    rank.kill()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield cut
    finally:
        ended.set()
        watcher.join()


def _tell(text: str, quiet: bool) -> None:
    """Whoever wants one JSON object on the output finds this on the error stream."""
    print(text, file=sys.stderr if quiet else sys.stdout, flush=True)


def _leave(order: Order) -> None:
    if order.status in (0, REQUEUE):
        return
    if order.status == 1:
        raise RankError(order.reason)
    if order.status == 2:
        raise UserError(order.reason)
    print(order.reason, file=sys.stderr)
    raise SystemExit(order.status)
