"""One rank's part in an island: at the steps that the table `[islands]` says, it sends how far its weights have come,
and later lets them follow the outer ones. Between the two a thread of its own does everything, without collectives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.errors import RankError
from cuboid.islands.batches import Batches
from cuboid.islands.coordinator import Client, News
from cuboid.islands.links import (
    HOLD,
    PATIENCE,
    SENT,
    STATE,
    Abandoned,
    Counts,
    Gone,
    Held,
    LinkServer,
    Outbox,
    as_wire,
)
from cuboid.islands.membership import fingerprint
from cuboid.islands.outer import OuterState, Sent
from cuboid.islands.peers import Peers, at_once
from cuboid.parallel.coordination import Coordination, open_coordination
from cuboid.telemetry.heartbeat import HEARTBEAT

FOREVER = 10 * 365 * 86400.0
"""Seconds: ranks of an island wait for each other as long as the island lives."""
AGAIN = 0.2
"""Seconds before what nobody could give is asked for again."""


@dataclass(frozen=True)
class Site:
    """Where an island meets the others."""

    number: int
    places: tuple[tuple[str, int], ...]
    """Of the coordinator."""
    address: str
    """On which this rank is reached from other islands."""
    secret: bytes


@dataclass
class InFlight:
    """A round between its beginning and its result."""

    round: int
    sent: Sent | None
    """None: this island takes no part."""
    tokens: int = 0
    members: dict[int, int] | None = None
    """None: not known yet, or the round is open again and this island was to take no part."""
    batches: Sequence[Any] = ()
    square: float = 0.0
    spread: float = 0.0
    seconds: float = 0.0
    """How long the training waited for it."""
    done: threading.Event | None = None


@dataclass(frozen=True)
class Synchronised:
    """What there is to tell of a round, the same on all ranks but for the bytes."""

    round: int
    members: dict[int, int]
    takes_part: bool
    waited: float
    """Seconds for which the training waited for it."""
    square: float
    """Of the mean over islands, of what this rank owns, the sum of squares."""
    spread: float
    """The same of what islands are away from the mean, on average."""


class Islands:
    """Every rank of the island has one and calls the same methods in the same order."""

    def __init__(self, outer: OuterState, site: Site, past: dict[str, Any], step: int = 0) -> None:
        """`past`: what a checkpoint says of it, written after a step; empty: there is none."""
        self.outer, self.site = outer, site
        self.run, self.spec = outer.engine.run, outer.spec
        self._steps, self._rank = self.run.training.steps, outer.engine.groups.world.index
        self._weight = self.spec.weight_of(site.number)
        self.counts = Counts()
        self.queue = Batches(past.get("left", ()))
        self._taken = 0
        """Batches, since this process began."""
        self.round = int(past.get("round", 0))
        """The first that has not begun."""
        # Those that were in flight are in the outer state already: only the weights do not follow it yet.
        pending = past.get("pending", ())
        self._flying = deque(InFlight(round_, None, members={site.number: 0}) for round_ in pending)
        for fragment, tokens in enumerate(past.get("tokens", ())):
            outer[fragment].tokens = tokens
        self._jobs: deque[InFlight] = deque()
        self._wake = threading.Condition()
        self._problem: BaseException | None = None
        self._versions = [-1] * self.spec.fragments
        self._state_lock = threading.Lock()
        self._outbox = Outbox(2 * self.spec.fragments + 2, self._state_of)
        self._outbox.start_at(self.round)
        self._server = LinkServer(site.address, site.secret, self._outbox, self.counts)
        self._peers = Peers(self.run, site.number, self._rank, site.secret, self.counts)
        # Calls of the main thread, those of the other one, and keys that tell ranks to wait no longer.
        self._own, self._beside, self._signals = (open_coordination(FOREVER) for _ in range(3))
        addresses = self._own.gather((site.address, self._server.port))
        self._client: Client | None = None
        if self._rank == 0:
            said: dict[str, Any] = {
                "run": fingerprint(self.run, site.number),
                "layout": str(self.run.layout),
                "addresses": addresses,
                "running": False,
                "round": self.round,
                "left": self.queue.runs,
                "taken": 0,
                "need": self._needed(step),
                **{name: past[name] for name in ("state",) if name in past},
            }
            self._client = Client(site.places, site.secret, site.number, said)
        self._worker = threading.Thread(target=self._work, name="islands", daemon=True)
        self._worker.start()

    def close(self, for_good: bool = False) -> None:
        self._server.close()
        if self._client is not None:
            self._client.close(for_good)
        with self._wake:
            self._jobs.appendleft(InFlight(-1, None))
            self._wake.notify_all()
        if for_good:  # a thread that is within torch when the interpreter ends would abort the process
            self._worker.join(HOLD)
            self._server.wait_until_left()

    @property
    def known(self) -> set[int]:
        """Islands that have taken part since this one did."""
        return set(self._peers.known)

    # Batches.

    def _needed(self, step: int) -> int:
        """Batches until the next round brings more."""
        return self._weight * (self.spec.applied(self.round, self._steps) - step) - len(self.queue)

    def next_batch(self, step: int) -> tuple[int, ...]:
        """Of the global order, for a step counted from 0: as many as this island's weight."""
        if (missing := self._weight - len(self.queue)) > 0:
            self._ask_for(max(missing, self._needed(step)))
        self._taken += self._weight
        return tuple(self.queue.take(self._weight))

    def _ask_for(self, count: int) -> None:
        runs = self._client.more(count, _still_here) if self._client is not None else []
        for each in self._own.broadcast(runs):
            self.queue.add(*each)

    # The training's side.

    def enter(self, step: int) -> int:
        """Begin or continue with the others; returns the step after which that is. `step`: after which this island
        has stopped."""
        told: Any = self._client.enter(_still_here) if self._client is not None else None
        entered = self._own.broadcast(told)
        self._peers.learn(entered.islands)
        self._versions = [_last(entered.round, each, self.spec.fragments) for each in range(self.spec.fragments)]
        self.queue = Batches(entered.batches)
        if entered.round == self.round:
            return step
        self.round = entered.round
        self._flying.clear()
        self._outbox.start_at(self.round)
        for fragment in range(self.spec.fragments):
            while not self._copy(fragment, self._versions[fragment] + 1, self._own):
                elsewhere = self._client is not None and self._client.enters_elsewhere(told)
                if self._own.broadcast(elsewhere):
                    raise RankError("the island was lost whose outer weights were fetched; start again")
                _still_here()
                time.sleep(AGAIN)
            self.outer.apply(fragment, takes_part=True, at_once=True)
        return self.spec.entered(self.round, self._steps)

    def count(self, tokens: int) -> None:
        """The island has trained on so many since this was called last."""
        for fragment in range(self.spec.fragments):
            self.outer[fragment].tokens += tokens

    def is_due(self, step: int) -> bool:
        begins = len(self.spec.rounds_due(step, self._steps)) > 0
        return begins or any(self.spec.applied(each.round, self._steps) <= step for each in self._flying)

    def after(self, step: int) -> tuple[int, list[Synchronised]]:
        """Between two steps: finish what is to be applied now, and begin what is due. Returns the step to continue
        after, which is a later one where this island was left behind, and what was synchronised."""
        found = self._finish(step)
        for round_ in self.spec.rounds_due(step, self._steps):
            if round_ >= self.round:
                self._begin(round_)
        found += self._finish(step)
        if not self._flying and any(not each.takes_part for each in found):
            return self._catch_up(step), found
        return step, found

    def _begin(self, round_: int) -> None:
        fragment = self.spec.fragment_of(round_)
        sent, tokens = self.outer.contribute(fragment), self.outer[fragment].tokens
        self._outbox.put(round_, Held(self._peers.blocks[fragment], sent.wire))
        if self._client is not None:
            self._client.arrive(round_, tokens, self._taken)
        self.round = round_ + 1
        self._start(InFlight(round_, sent, tokens, done=threading.Event()))

    def _start(self, job: InFlight) -> None:
        self._flying.append(job)
        with self._wake:
            self._jobs.append(job)
            self._wake.notify_all()

    def _finish(self, step: int) -> list[Synchronised]:
        found = []
        while self._flying and self.spec.applied(self._flying[0].round, self._steps) <= step:
            found.append(self._apply(self._flying.popleft()))
        return found

    def _apply(self, job: InFlight) -> Synchronised:
        self._wait_for(job)
        fragment = self.spec.fragment_of(job.round)
        assert job.members is not None
        takes_part = self.site.number in job.members
        at_once = self.spec.applied(job.round, self._steps) == self.spec.due(job.round, self._steps)
        self.outer.apply(fragment, takes_part, at_once)
        for each in job.batches:
            self.queue.add(*each)
        if self._client is not None and job.done is not None:
            self._client.finish(job.round, list(self.queue.runs), self._taken)
        return Synchronised(job.round, job.members, takes_part, job.seconds, job.square, job.spread)

    def _wait_for(self, job: InFlight) -> None:
        start = time.perf_counter()
        while job.done is not None and not job.done.wait(0.5):
            if self._problem is not None:
                break
            _still_here()
        job.seconds += time.perf_counter() - start
        if self._problem is not None:
            raise RankError(f"the synchronisation of islands failed in round {job.round}: {self._problem}")

    def _catch_up(self, step: int) -> int:
        """Take the steps that others have taken meanwhile, without a part in them, and continue where they are."""
        newest = self._own.broadcast(self._client.newest() if self._client is not None else -1)
        while self.round <= newest:
            job = InFlight(self.round, None, done=threading.Event())
            self.round += 1
            self._start(job)
            self._flying.pop()
            self._wait_for(job)
            if job.members is None:
                self.round = job.round
                break
            self._apply(job)
        later = max(step, self.spec.entered(self.round, self._steps))
        if (need := self._needed(later)) > 0 and later < self._steps:
            self._ask_for(need)
        return later

    def settle(self) -> dict[str, Any]:
        """Before the state is saved: wait for what is in flight, whose result then belongs to it. What a checkpoint
        needs of it besides tensors."""
        for job in list(self._flying):
            self._wait_for(job)
            if self.site.number not in (job.members or {}):  # what it moves along by is not kept
                self._flying.remove(job)
                self._apply(job)
        state = self._own.broadcast(self._client.state if self._client is not None else None)
        left = Batches(
            runs for batches in (self.queue.runs, *(job.batches for job in self._flying)) for runs in batches
        )
        return {
            "round": self.round,
            "left": [list(each) for each in left.runs],
            "state": state,
            "tokens": [self.outer[each].tokens for each in range(self.spec.fragments)],
            "pending": [job.round for job in self._flying],
        }

    # The thread's side.

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: len(self._jobs) > 0)
                    job = self._jobs.popleft()
                if job.round < 0:
                    return
                self._synchronise(job)
                assert job.done is not None
                job.done.set()
        except BaseException as error:
            self._problem = error

    def _synchronise(self, job: InFlight) -> None:
        """Until the round is committed, and stepped with here. Who lacks what its members sent takes the outer state of
        an island that has stepped; once none is left, the round is open again."""
        fragment = self.spec.fragment_of(job.round)
        mark, wires = (0, False), dict[int, Tensor]()
        while True:
            said: Any = self._client.news(job.round, mark, lambda: None) if self._client is not None else None
            news: News = self._beside.broadcast(said)
            self._peers.learn(news.islands)
            mark = (news.version, news.committed)
            if not news.members:
                if job.sent is None:
                    return
                continue
            takes_part, before = self.site.number in news.members, self._versions[fragment]
            if before >= job.round and (takes_part or news.anew):
                raise RankError(f"round {job.round} was closed anew after its result was copied; start again")
            there = before >= job.round or not self._beside.agree("" if self._fetch(job, news, wires) else "missing")
            copied = before >= job.round
            if not there and news.committed:
                there = copied = self._copy(fragment, job.round + 1, self._beside)
            if there and self._client is not None:
                self._client.have(job.round, news.version)
            if there and news.committed:
                break
            if not there:  # a connection broke, or whoever had it is gone: others may have it, or it is decided anew
                mark = (0, False)
                time.sleep(AGAIN)
        job.members, job.batches = news.members, news.batches.get(self.site.number, [])
        state, own = self.outer[fragment], job.sent if takes_part else None
        if copied:
            if before >= job.round:
                state.before = state.weights.clone()
            if own is not None and state.error is not None and own.error is not None:
                state.error.copy_(own.error)
        else:
            weighted = [(float(tokens), wires[number]) for number, tokens in sorted(news.members.items())]
            with self._state_lock:
                job.square, job.spread = self.outer.step(job.round, weighted, own)
                self._versions[fragment] = job.round
        if takes_part:
            state.tokens -= job.tokens

    def _fetch(self, job: InFlight, news: News, wires: dict[int, Tensor]) -> bool:
        """What each member sent of the blocks that this rank owns; whether all of it is."""
        fragment = self.spec.fragment_of(job.round)
        if job.sent is not None:
            wires[self.site.number] = job.sent.wire
        size, blocks = self.spec.block_bytes(self.run.training.weights), len(self.outer[fragment].weights)

        def wanted() -> bool:
            return self._version(job.round, news.version) <= news.version

        # Of a round that is committed somebody else has the result.
        patience = min(self.spec.grace_seconds, PATIENCE) if news.committed else PATIENCE
        todo: list[Callable[[], object]] = []
        fresh: dict[int, Tensor] = {}
        for number in news.members.keys() - wires.keys():
            fresh[number] = torch.empty(blocks, size, dtype=torch.uint8)
            if number not in self._peers.known:
                return False
            todo += self._peers.questions(SENT, number, fragment, job.round, fresh[number], wanted, patience)
        try:
            at_once(todo)
        except (Abandoned, Gone):
            return False
        wires |= fresh
        return True

    def _version(self, round_: int, known: int) -> int:
        """Of a round, the newest that this rank can know of."""
        store = self._signals.store
        if self._client is None:
            return known + 1 if store.check([f"{round_}/{known}"]) else known
        version = self._client.peek(round_)[0]
        if version > known and store is not None:
            store.set(f"{round_}/{known}", b"1")
        return version

    # The outer state, for an island that joins, or was so late that what others sent is gone.

    def _state_of(self, fragment: int) -> tuple[int, Held]:
        with self._state_lock:
            state = self.outer[fragment]
            both = torch.cat((as_wire(state.weights), as_wire(state.momentum)), 1)
            return self._versions[fragment] + 1, Held(self._peers.blocks[fragment], both)

    def _copy(self, fragment: int, version: int, ranks: Coordination) -> bool:
        """Of any other island, as it was when it had finished all rounds before this one, or later. Whether one has
        it; the weights do not follow yet."""
        islands: dict[int, dict[str, Any]] = ranks.broadcast(self._client.islands if self._client is not None else {})
        self._peers.learn(islands)
        state, patience = self.outer[fragment], min(self.spec.grace_seconds, PATIENCE)
        width = 2 * state.weights.shape[1] * state.weights.element_size()
        for source in sorted(islands.keys() - {self.site.number}):
            into = torch.empty(len(state.weights), width, dtype=torch.uint8)
            found = set[int]()
            for ask in self._peers.questions(STATE, source, fragment, version, into, lambda: True, patience):
                try:
                    found.update(ask())
                except (Abandoned, Gone):
                    found.add(-1)
                    break
            everywhere = ranks.broadcast(ranks.gather(found))
            versions = set().union(*everywhere)
            if len(versions) == 1 and versions != {-1}:  # else it has moved on between two answers
                with self._state_lock:
                    state.before = state.weights.clone()
                    for place, kept in enumerate((state.weights, state.momentum)):
                        half = into[:, place * width // 2 :][:, : width // 2]
                        kept.copy_(half.contiguous().view(self.outer.dtype))
                    self._versions[fragment] = versions.pop() - 1
                return True
        return False


def _last(round_: int, fragment: int, fragments: int) -> int:
    """The last round of a fragment before another one; -1: none."""
    last = round_ - 1 - (round_ - 1 - fragment) % fragments
    return last if last >= 0 else -1


def _still_here() -> None:
    """For a watchdog: who waits for a slow link does not hang."""
    HEARTBEAT.do("reading")
