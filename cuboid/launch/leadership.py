"""A node's part in leading a job on many nodes: it leads, or stands by to take over when who leads is gone.

Who leads raises a number in the run's folder every second (`checkpoint/terms.py`) and holds the lock of the folder. A
node that hears nothing more takes the next term as soon as the lock is free, because then the leading process has
ended; where it stays locked, or locks do not reach across nodes, once that number has stood still for
`resilience.contact_seconds`. Nodes try one after another, in the order of their ranks. Who led and finds a newer term,
or cannot reach the folder, ends its ranks and follows."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuboid.checkpoint.terms import Term, Terms
from cuboid.console import say
from cuboid.errors import UserError
from cuboid.launch.coordinator import GRACE, Coordinator, Order, Rules
from cuboid.launch.coordinator_rpc import BEAT, LOOK, PURPOSE, CoordinatorClient, CoordinatorServer
from cuboid.launch.disk_room import DiskRoom
from cuboid.launch.network import Endpoint, listen
from cuboid.launch.planned import Arranged, Planned
from cuboid.launch.start import Nodes
from cuboid.launch.store_tunnel import StoreGate
from cuboid.launch.supervisor import Restarts
from cuboid.resilience.rebalance import Balance, Pace, balance
from cuboid.resilience.replan import Replanner
from cuboid.resilience.replan_groups import GroupReplanner
from cuboid.secure_channel import found_secret, given_secret, greet, make_secret
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.claim import try_claim
from cuboid.training.run_folder import forget_reports, newest_kept

SOONER = 0.6
"""Part of resilience.contact_seconds after which a node that hears nothing ends its ranks: before the others, which
wait for the whole of it, start theirs."""
ORDERS = 1 << 20
"""More than two leaders ever give."""


def secret_of(run: Run) -> bytes | None:
    """None: the leading node has made none yet."""
    return found_secret(os.environ, Path(run.output.folder))


def leader_answers(run: Run) -> bool:
    """Whether somebody leads this run already, and can be reached from here."""
    term = Terms(Path(run.output.folder)).newest()
    secret = secret_of(run)
    if term is None or not term.port or secret is None:
        return False
    try:
        with socket.create_connection((term.address, term.port), timeout=3) as line:
            greet(line, secret, PURPOSE)
    except OSError:
        return False
    return True


class _Store:
    """Where the ranks of all nodes meet, at `port` of this node's loopback and behind a gate for the others."""

    def __init__(self, meeting: socket.socket, secret: bytes) -> None:
        from cuboid.launch.rendezvous import serve_store

        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.gate = Endpoint(*meeting.getsockname()[:2])
        self._store: Any = serve_store(listener)
        self._served = StoreGate(meeting, secret, self.port)

    def close(self) -> None:
        self._served.close()
        self._store = None  # which served the ranks until here


class Leadership:
    def __init__(self, run: Run, nodes: Nodes, name: str, quiet: bool) -> None:
        self._run, self._nodes, self._name, self._quiet = run, nodes, name, quiet
        self._terms = Terms(Path(run.output.folder))
        self._limit = run.resilience.contact_seconds
        self._term: Term | None = None
        self._server: CoordinatorServer | None = None
        self._store: _Store | None = None
        self._claim: int | None = None
        self._contact: CoordinatorClient | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        """Around what belongs to a term: several threads may end it."""
        self._beaten = 0.0
        self._doubts = 0
        """How often in a row this node did not know whether it may still decide."""
        self._secret_read: bytes | None = None

    @property
    def leads(self) -> bool:
        return self._server is not None

    def where(self) -> list[Endpoint]:
        """Where the leader may be: who took the newest term, and the rendezvous."""
        term = None
        with suppress(OSError):
            term = self._terms.newest()
        known = [Endpoint(term.address, term.port)] if term is not None and term.port else []
        return [*known, *([self._nodes.endpoint] if self._nodes.endpoint not in known else [])]

    def secret(self) -> bytes | None:
        """As it was read last, where the folder does not answer for a moment."""
        try:
            self._secret_read = secret_of(self._run)
        except (OSError, UserError):
            if self._secret_read is None:
                raise
        return self._secret_read

    def store_port(self, order: Order) -> int | None:
        """Of the store on this node's loopback, if it is the one the order speaks of."""
        store = self._store
        return store.port if store is not None and store.gate == Endpoint(order.address, order.port) else None

    def lead(self, listener: socket.socket, after: Order | None = None, lost: str = "") -> bool:
        """From now on. `after`: the last order of who led before; `lost`: why it leads no more. False: another node was
        faster."""
        secret = given_secret(os.environ) or make_secret(Path(self._run.output.folder))
        where = Endpoint(*listener.getsockname()[:2])
        newest = self._terms.newest()
        # Who leads first has claimed the folder for as long as it lives.
        locked = after is None or self._claim is not None
        term = Term(newest.number + 1 if newest is not None else 1, self._name, where.host, where.port, locked=locked)
        if not self._terms.take(term):
            return False
        self._term, self._beaten, self._doubts = term, time.monotonic(), 0
        meeting = listen(where.host, 0)
        gate = Endpoint(*meeting.getsockname()[:2])
        with suppress(OSError):
            reached = f"coordinator at {where}; other nodes reach the ranks' store at {gate}"
            _tell(f"{reached}; {listens(self._nodes)}", self._quiet)
        restarts = Restarts(self._run)
        verdict = restarts.failed("node", "", lost, str(self._run.layout)) if lost else ""
        coordinator = self._coordinator(restarts, after)
        if verdict:
            coordinator.end(1, verdict)
        known = self._nodes.fingerprint(self._run)
        self._server = CoordinatorServer(listener, secret, coordinator, known, self._announce, self._may_decide)
        threading.Thread(target=self._renew, args=(term,), daemon=True).start()
        self._meeting, self._secret = meeting, secret
        return True

    def serve_store(self) -> None:
        """Apart from `lead`, because it imports torch, which takes seconds."""
        assert self._server is not None
        self._store = _Store(self._meeting, self._secret)
        self._server.meet_at(self._store.gate.host, self._store.gate.port)

    def stand_by(self, contact: CoordinatorClient) -> None:
        self._contact = contact
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self, status: int, reason: str) -> None:
        self._over.set()
        if self._server is not None:
            self._server.end(status, reason, patience=self._limit)
        if self._store is not None:
            self._store.close()
        self._give_claim_back()

    def abandon(self) -> None:
        """This node failed: it says no last word, so that another takes the lead."""
        self._step_down("this node failed")

    def _give_claim_back(self) -> None:
        with self._lock:
            claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)

    def _coordinator(self, restarts: Restarts, after: Order | None) -> Coordinator:
        spec, run, nodes = self._run.resilience, self._run, self._nodes
        rules = Rules(nodes.least, nodes.most, spec.contact_seconds, spec.gather_seconds, spec.rejoin_seconds)
        if after is not None:  # the others come as soon as they see the term
            expected = len(after.members) - 1 if after.members else nodes.most - 1
            rules = replace(rules, gather=min(spec.gather_seconds, spec.contact_seconds), expected=expected)

        def begun() -> bool:
            return after is not None or newest_kept(run) > 0

        alike, groups = Replanner(run, nodes.ranks), GroupReplanner(run, nodes.ranks, begun) if nodes.group else None

        def arrange(there: tuple[str, ...]) -> Arranged:
            if groups is not None:
                return groups.arrange(there)
            choice = alike.choose(min(len(there), nodes.most))
            return choice, there[: choice.nodes]

        def balanced(order: Order, paces: Mapping[str, Pace]) -> Balance | None:
            if not (run.checkpoint.keeps and run.resilience.rebalance):
                return None
            return balance(run, Layout.parse(order.layout), order.ranks, paces)

        assert self._term is not None
        term = self._term.number
        # No leader repeats an order of another, whatever the clocks of nodes say; where nodes do not share the folder,
        # one that starts in a new folder has the first term again.
        number = term * ORDERS + secrets.randbelow(ORDERS // 2)
        return Coordinator(
            self._name,
            rules,
            Planned(arrange),
            restarts.failed,
            lambda: newest_kept(run),
            number,
            term,
            DiskRoom(run),
            balanced,
        )

    def _announce(self, order: Order) -> None:
        with suppress(OSError):  # words, and tidying, must not keep anybody from being told
            if order.task == "train":
                forget_reports(self._run)  # of ranks that have ended everywhere
                _tell(order.reason, self._quiet)
            elif order.task == "wait":
                _warn(order.reason)

    def _renew(self, term: Term) -> None:
        """Raise the number in the folder, until a newer term is found there or the folder cannot be reached."""
        own = term
        while not self._over.wait(BEAT) and self._term is term:
            try:
                newest = self._terms.newest()
                if self._term is not term:  # it was ended meanwhile
                    return
                if newest is None or newest.number != term.number:
                    self._step_down("another node leads now")
                    return
                # Who led before, and stood still, may have held the lock until now.
                own = own if own.locked else replace(own, locked=self._take_claim())
                own, self._beaten = self._terms.beat(own), time.monotonic()
            except OSError as error:
                if not self._certain():
                    self._step_down(f"the run's folder cannot be reached: {error.strerror}")
                    return

    def _certain(self) -> bool:
        """Whether nobody can have taken over since this node last raised its number."""
        return time.monotonic() - self._beaten < SOONER * self._limit

    def _may_decide(self) -> bool:
        """Asked again and again by another thread than the one that writes the number, whose call may not return: a
        leader that can no longer write it must not keep the others waiting."""
        self._doubts = 0 if self._certain() else self._doubts + 1
        # Counted, because a node that was stopped for a while has not had the time to look.
        if self._doubts * LOOK > self._limit:
            self._step_down("the run's folder does not answer")
        return not self._doubts

    def _step_down(self, why: str) -> None:
        with self._lock:
            server, store, claim = self._server, self._store, self._claim
            if server is None:
                return
            self._server = self._store = self._term = self._claim = None
        server.stop_leading()
        if self._contact is not None:
            self._contact.forget()  # after: what it was still sent is no sign of life
        if store is not None:
            store.close()
        _warn(f"{why}: this node leads no more, and ends its ranks")
        if claim is not None:
            os.close(claim)  # last: where the folder does not answer, this may not return

    def _watch(self) -> None:
        contact = self._contact
        assert contact is not None
        seen: Term | None = None
        changed, shared, asked, locks = time.monotonic(), False, 0, False
        while not self._over.wait(BEAT / 2):
            try:
                newest = self._terms.newest()
                now, silent = time.monotonic(), contact.silence > 2 * BEAT
                if newest != seen:
                    # Who hears the leader and sees its number grow sees the same folder.
                    grows = seen is not None and newest is not None and newest.beat > seen.beat
                    shared = shared or (not silent and grows)
                    seen, changed = newest, now
                order = contact.order
                if self.leads or order is None or order.task == "end" or not shared:
                    continue
                locked = newest is not None and newest.locked
                if not silent:
                    if newest is not None and locked and newest.number != asked:
                        asked, locks = newest.number, self._locks_reach()
                    continue
                members = order.members
                place = float(members.index(self._name) if self._name in members else len(members))
                # A free lock says that its holder has ended.
                tells = locks and locked and newest is not None and newest.number == asked
                if tells and contact.silence > GRACE + place * BEAT and self._take_claim():
                    self._take_over(order, "its supervisor ended")
                elif now - changed > self._limit + place * BEAT:
                    self._take_over(order, f"nothing was heard of it for {self._limit:g} s")
            except OSError:  # the folder does not answer now; it may at the next look
                continue

    def _locks_reach(self) -> bool:
        """Whether this node finds the folder locked by the one that leads: on some file systems locks are each
        machine's own."""
        try:
            handle = try_claim(Path(self._run.output.folder))
        except BlockingIOError:
            return True
        if handle is not None:
            os.close(handle)
        return False

    def _take_claim(self) -> bool:
        try:
            self._claim = try_claim(Path(self._run.output.folder))
        except BlockingIOError:
            return False
        return self._claim is not None

    def _take_over(self, order: Order, why: str) -> None:
        address = self._nodes.interface.address
        listener = None
        for port in (self._nodes.endpoint.port, 0):  # the port that firewalls know, where nobody has it yet
            with suppress(OSError):
                listener = listener or listen(address, port)
        if listener is None:
            self._give_claim_back()
            return
        try:
            newest = self._terms.newest()
            lost = newest.leader if newest is not None else "?"
            led = self.lead(listener, order, f"the leading node {lost} is lost: {why}")
        except (OSError, UserError) as error:
            _warn(f"this node cannot lead: {error}")
            led = False
        if not led:
            listener.close()
            if not self.leads:
                self._give_claim_back()
            return
        _warn(f"the leading node {lost} is lost: {why}; this node leads now")
        try:
            self.serve_store()
        except (OSError, RuntimeError) as error:  # ranks would have no place to meet
            self._step_down(f"the ranks' store cannot be served: {error}")


def listens(nodes: Nodes) -> str:
    return f"ranks of this node listen on {nodes.interface.name} ({nodes.interface.address}), at ports the system gives"


def _warn(text: str) -> None:
    """Also where nobody reads it any more."""
    with suppress(OSError):
        say(text, as_warning=True)


def _tell(text: str, quiet: bool) -> None:
    """Whoever wants one JSON object on the output finds this on the error stream."""
    print(text, file=sys.stderr if quiet else sys.stdout, flush=True)
