"""Who decides for all islands, on the network: messages of JSON between one place and the first rank of every island,
which know the job's secret."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from cuboid.errors import RankError, UserError
from cuboid.islands.batches import Batches
from cuboid.islands.membership import Membership, Round
from cuboid.readers import parse_json
from cuboid.secure_channel import Channel, Door, Stranger, greet

PURPOSE = "islands coordinator"
LONGEST = 1 << 24
BEAT = 1.0
CONTACT = 5.0
"""Seconds without a word after which an island is lost to the others, which may be told so at once by its system."""
BEGINNING = 600.0
"""Seconds for which islands that begin wait for whoever decides, and for one another."""
OTHER_RUN = (
    "this island has another model, data, seed, batch or [islands] table than the first one; only the layout and where "
    "it writes may differ, and training.global_batch by islands.batch_weights"
)
APART = (
    "the other islands have decided anew what this one had decided while it was away; it starts again with their state"
)
OVER = "the islands have trained to the last step, and none is left to join; raise training.steps on all to go further"
Table = dict[str, Any]


class Coordinator:
    """Decides, and tells every island what has changed."""

    def __init__(self, listener: socket.socket, secret: bytes, membership: Membership) -> None:
        self._members = membership
        self._lines: dict[int, Channel] = {}
        self._told: dict[int, set[tuple[int, int, bool]]] = {}
        self._known: dict[int, Table] = {}
        """The islands that each was told of."""
        self._welcome: set[int] = set()
        """Islands that are not told yet where they begin."""
        self._lock = threading.Condition()
        self._open = True
        self._door = Door(listener, secret, PURPOSE, self._serve, longest=LONGEST)
        threading.Thread(target=self._decide, daemon=True).start()

    def close(self) -> None:
        self._open = False
        self._door.close()
        for line in list(self._lines.values()):
            line.hang_up()

    @property
    def rounds_closed(self) -> int:
        return self._members.next

    def wait_until_left(self, seconds: float) -> None:
        """Until no island is connected."""
        until = time.monotonic() + seconds
        while self._lines and time.monotonic() < until:
            time.sleep(0.05)

    def _decide(self) -> None:
        while self._open:
            with self._lock:
                self._members.decide(time.monotonic())
                if self._members.is_without_quorum:
                    self._look_elsewhere()
                self._tell()
                for line in [line for number, line in self._lines.items() if number not in self._members.islands]:
                    line.hang_up()  # it joins again
                self._lock.wait(0.1)

    def _look_elsewhere(self) -> None:
        """Those that are still here join anew: where the others decide, or here, once enough are back."""
        self._members = self._members.anew()
        self._welcome.clear()
        for line in list(self._lines.values()):
            line.hang_up()
        self._lines.clear()

    def _tell(self) -> None:
        known, members = self._members.rounds, self._members
        if problem := members.waits_in_vain(time.monotonic(), BEGINNING):
            for line in list(self._lines.values()):
                with suppress(OSError):
                    line.send(json.dumps({"refused": problem}).encode())
            return
        for number, line in list(self._lines.items()):
            island = members.islands.get(number)
            if island is None or not island.entered or not members.begun:
                continue
            if members.is_over and not any(each.settled for each in members.islands.values()):
                with suppress(OSError):  # it was to enter, but nobody is left whose state it could have
                    line.send(json.dumps({"refused": OVER}).encode())
                continue
            # One message: the state is that after all rounds in it, and goes with them to whoever decides next.
            word: Table = {"state": members.state(), "islands": members.table(), "rounds": []}
            if number in self._welcome:
                self._welcome.discard(number)
                word["entered"] = {"round": island.round, "batches": island.queue.runs}
            told = self._told[number]
            for place, found in sorted(known.items()):
                mark = (place, found.version, found.committed)
                if found.version and mark not in told:
                    told.add(mark)
                    word["rounds"].append(_news(place, found))
            if word["rounds"] or "entered" in word or self._known.get(number) != word["islands"]:
                self._known[number] = word["islands"]
                with suppress(OSError):  # who cannot be reached is found to be lost
                    line.send(json.dumps(word).encode())

    def _serve(self, line: Channel) -> None:
        number = -1
        for_good = False
        try:
            line.send_no_longer_than(5)
            line.wait_no_longer_than(CONTACT)
            while (text := line.receive()) is not None:
                word = parse_json(text, finite=False)
                with self._lock:
                    number = int(word["island"])
                    for_good = self._hear(number, word, line) or for_good
                    self._lock.notify_all()
        except (OSError, ValueError, TypeError, KeyError):
            pass  # a broken connection, or another version
        finally:
            with self._lock:
                if self._lines.get(number) is line:
                    del self._lines[number]
                    self._members.lose(number, time.monotonic(), for_good)
                    self._lock.notify_all()

    def _hear(self, number: int, word: Table, line: Channel) -> bool:
        """Whether it leaves for good."""
        members, said = self._members, word["say"]
        if said == "join":
            if number != members.first_of(word["run"], number):
                line.send(json.dumps({"refused": OTHER_RUN}).encode())
                return False
            if members.is_over and not word["running"]:
                line.send(json.dumps({"refused": OVER}).encode())
                return False
            if members.is_apart(number, word):
                line.send(json.dumps({"apart": APART}).encode())
                return False
            for name in ("round", "taken", "need"):
                word[name] = int(word[name])
            Batches(word["left"])  # an error here is the sender's, and later everybody's
            members.join(number, word["layout"], word["addresses"], word, time.monotonic())
            self._lines[number], self._told[number], self._known[number] = line, set(), {}
            if not word["running"]:
                self._welcome.add(number)
        elif said == "look":
            line.send(json.dumps({"decides": members.begun}).encode())
        elif said == "arrive":
            members.arrive(number, word["round"], word["tokens"], word["taken"])
        elif said == "have":
            members.have(number, word["round"], word["version"])
        elif said == "more":
            line.send(json.dumps({"more": members.more(number, word["count"], word["asked"])}).encode())
        return bool(said == "leave")


def _news(number: int, found: Round) -> Table:
    return {
        "round": number,
        "version": found.version,
        "members": found.members,
        "committed": found.committed,
        "batches": found.batches,
    }


@dataclass(frozen=True)
class News:
    """Of one round, as an island is told."""

    round: int
    version: int
    members: dict[int, int]
    """Island -> tokens; none: it is open again."""
    committed: bool
    batches: dict[int, list[Any]]
    """Runs of batches that islands take after it."""
    islands: dict[int, Table]
    """Their layouts and addresses."""
    anew: bool
    """It was open again once."""


@dataclass(frozen=True)
class Entered:
    """Where an island begins."""

    round: int
    batches: list[Any]
    islands: dict[int, Table]


class Client:
    """An island's end: it connects again and again, for as long as it is open, and then says again what is not
    answered."""

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        secret: bytes,
        number: int,
        join: Table,
        patience: float = BEGINNING,
    ) -> None:
        """`places`: where the coordinator may be. `join`: what it says first. `patience`: seconds to reach it once."""
        self._places, self._secret, self._number = places, secret, number
        self._join = join
        self._pending: dict[tuple[str, int], Table] = {}
        self._rounds: dict[int, News] = {}
        self._entered: Entered | None = None
        self._more: list[Any] | None = None
        self._asked = 0
        self._refused = self._apart = ""
        self._patience, self._since, self._met = patience, time.monotonic(), False
        """Whether it has ever reached a place that decides."""
        self._decides = False
        """Whether the place it is connected to has begun."""
        self._held: set[int] = set()
        self._opened: set[int] = set()
        self.state: Table = {}
        self.islands: dict[int, Table] = {}
        """Those that have the outer state, as they are known now."""
        self._line: Channel | None = None
        self._news = threading.Condition()
        self._open = True
        threading.Thread(target=self._keep, daemon=True).start()

    # What the island says.

    def enter(self, wait: Callable[[], None]) -> Entered:
        found: Entered = self._wait_for(lambda: self._entered, wait)
        return found

    def check(self) -> None:
        """Raises what the coordinator has said against this island."""
        if self._refused:
            raise UserError(self._refused)
        if self._apart:
            raise RankError(self._apart)
        if not self._met and time.monotonic() > self._since + self._patience:
            tried = ",".join(f"{host}:{port}" for host, port in self._places)
            raise UserError(
                f"islands-rendezvous={tried} did not answer within {self._patience:g} s; start the island on that "
                "host, where it decides for all, or give the address it has"
            )

    def enters_elsewhere(self, entered: Entered) -> bool:
        """Whether what `enter` said holds no more."""
        self.check()
        return self._entered is not entered

    def arrive(self, round_: int, tokens: int, taken: int) -> None:
        self._say({"say": "arrive", "round": round_, "tokens": tokens, "taken": taken}, round_)

    def have(self, round_: int, version: int) -> None:
        self._held = {each for each in self._held if each > round_ - 64} | {round_}
        self._say({"say": "have", "round": round_, "version": version}, round_)

    def more(self, count: int, wait: Callable[[], None]) -> list[Any]:
        self._more, self._asked = None, self._asked + 1
        self._say({"say": "more", "count": count, "asked": self._asked}, -1)
        found: list[Any] = self._wait_for(lambda: self._more, wait)
        self._pending.pop(("more", -1), None)
        return found

    def news(self, round_: int, after: tuple[int, bool], wait: Callable[[], None]) -> News:
        """Of a round, when it is not as it was `after` (version, committed)."""

        def found() -> News | None:
            news = self._rounds.get(round_)
            return None if news is None or (news.version, news.committed) == after else news

        answer: News = self._wait_for(found, wait)
        return answer

    def peek(self, round_: int) -> tuple[int, bool]:
        """Version of a round, and whether it is committed."""
        news = self._rounds.get(round_)
        return (0, False) if news is None else (news.version, news.committed)

    def newest(self) -> int:
        """The newest round that is closed."""
        return max((number for number, news in list(self._rounds.items()) if news.members), default=-1)

    def finish(self, round_: int, left: list[Any], taken: int) -> None:
        """The round is stepped with here; `left`: this island's batches now; `taken`: those before."""
        with self._news:
            for key in [key for key in self._pending if 0 <= key[1] <= round_]:
                del self._pending[key]
            for old in [old for old in self._rounds if old < round_ - 64]:
                del self._rounds[old]
            self._join = {
                **self._join,
                "running": True,
                "round": round_ + 1,
                "left": left,
                "taken": taken,
                "need": 0,
            }

    def _report(self) -> Table:
        """What another place needs to decide from here on: what was decided of the latest rounds."""
        if not self._join["running"]:
            return {}
        closed = [(number, news) for number, news in sorted(self._rounds.items()) if news.members]
        known = {number: {**asdict(news), "islands": {}} for number, news in closed[-32:]}
        return {"rounds": known, "state": self.state, "held": sorted(self._held)}

    def close(self, for_good: bool) -> None:
        if for_good:
            self._say({"say": "leave"}, -2)
        self._open = False
        if (line := self._line) is not None:
            line.hang_up()

    def _say(self, word: Table, round_: int) -> None:
        self._pending[(word["say"], round_)] = word
        self._send(word)

    def _send(self, word: Table) -> None:
        if (line := self._line) is not None:
            with suppress(OSError):
                line.send(json.dumps({"island": self._number, **word}).encode())

    def _wait_for(self, found: Callable[[], Any], wait: Callable[[], None]) -> Any:
        with self._news:
            while (answer := found()) is None:
                self.check()
                if not self._open:
                    raise RankError("the islands' coordinator was left")
                self._news.wait(0.5)
                wait()
        return answer

    # The connection.

    def _keep(self) -> None:
        while self._open:
            for host, port in self._in_order():
                try:
                    self._connect(host, port)
                    break
                except Stranger:
                    self._turned_away(host, port)
                except (OSError, ValueError, TypeError, KeyError):
                    pass
            self._line = None
            time.sleep(0.2)

    def _in_order(self) -> list[tuple[str, int]]:
        """The places, those that decide already first: the others may have left one that is back again for the next."""
        places = list(self._places)
        return sorted(places, key=lambda place: not self._decides_at(*place)) if len(places) > 1 else places

    def _decides_at(self, host: str, port: int) -> bool:
        with suppress(OSError, ValueError), socket.create_connection((host, port), timeout=BEAT) as line:
            channel = greet(line, self._secret, PURPOSE, longest=LONGEST, seconds=BEAT)
            channel.wait_no_longer_than(BEAT)
            channel.send(json.dumps({"island": self._number, "say": "look"}).encode())
            if (text := channel.receive()) is not None:
                return parse_json(text).get("decides") is True
        return False

    def _turned_away(self, host: str, port: int) -> None:
        if not self._met:
            with self._news:
                self._refused = (
                    f"islands-rendezvous={host}:{port} is answered by something that does not know this job's secret; "
                    "give all islands the same CUBOID_SECRET, see docs/security.md"
                )
                self._news.notify_all()

    def _connect(self, host: str, port: int) -> None:
        with socket.create_connection((host, port), timeout=3 * BEAT) as line:
            channel = greet(line, self._secret, PURPOSE, longest=LONGEST)
            channel.wait_no_longer_than(BEAT)
            self._line, self._met, self._decides = channel, True, False
            self._send({"say": "join", **self._join, **self._report()})
            sent = looked = time.monotonic()
            for word in list(self._pending.values()):
                self._send(word)
            while self._open:
                if time.monotonic() - sent > BEAT:
                    self._send({"say": "beat"})
                    sent = time.monotonic()
                if not self._decides and time.monotonic() - looked > 3 * BEAT:
                    if any(self._decides_at(*other) for other in self._places if other != (host, port)):
                        return  # the others are there
                    looked = time.monotonic()
                try:
                    text = channel.receive()
                except TimeoutError:
                    continue
                if text is None:
                    return
                self._take(parse_json(text, finite=False))

    def _take(self, word: Table) -> None:
        with self._news:
            if "refused" in word:
                self._refused = str(word["refused"])
            elif "apart" in word:
                self._apart = str(word["apart"])
            elif "more" in word:
                self._more = word["more"]
            else:
                self._decides = True
                islands = {int(number): each for number, each in word["islands"].items()}
                self.state, self.islands = word["state"], islands
                if begins := word.get("entered"):
                    self._entered = Entered(begins["round"], begins["batches"], islands)
                for each in word["rounds"]:
                    members = {int(number): tokens for number, tokens in each["members"].items()}
                    batches = {int(number): runs for number, runs in each["batches"].items()}
                    if not members:
                        self._opened.add(each["round"])
                    news = (each["version"], members, each["committed"], batches, islands)
                    self._rounds[each["round"]] = News(each["round"], *news, each["round"] in self._opened)
            self._news.notify_all()
