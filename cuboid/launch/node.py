"""The supervisor of one node of many: answers the coordinator, and trains with the others when it is told to."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from cuboid.console import say
from cuboid.errors import RankError, UserError
from cuboid.launch.coordinator import Order, Status
from cuboid.launch.coordinator_rpc import CoordinatorClient
from cuboid.launch.leadership import SOONER, Leadership, listens, secret_of
from cuboid.launch.place import local_places
from cuboid.launch.start import Nodes
from cuboid.launch.store_tunnel import StoreTunnel
from cuboid.launch.supervisor import launch, start_fork_server
from cuboid.resilience.preemption import REQUEUE, Forwarder
from cuboid.resilience.rebalance import Pace
from cuboid.resilience.replan_groups import node_name
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.claim import InUse
from cuboid.training.run_folder import newest_kept

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome

LONGEST = 10_000
"""Characters of what a node says of a failure: what a rank wrote as it died may be longer than a message."""


def supervise_node(run: Run, nodes: Nodes, listener: socket.socket | None, quiet: bool) -> tuple[Outcome, bool]:
    """Until the job ends everywhere; also says whether this node leads then. Who was given a `listener` leads first."""
    with Forwarder(run) as signals:
        order, leads = _supervise(run, nodes, listener, quiet, signals)
    _leave(order)
    from cuboid.training.trainer import Outcome

    return Outcome(float("nan"), preempted=order.status == REQUEUE, saved=newest_kept(run)), leads


def _supervise(
    run: Run, nodes: Nodes, listener: socket.socket | None, quiet: bool, signals: Forwarder
) -> tuple[Order, bool]:
    name = node_name(nodes.group, f"{nodes.interface.address}/{os.getpid()}")
    # Ranks inherit these. A user who knows the network (several cards, InfiniBand) has set them already.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", nodes.interface.name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={nodes.interface.name}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every rank warns of addresses that have no name
    leadership = Leadership(run, nodes, name, quiet)
    if listener is None:
        print(f"joining the coordinator at {nodes.endpoint}; {listens(nodes)}", file=_stream(quiet), flush=True)
    elif not leadership.lead(listener):
        raise InUse("another node took the lead of this run in this moment; start this one again")
    limit = SOONER * run.resilience.contact_seconds
    contact = CoordinatorClient(leadership.where, leadership.secret, name, nodes.fingerprint(run), limit)
    leadership.stand_by(contact)
    start_fork_server(run, signals)
    if listener is not None:
        leadership.serve_store()
    status, reason = 1, "the leading node failed"
    try:
        order = _follow(run, name, contact, quiet, signals, leadership)
        status, reason = order.status, order.reason
        return order, leadership.leads
    except SystemExit as leaving:
        status, reason = int(leaving.code or 0), "the leading node was stopped"
        raise
    except KeyboardInterrupt:
        status, reason = 130, "the leading node was stopped"
        raise
    except (UserError, RankError):
        raise
    except Exception:  # a fault of this node alone
        leadership.abandon()
        raise
    finally:
        contact.close()
        leadership.end(status, reason)


def _follow(
    run: Run, name: str, contact: CoordinatorClient, quiet: bool, signals: Forwarder, leadership: Leadership
) -> Order:
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
            with _reached(run, order, leadership.store_port(order)) as port:
                status = (
                    _attempt(run, name, order, contact, quiet, signals, port)
                    if port
                    else Status(
                        order.number, "failed", f"node {name} does not reach the store at {order.address}", "node"
                    )
                )
        contact.tell(status)


@contextmanager
def _reached(run: Run, order: Order, store: int | None) -> Iterator[int | None]:
    """The port of loopback where ranks of this node find the store; None: the leading node is not reached."""
    if store is not None:
        yield store
        return
    try:
        tunnel = StoreTunnel(order.address, order.port, secret_of(run) or b"")
    except OSError:
        yield None
        return
    try:
        yield tunnel.port
    finally:
        tunnel.close()


def _attempt(
    run: Run, name: str, order: Order, contact: CoordinatorClient, quiet: bool, signals: Forwarder, port: int
) -> Status:
    """This node's part of one attempt, and how it ended."""
    first, world = order.members.index(name) * order.ranks, len(order.members) * order.ranks
    places = local_places(order.ranks, first, world, "127.0.0.1", port, f"order-{order.number}")
    places = tuple(replace(place, term=order.term) for place in places)

    def told(pace: Pace) -> None:
        contact.tell(Status(order.number, "training", pace=pace))

    try:
        run = replace(run, layout=Layout.parse(order.layout))
        with _on_a_leash(contact, order.number) as cut:
            outcome = launch(run, quiet, signals, places, told)
    except UserError as error:
        return Status(order.number, "refused", str(error)[:LONGEST])
    except RankError as error:
        if cut:  # what its ranks died of is known, and is not theirs
            return Status(order.number, "failed", f"node {name} lost contact with the leading node", "node")
        return Status(order.number, "failed", str(error)[:LONGEST], error.kind)
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


def _stream(quiet: bool) -> TextIO:
    """Whoever wants one JSON object on the output finds other lines on the error stream."""
    return sys.stderr if quiet else sys.stdout


def _leave(order: Order) -> None:
    if order.status in (0, REQUEUE):
        return
    if order.status == 1:
        raise RankError(order.reason)
    if order.status == 2:
        raise UserError(order.reason)
    print(order.reason, file=sys.stderr)
    raise SystemExit(order.status)
