"""Who takes part in which round, and which batches of the data each island takes: decided at one place for all.

A round is closed when all islands have arrived, or when enough have and grace is over; where fewer than a quorum are
there, never: others may be a quorum at another place. What the members sent is then
fetched by everyone; when all of them have it, or those that can, the round is committed, and everyone takes the same
step. An island that is lost before that is omitted by all: the round is closed anew without it. A round that nobody
left has, because its members are gone, is open again: those that still need it close it among themselves.

Every decision carries all there is to know, so that another place can continue from what islands report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cuboid.islands.batches import Batches
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.run import Run, dump_run

Table = dict[str, Any]


@dataclass
class Trained:
    """Batches that an island has told to have trained on, when it arrived at a round."""

    round: int
    batches: Batches
    counts: bool = False
    """Whether a round has been committed that they are in: until then they go with the island if it is lost."""


@dataclass
class Island:
    layout: str
    """Others compute from it where its ranks keep what."""
    addresses: list[tuple[str, int]]
    """Of its ranks."""
    reported: Table
    """What it knew when it joined."""
    connected: bool = True
    queue: Batches = field(default_factory=Batches)
    """Batches that it may take and has not told to have trained on."""
    taken: int = 0
    """Of those that it was granted, in its process: those that it has told of."""
    told: list[Trained] = field(default_factory=list)
    """The latest, the oldest first."""
    entered: bool = False
    round: int = 0
    """The first one it takes part in."""
    settled: bool = False
    """It has the outer state before that round."""
    lost_since: float = 0.0
    more: tuple[int, list[Any]] = (0, [])
    """What it last asked for, and got."""


@dataclass
class Round:
    tokens: dict[int, int] = field(default_factory=dict)
    """Of each island that has arrived."""
    since: float = 0.0
    """When enough had arrived, or it was closed."""
    version: int = 0
    """Counts, over all rounds, how often one was closed or opened again; 0: neither."""
    closed: bool = False
    members: dict[int, int] = field(default_factory=dict)
    have: set[int] = field(default_factory=set)
    """Islands that have everything that its members sent."""
    committed: bool = False
    batches: dict[int, list[Any]] = field(default_factory=dict)
    """Runs of batches that islands take after it."""


class Membership:
    """Not on the network, and without a clock of its own: `now` are seconds."""

    def __init__(self, spec: IslandsSpec, steps: int, first: int = 0) -> None:
        """`first`: how many islands begin together; default: as many as the run has."""
        self._version = 0
        self._spec, self._steps, self._first = spec, steps, first or spec.count
        self.islands: dict[int, Island] = {}
        self.rounds: dict[int, Round] = {}
        self.next = 0
        """The first round that is not closed."""
        self.fresh = 0
        """The first batch that nobody took."""
        self.returned = Batches()
        """Batches of islands that are gone."""
        self.begun = False
        self._first_joined: float | None = None
        self._ended = False
        """Whether one has left after the last round: those that have yet to end may be fewer than a quorum."""
        self._run = ""

    # What islands say.

    def join(self, number: int, layout: str, addresses: list[tuple[str, int]], reported: Table, now: float) -> None:
        """`reported`: the `round` it would take part in next; `left`, its batches, how many it has `taken` before them
        in this process, and how many more it will `need` before; `state`, the newest it was told of all; `rounds`, the
        latest it knows to be committed; `running`: it has trained up to there in this process."""
        self._first_joined = now if self._first_joined is None else self._first_joined
        before = self.islands.get(number)
        if before is not None and before.entered and reported["running"]:
            before.addresses, before.connected = addresses, True
            return
        if before is not None:
            self._forget(number)
        self.islands[number] = Island(layout, addresses, reported)
        if self.begun and reported["running"]:  # it was away for long, and nobody has taken its part meanwhile
            self.returned.claim(self._queue_of(number, reported))
            self._continue(number)

    def is_apart(self, number: int, reported: Table) -> bool:
        """Whether an island comes back that has taken steps which the others have decided anew, has batches that others
        have taken since, or was away for so long that the round it waits for is forgotten."""
        before = self.islands.get(number)
        if not self.begun or not reported["running"] or (before is not None and before.entered):
            return False
        if int(reported["round"]) < self.next and int(reported["round"]) not in self.rounds:
            return True
        if set(self._queue_of(number, reported)) - set(self.returned):
            return True
        for known, said in reported.get("rounds", {}).items():
            found = self.rounds.get(int(known))
            members = {int(each): int(tokens) for each, tokens in said["members"].items()}
            if said["committed"] and (int(known) >= self.next or (found is not None and found.members != members)):
                return True
        return False

    def _queue_of(self, number: int, reported: Table) -> Batches:
        """Of an island that continues: what it had, and what rounds have granted that it does not know of yet."""
        queue = Batches(reported["left"])
        for known, found in sorted(self.rounds.items()):
            for runs in found.batches.get(number, []) if known >= int(reported["round"]) else ():
                queue.add(*runs)
        return queue

    def _continue(self, number: int) -> None:
        """With the state that it has."""
        island = self.islands[number]
        island.queue, island.taken = self._queue_of(number, island.reported), int(island.reported["taken"])
        island.entered, island.round = True, int(island.reported["round"])
        self._settle(number)

    def _forget(self, number: int) -> None:
        """What it had is gone, and its batches go to others."""
        island = self.islands.pop(number)
        for each in (*(told.batches for told in island.told if not told.counts), island.queue):
            self._take_back(each)
        for found in self.rounds.values():
            found.have.discard(number)

    def _settle(self, number: int) -> None:
        island = self.islands[number]
        if not island.settled:
            island.settled = True
            for known, found in self.rounds.items():
                if found.committed and known < island.round:
                    found.have.add(number)

    def anew(self) -> Membership:
        """Without what was decided here: who joins tells what is known."""
        later = Membership(self._spec, self._steps)
        later._run = self._run
        return later

    @property
    def is_without_quorum(self) -> bool:
        """Whether this place can decide no more: too many are gone, perhaps to where they are enough."""
        return self.begun and not (self.is_over or self._ended) and len(self.islands) < self._spec.quorum

    @property
    def _has_quorum(self) -> bool:
        """Of islands that can be reached, whichever round they enter at."""
        there = sum(island.connected and island.entered for island in self.islands.values())
        return there >= self._spec.quorum or self.is_over or self._ended

    @property
    def is_over(self) -> bool:
        """Whether the last round is closed."""
        return self.begun and self.next >= self._spec.rounds_due(self._steps, self._steps).stop

    def arrive(self, number: int, round_: int, tokens: int, taken: int) -> None:
        """`taken`: batches of its queue that it has trained on since it entered."""
        island = self.islands[number]
        if trained := island.queue.take(max(0, taken - island.taken)):
            island.told.append(Trained(round_, trained))
            island.taken = taken
        self._settle(number)
        if round_ >= self.next or round_ in self.rounds:  # who is late may be needed should the others be lost
            self.rounds.setdefault(round_, Round()).tokens[number] = tokens

    def have(self, number: int, round_: int, version: int) -> None:
        if (found := self.rounds.get(round_)) is not None and found.version == version:
            found.have.add(number)

    def more(self, number: int, count: int, asked: int) -> list[Any]:
        """Batches for an island that has too few: it was late, and joins the others again. `asked`: counts its
        questions, one of which may come twice."""
        island = self.islands[number]
        if island.more[0] != asked:
            island.more = (asked, self._grant({number: count})[number])
        return island.more[1]

    def first_of(self, run: str, number: int) -> int:
        """`number`, if that island has the run that all have."""
        self._run = self._run or run
        return number if run == self._run else -1

    def lose(self, number: int, now: float, for_good: bool = False) -> None:
        """Its connection is gone. `for_good`: it said so itself, at its end."""
        if (island := self.islands.get(number)) is not None:
            island.connected, island.lost_since = False, now
            if for_good:
                self._ended = self._ended or self.is_over
                island.queue, island.told = Batches(), []
                self._forget(number)

    # Decisions.

    def _live(self, round_: int) -> set[int]:
        """Those that take part in a round and can be reached. Who was lost and is back enters at a later one: what it
        sent before is gone."""
        there = {number: island for number, island in self.islands.items() if island.connected and island.entered}
        return {number for number, island in there.items() if island.round <= round_}

    def decide(self, now: float) -> None:
        if not self.begun:
            self._begin(now)
            return
        if self.islands and not self._settled() and not self.is_over:
            self._begin_again(now)
            return
        for number, island in sorted(self.islands.items()):
            if island.connected and not island.entered:
                island.entered, island.round = True, self._entry()
                self._grant({number: self._spec.weight_of(number) * self._wanted(island.round)})
            if not island.connected and now - island.lost_since > self._spec.grace_seconds:
                self._forget(number)
        self._open_again()
        while self._may_close(now):
            self._close(self.next, self.rounds[self.next].tokens, now)
            self.next += 1
        for number, found in self.rounds.items():
            if found.closed and not found.committed:
                self._commit(number, found, now)
        for old in [number for number in self.rounds if number < self.next - 4 * self._spec.fragments - 4]:
            del self.rounds[old]

    def _begin(self, now: float) -> None:
        """When all are there, or enough and grace is over."""
        present = {number: island for number, island in sorted(self.islands.items()) if island.connected}
        over = self._first_joined is not None and now - self._first_joined >= self._spec.grace_seconds
        if len(present) < (self._spec.quorum if over else self._first) or not present:
            return
        newest = max(present.values(), key=lambda island: int(island.reported["round"]))
        next_ = self.next = int(newest.reported["round"])
        reports = [report for island in present.values() for report in island.reported.get("rounds", {}).items()]
        self._version = max((int(said["version"]) for _, said in reports), default=0)
        for known, said in reports:
            self._remember(int(known), said)
        continuing = {each for each, island in present.items() if island.reported["running"]}
        continuing |= {each for each, island in present.items() if island.reported["round"] == next_}
        if state := newest.reported.get("state"):
            self.fresh, self.returned = int(state["fresh"]), Batches(state["returned"])
            for number, said in state["queues"].items():
                if int(number) not in continuing:
                    self._take_back_from(int(number), said, next_, bool(newest.reported["running"]))
        wanted = {}
        for number, island in present.items():
            if number in continuing:
                self._continue(number)
                for known in island.reported.get("held", ()):
                    if known in self.rounds:
                        self.rounds[known].have.add(number)
                need = int(island.reported["need"])
                if need < 0 and not island.reported["running"]:  # it has resumed with a smaller part than it had
                    kept = island.queue.take(len(island.queue) + need)
                    self._take_back(island.queue)
                    island.queue = kept
                wanted[number] = max(0, need)
        self._grant(wanted)
        self.begun = True

    def _take_back_from(self, number: int, said: Table, next_: int, running: bool) -> None:
        """The batches of an island that is not there any more, as the newest state tells of them. What it trained on
        for rounds that this state does not follow yet is lost with it. `running`: the state is no checkpoint's."""
        for round_, batches, counts in said["told"]:
            found = self.rounds.get(round_)
            if not (counts and (running or round_ < next_)) and not (
                found and found.committed and number in found.members
            ):
                self._take_back(Batches(batches))
        self._take_back(Batches(said["left"]))

    def waits_in_vain(self, now: float, patience: float) -> str:
        """Why a beginning is given up. Islands that train already wait for one another as long as it takes."""
        present = [number for number, island in sorted(self.islands.items()) if island.connected]
        since = now if self._first_joined is None else self._first_joined
        if self.begun or not present or now - since < max(patience, self._spec.grace_seconds):
            return ""
        if any(self.islands[number].reported["running"] for number in present):
            return ""
        here, quorum = len(present), self._spec.quorum
        return (
            f"only {here} of islands.count={self._spec.count} came within {now - since:.0f} s, and islands.quorum="
            f"{quorum} must; start the others, or use islands.quorum={here}"
        )

    def _entry(self) -> int:
        """The round at which an island enters: nobody waits while it fetches the state that is before it."""
        last = self._spec.rounds_due(self._steps, self._steps).start
        return max(self.next, min(self.next + self._spec.fragments, last))

    def _remember(self, number: int, said: Table) -> None:
        """A round that was closed at another place, which decides no more; what it granted holds."""
        found = self.rounds.setdefault(number, Round())  # islands may have arrived at it here before
        if found.closed and (found.committed or not said["committed"]):
            return
        self._version += 1
        found.closed, found.version, found.committed = True, self._version, bool(said["committed"])
        found.members = {int(each): int(tokens) for each, tokens in said["members"].items()}
        found.batches = {int(each): runs for each, runs in said["batches"].items()}
        self.next = max(self.next, number + 1)

    def _wanted(self, round_: int) -> int:
        """Batches that an island needs which enters before a round, for each part that it takes of one."""
        return self._spec.applied(round_, self._steps) - self._spec.entered(round_, self._steps)

    def _may_close(self, now: float) -> bool:
        found = self.rounds.get(self.next)
        live = self._live(self.next)
        if found is None or not found.tokens.keys() & live or not self._has_quorum:
            return False
        if live <= found.tokens.keys():
            return True
        if len(found.tokens) < self._spec.quorum:
            return False
        found.since = found.since or now
        return now - found.since >= self._spec.grace_seconds

    def _close(self, number: int, tokens: Mapping[int, int], now: float) -> None:
        found, live = self.rounds[number], self._live(number)
        found.members = {each: tokens[each] for each in sorted(tokens) if each in live}
        anew = found.closed
        self._version += 1
        found.closed, found.version, found.since, found.have = True, self._version, now, set()
        if not anew:
            spec, steps = self._spec, self._steps
            count = spec.applied(number + 1, steps) - spec.applied(number, steps)
            without = [each for each in found.members if each not in found.batches]
            found.batches |= self._grant({each: spec.weight_of(each) * count for each in without})

    def _commit(self, number: int, found: Round, now: float) -> None:
        """Nobody has taken the step before, so those that are lost can still be omitted by all."""
        if not self._has_quorum:
            return
        members, live = found.members.keys(), self._live(number)
        missing = (members & live) - found.have
        if not missing and found.have:
            self._settle_round(number, found)
        elif members - live and members & live:
            self._close(number, found.members, now)
        elif found.have and now - found.since >= self._spec.grace_seconds:
            self._settle_round(number, found)  # those that lack something ask for it again, or for the state of others

    def _settle_round(self, number: int, found: Round) -> None:
        found.committed = True
        oldest = number - 2 * self._spec.fragments
        for member in found.members.keys() & self.islands.keys():
            told = self.islands[member].told
            for each in told:
                each.counts = each.counts or each.round <= number
            self.islands[member].told = [each for each in told if not each.counts or each.round > oldest]

    def _begin_again(self, now: float) -> None:
        """Nobody has the outer state any more: those that are there begin together, from what they have kept."""
        for number in [number for number, island in self.islands.items() if island.entered]:
            self._forget(number)
        self.begun, self._first_joined = False, now
        self.rounds, self.fresh, self.returned = {}, 0, Batches()

    def _settled(self) -> set[int]:
        return {number for number, island in self.islands.items() if island.settled}

    def _open_again(self) -> None:
        """From the first round on that is with nobody, since those that closed it are gone."""
        settled = self._settled()
        lost = [number for number, found in self.rounds.items() if found.closed and not self._has(number, found)]
        if not lost or not settled:
            return
        self.next = min(lost)
        for number in [number for number in self.rounds if number >= self.next]:
            before, kept = self.rounds[number], {each for each in settled if self.islands[each].round <= number}
            after = self.rounds[number] = Round({each: before.tokens[each] for each in kept & before.tokens.keys()})
            after.batches = {each: before.batches[each] for each in kept & before.batches.keys()}
            if before.version:
                self._version += 1
                after.version = self._version

    def _has(self, number: int, found: Round) -> set[int]:
        """Islands that have all of a round, or before it is committed could."""
        if found.committed:
            return found.have
        return found.have | {each for each in found.members if each in self.islands and self._was_in(each, number)}

    def _was_in(self, number: int, round_: int) -> bool:
        island = self.islands[number]
        return island.settled and island.round <= round_

    # Batches.

    def _grant(self, counts: Mapping[int, int]) -> dict[int, list[Any]]:
        """As many as one step takes to each island in turn."""
        granted = {number: Batches() for number in counts}
        weights = {number: self._spec.weight_of(number) for number in counts}
        for turn in range(max((-(-counts[each] // weights[each]) for each in counts), default=0)):
            for number in sorted(counts):
                for _ in range(min(weights[number], counts[number] - turn * weights[number])):
                    batch = self._next_batch()
                    granted[number].add(batch)
                    self.islands[number].queue.add(batch)
        return {number: list(runs.runs) for number, runs in granted.items()}

    def _next_batch(self) -> int:
        if self.returned.runs:
            return self.returned.take(1).runs[0][0]
        self.fresh += 1
        return self.fresh - 1

    def _take_back(self, queue: Batches) -> None:
        for first, distance, count in queue.runs:
            self.returned.add(first, distance, count)

    # What everybody is told.

    def state(self) -> Table:
        queues = {
            str(number): {
                "left": island.queue.runs,
                "told": [(told.round, told.batches.runs, told.counts) for told in island.told],
            }
            for number, island in self.islands.items()
        }
        return {"fresh": self.fresh, "returned": list(self.returned.runs), "queues": queues}

    def table(self) -> Table:
        """Of all islands that have the outer state, by number, where their ranks are reached."""
        return {
            str(number): {"layout": island.layout, "addresses": island.addresses}
            for number, island in self.islands.items()
            if island.settled
        }


def fingerprint(run: Run, number: int) -> str:
    """Equal on islands that train the same model on the same data alike."""
    own = ("layout", "output", "checkpoint", "resilience", "profile", "checks")
    plain = {name: type(getattr(run, name))() for name in own}
    training = replace(run.training, device="auto", backend="auto", bind="auto", threads_per_rank=1, compile="auto")
    training = replace(training, overlap_tensor="off", cuda_graphs="auto", deterministic=False, callbacks="")
    training = replace(training, global_batch=training.global_batch // run.islands.weight_of(number))
    same = replace(run, **plain, training=training, samples=type(run.samples)(), evaluation=type(run.evaluation)())
    return hashlib.sha256(dump_run(replace(same, plan={})).encode()).hexdigest()
