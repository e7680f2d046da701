"""The coordinator of a job on many nodes: who is there, and what all of them do next.

The leader holds it. Supervisors say what they are doing; the leader's word is one `Order` after another, each with a
new number. Before ranks are started again everybody has ended the old ones, or is lost: "wait" comes before "train".

Nothing here opens a socket or reads a clock: what is decided depends on what was heard, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import gt
from typing import Literal

from cuboid.launch.planned import Arranged, Nodes
from cuboid.resilience.preemption import REQUEUE
from cuboid.resilience.rebalance import Balance, Pace
from cuboid.resilience.replan import Choice, TooFew

GRACE = 2.0
"""Seconds in which a supervisor whose connection broke may come back before it counts as ended."""


@dataclass(frozen=True)
class Order:
    """The leader's word."""

    number: int
    task: Literal["wait", "train", "end"]
    reason: str = ""
    members: tuple[str, ...] = ()
    """Nodes that train, in the order of their ranks."""
    layout: str = ""
    ranks: int = 0
    """On each member."""
    address: str = ""
    port: int = 0
    """Where the ranks meet."""
    status: int = 0
    """With which everybody exits at the end."""
    term: int = 0
    """Of the leader: who has heard of a newer one does not follow."""


@dataclass(frozen=True)
class Status:
    """What a supervisor last did with which order."""

    order: int = -1
    state: Literal["ready", "training", "done", "failed", "refused", "preempted"] = "ready"
    """ready: it has no ranks. refused: the user's to mend."""
    reason: str = ""
    kind: str = "rank"
    """Of a failure."""
    pace: Pace | None = None
    """Of a node that trains, once there is something to tell."""


@dataclass(frozen=True)
class Rules:
    min_nodes: int
    max_nodes: int
    lost_after: float
    """Seconds of silence after which a node is lost."""
    gather: float
    """Seconds in which a job that could start with the nodes that are there waits for those that are expected."""
    patience: float
    """Seconds a job waits for its least number of nodes before it gives up."""
    expected: int | None = None
    """Nodes that should come as it starts; default: the most there may be."""


@dataclass(frozen=True)
class _Seen:
    status: Status
    heard: float
    left: float | None = None


WINDOWS = 2
"""In a row in which another layout would have been better, until it is taken."""
Judge = Callable[[str, str, str, str], str]
"""Called with a failure's kind, node, reason and layout; the sentence to give up with, or nothing to continue."""


class Coordinator:
    def __init__(
        self,
        leader: str,
        rules: Rules,
        arrange: Callable[[Nodes], Arranged | None],
        judge: Judge,
        newest: Callable[[], int],
        number: int = 0,
        term: int = 0,
        has_room: Callable[[], bool] = lambda: True,
        balance: Callable[[Order, Mapping[str, Pace]], Balance | None] = lambda order, paces: None,
    ) -> None:
        """`arrange` says how the nodes that are there are used best, which of them, and in which order; None: it is
        not known yet. `newest` says which step the newest checkpoint has; `number` is that of the first order: a leader
        that came back must not repeat one. `has_room`: whether the run's folder takes what ranks write. `balance`:
        which layout its nodes, as fast as they are, would train faster with.

        The leader's own node is never lost and comes first: rank 0, which alone publishes checkpoints, is always there,
        and there the old one has ended before a new one starts. So nobody cut off can publish one."""
        self.order = Order(number, "wait", "the job starts", term=term)
        self._rules, self._arrange, self._judge, self._newest = rules, arrange, judge, newest
        self._leader, self._has_room = leader, has_room
        self._seen = {leader: _Seen(Status(), 0.0)}
        self._meeting = ("", 0)
        self._since: float | None = None
        self._called = False
        self._grows_after: int | None = None
        self._balance = balance
        self._planned: Choice | None = None
        """As which the nodes train, but for how they divide the batch."""
        self._balanced: tuple[tuple[str, ...], Balance] | None = None
        """How these nodes divide it."""
        self._better: list[Balance] = []
        """What the latest windows, all of them, would have been better with."""
        self._given_up: set[str] = set()
        """Layouts that other parts or layers made, with which ranks failed."""
        self._lost: dict[str, str] = {}
        """Node -> why it counts as lost, since the order that holds was given."""
        self._window: tuple[int, ...] = ()
        self._balances_after: int | None = None

    @property
    def nodes(self) -> list[str]:
        """Those that are there, oldest first: who stays keeps its place, who comes back comes last."""
        return list(self._seen)

    def meet_at(self, address: str, port: int) -> None:
        """Where the ranks meet; until that is known nothing starts."""
        self._meeting = (address, port)

    def hear(self, node: str, status: Status, now: float) -> None:
        self._seen[node] = _Seen(status, now)

    def leave(self, node: str, now: float) -> None:
        """Its connection broke."""
        if node in self._seen:
            self._seen[node] = replace(self._seen[node], left=now)

    def end(self, status: int, reason: str) -> None:
        """The last word."""
        self._give(Order(0, "end", reason, status=status))

    def decide(self, now: float) -> Order:
        """Called often; the order that now holds."""
        self._since = now if self._since is None else self._since
        self._lost |= self._drop_lost(now)
        if self.order.task == "wait":
            self._gather(now)
        elif self.order.task == "train":
            self._watch(now)
        return self.order

    def _drop_lost(self, now: float) -> dict[str, str]:
        """Node -> why it counts as lost."""
        lost = {}
        for node, seen in list(self._seen.items()):
            if node == self._leader:
                continue
            if seen.left is not None and now - seen.left > min(GRACE, self._rules.lost_after):
                lost[node] = "its supervisor ended"
            elif now - seen.heard > self._rules.lost_after:
                lost[node] = f"nothing was heard of it for {self._rules.lost_after:g} s"
            if node in lost:
                del self._seen[node]
        return lost

    def _gather(self, now: float) -> None:
        rules, there = self._rules, len(self._seen)
        assert self._since is not None
        waited = now - self._since
        if there < rules.min_nodes:
            if waited > rules.patience:
                self.end(
                    1, f"{there} of {rules.min_nodes} nodes were there after {rules.patience:g} s; start the others"
                )
            return
        ready = [node for node, seen in self._seen.items() if self._is_ready(seen)]
        # A supervisor that is heard has killed its ranks by then. One that cannot end, in the kernel, does nothing, and
        # rank 0 is never there: the leader's own node is always waited for.
        stuck = [node for node, seen in self._seen.items() if seen.status.state == "training" and node != self._leader]
        overdue = waited > 2 * rules.lost_after and len(ready) >= rules.min_nodes
        settled = len(ready) + (len(stuck) if overdue else 0) == there
        expected = rules.max_nodes if rules.expected is None else rules.expected
        early = not self._called and there < expected and waited < rules.gather
        if not (settled and not early and self._meeting[1] and self._has_room()):
            return
        try:
            arranged = self._arrange(tuple(ready))
        except TooFew as error:
            if len(ready) == there or waited > rules.patience:  # else those that come late count too
                self._wait_for_more(str(error), waited)
            return
        if arranged is not None:
            self._call(*arranged)

    def _is_ready(self, seen: _Seen) -> bool:
        """It has no ranks, and has heard that it shall have none."""
        return seen.status.order == self.order.number and seen.status.state == "ready" and seen.left is None

    def _wait_for_more(self, why: str, waited: float) -> None:
        """Enough nodes by their number do not hold the run."""
        if waited > self._rules.patience:
            self.end(1, f"{why}; no others came in {self._rules.patience:g} s")
        elif self.order.reason != (reason := f"{why}; waiting for others"):
            self._give(Order(0, "wait", reason))

    def _call(self, choice: Choice, members: Nodes) -> None:
        address, port = self._meeting
        self._called, self._grows_after = True, None
        self._planned, self._better, self._window, self._balances_after = choice, [], (), None
        layout, why = choice.layout, choice.why
        if self._balanced is not None and self._balanced[0] == members:
            layout, why = str(self._balanced[1].layout), f"{why}; {self._balanced[1].why}"
        self._give(Order(0, "train", why, members, layout, choice.ranks, address, port))

    def _watch(self, now: float) -> None:
        members = self.order.members
        said = {node: self._seen[node].status for node in members if node in self._seen}
        said = {node: status for node, status in said.items() if status.order == self.order.number}
        for status in said.values():
            if status.state == "refused" and not self._is_balanced:
                return self.end(2, status.reason)
        for node in members:
            if node in self._lost:
                return self._fail("node", node, f"node {node} is lost: {self._lost[node]}", now)
        if any(self._seen[node].left is not None for node in members):
            return None  # whether it is lost is known in a moment; ranks that fail meanwhile fail because of it
        for node, status in said.items():
            if status.state in ("failed", "refused"):
                return self._fail(status.kind, node, status.reason, now)
        states = {said[node].state if node in said else "training" for node in members}
        if "training" not in states and "ready" not in states:
            return self.end(REQUEUE, "preempted") if "preempted" in states else self.end(0, "done")
        self._grow(now)
        if self.order.task == "train":
            self._rebalance([each for node in members if (each := said[node].pace if node in said else None)], now)
        return None

    def _rebalance(self, paces: list[Pace], now: float) -> None:
        """Right after the next checkpoint, when the same has been seen in several windows."""
        members = self.order.members
        window = tuple(pace.step for pace in paces)
        if len(paces) == len(members) and all(map(gt, window, self._window or [0] * len(window))):
            self._window = window
            found = self._balance(self.order, dict(zip(members, paces, strict=True)))
            if found is not None and str(found.layout) in self._given_up:
                found = None
            self._better = [*self._better, found] if found is not None else []
            if len(self._better) < WINDOWS:
                self._balances_after = None
            elif self._balances_after is None:
                self._balances_after = self._newest()
        if self._balances_after is not None and self._newest() > self._balances_after:
            self._balanced = members, self._better[-1]
            self._regather(self._better[-1].why, now)

    @property
    def _is_balanced(self) -> bool:
        """Whether nodes train with other parts or layers than they were planned with."""
        return self._balanced is not None and self._balanced[0] == self.order.members

    def _fail(self, kind: str, node: str, reason: str, now: float) -> None:
        if self._is_balanced and kind != "node":  # it may need more memory than there is
            self._given_up.add(self.order.layout)
        self._balanced = None  # whatever it failed of, a layout that was not asked for is given up first
        verdict = self._judge(kind, node, reason, self.order.layout)
        if verdict:
            self.end(1, verdict)
        else:
            self._regather(f"{reason}; starting again", now)

    def _grow(self, now: float) -> None:
        """Newcomers that would be used are taken in right after the next checkpoint: only then little is lost."""
        there = tuple(
            node for node, seen in self._seen.items() if node in self.order.members or seen.status.state == "ready"
        )
        if len(there) <= len(self.order.members):
            self._grows_after = None
            return
        try:
            arranged = self._arrange(there)
        except TooFew:  # with whom nothing better can be done
            return
        if arranged is None or (self._planned is not None and _alike(arranged[0], self._planned)):
            return
        newest = self._newest()
        if self._grows_after is None:
            self._grows_after = newest
        elif newest > self._grows_after:
            self._regather(f"there are {len(there)} nodes now", now)

    def _regather(self, reason: str, now: float) -> None:
        self._since = now
        self._give(Order(0, "wait", reason))

    def _give(self, order: Order) -> None:
        self.order = replace(order, number=self.order.number + 1, term=self.order.term)
        self._lost = {}


def _alike(one: Choice, other: Choice) -> bool:
    return replace(one, why="") == replace(other, why="")
