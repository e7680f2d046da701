"""What this rank does at every moment, in a few kilobytes of shared memory that its supervisor reads.

A rank that hangs cannot say where; so it says beforehand, each time it begins to wait for others or begins something
else. A note costs a few writes into mapped memory, well under a microsecond, and no system call. Nobody who reads
disturbs the rank, and what was written stays readable when it is stopped or dead.

On a GPU collectives run behind the host: what is noted is where the host stands, and how many collectives it has begun
in each group, which is what tells ranks that came from one that did not.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

Phase = Literal["set-up", "step", "evaluation", "save", "finish"]
Activity = Literal[
    "", "data", "forward", "backward", "input backward", "weight backward", "gradients", "update", "reading", "writing"
]
Wait = Literal[
    "",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "shift",
    "message",
    "send",
    "device",
    "save",
    "join",
    "new group",
    "agreement",
    "load",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
WAITS: tuple[Wait, ...] = get_args(Wait)
_PHASE = {name: index for index, name in enumerate(PHASES)}
_ACTIVITY = {name: index for index, name in enumerate(ACTIVITIES)}
_WAIT = {name: index for index, name in enumerate(WAITS)}
STEPPING, READING, DEVICE = _PHASE["step"], _ACTIVITY["data"], _WAIT["device"]

# The words of the file, eight bytes each. Times are nanoseconds of the clock that all processes of a machine share.
VERSION, PID, RANK, PHASE, STEP, ACTIVITY, STAGE, MICRO_BATCH, WAIT, TRACK, SEQUENCE, CHANGED, CHANGES = range(13)
WAITED, READ, TABLE_SIZE, PHASE_SINCE, ACTIVITY_SINCE, DEVICE_PASSED, DEVICE_LEFT = range(13, 20)
SPENT = 24
"""Time spent in each phase so far."""
SEEN, TYPICAL, LONGEST = 32, 40, 48
"""Of each phase: how many times it was gone through, the median and the longest of those times."""
COUNTS = 64
"""Of each track: how far this rank has come."""
TRACKS = 128
TABLE = (COUNTS + TRACKS) * 8
"""Where the names of the tracks begin, as JSON."""
SIZE = 32 << 10
CURRENT = 1
RECENT = 31
"""Times of a phase whose median is typical."""


def heartbeat_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}"


def ranks_in(folder: str | Path) -> list[int]:
    """Those that have begun."""
    return sorted(int(path.name.removeprefix("rank-")) for path in Path(folder).glob("rank-*"))


def short(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks of a group in JSON: those at equal distances by their first, number and distance."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if isinstance(ranks, range) or all(after - before == stride for before, after in pairwise(ranks)):
            return {"first": ranks[0], "count": len(ranks), "stride": stride}
    return list(ranks)


class Track:
    """What the ranks of a group do together in one order: collectives, messages, saves. How far each has come is
    comparable between them. Used in a `with` statement it counts one more and waits for the others to come as far."""

    def __init__(self, heartbeat: Heartbeat, name: str, ranks: tuple[int, ...], slot: int) -> None:
        self.name = name
        self.ranks = ranks
        self._heartbeat = heartbeat
        self.slot = slot
        self._kind: Wait = ""

    @property
    def count(self) -> int:
        return self._heartbeat.words[COUNTS + self.slot]

    def advance(self) -> int:
        """One more has begun here; returns its number."""
        words = self._heartbeat.words
        words[COUNTS + self.slot] += 1
        return words[COUNTS + self.slot]

    def reach(self, sequence: int) -> None:
        """So far it has come, whichever it was at before."""
        words = self._heartbeat.words
        words[COUNTS + self.slot] = max(words[COUNTS + self.slot], sequence)

    def wait(self, kind: Wait, sequence: int) -> None:
        """From now on this rank waits until all have come as far as `sequence`."""
        self._heartbeat.wait(kind, self.slot, sequence)

    def collective(self, kind: Wait) -> Track:
        """For a `with` statement around a call that waits for all ranks of the track."""
        self._kind = kind
        return self

    def __enter__(self) -> None:
        self._heartbeat.wait(self._kind, self.slot, self.advance())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._heartbeat.end_wait()


class Observer(Protocol):
    """Told of what is noted, as it is noted."""

    def began(self, activity: Activity, stage: int, micro_batch: int) -> None: ...

    def waits(self, kind: Wait, track: str) -> None: ...

    def wait_ended(self) -> None: ...


class Heartbeat:
    """Written by the rank's own threads alone. Before `open` it lies in the memory of the process, where nobody reads
    it."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(SIZE)).cast("q")
        self.hook: Callable[[], None] | None = None
        """Called at each change of phase, activity and wait: where faults are injected."""
        self.observer: Observer | None = None
        """Where a trace is taken: who gives its parts their names."""
        self.mark: Callable[[], None] | None = None
        """Where ranks have GPUs: called where a mark in the device's own order tells later how far it has come."""
        self.waits: list[tuple[int, int, int, int]] | None = None
        """Where a run keeps its times: kind, track, begin and end of each wait since they were last taken."""
        self.rank = 0
        self.folder: Path | None = None
        self._tracks: dict[tuple[str, tuple[int, ...]], Track] = {}
        self._everybody: tuple[int, ...] = ()
        self._warm = False
        """The first step also pays for warming up: nothing is learned from it."""
        self._recent = {phase: deque[int](maxlen=RECENT) for phase in PHASES}
        self._begin()

    def open(self, folder: str | Path, rank: int) -> None:
        """Write where the supervisor reads from now on; its first words are what tells that the rank has begun."""
        self.folder = Path(folder)
        path = heartbeat_path(folder, rank)
        aside = path.with_name(f".{path.name}")
        aside.write_bytes(bytes(SIZE))
        with aside.open("r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
        self.rank = rank
        self._begin()
        self._write_table()
        os.replace(aside, path)

    def _begin(self) -> None:
        words = self.words
        words[VERSION], words[PID], words[RANK] = CURRENT, os.getpid(), self.rank
        words[STAGE] = words[MICRO_BATCH] = -1  # as `do` has it where there is none
        words[PHASE_SINCE] = words[ACTIVITY_SINCE] = words[CHANGED] = time.monotonic_ns()

    def track(self, name: str, ranks: Sequence[int]) -> Track:
        """The same one for the same name and ranks. More than there is room for share the last: what they would tell
        apart is lost, and no more."""
        key = (name, tuple(ranks))
        if key not in self._tracks:
            slot = min(len(self._tracks), TRACKS - 1)
            self._tracks[key] = Track(self, *key, slot)
            if slot < TRACKS - 1:
                self._write_table()
        return self._tracks[key]

    def everybody(self, name: str = "world", ranks: int = 0) -> Track:
        """The track of that name of all ranks; `ranks`: their number, where it is first told."""
        if ranks:
            self._everybody = tuple(range(ranks))
        return self.track(name, self._everybody)

    def _write_table(self) -> None:
        table = [[track.name, short(track.ranks)] for track in self._tracks.values()]
        content = json.dumps(table, separators=(",", ":")).encode()
        if TABLE + len(content) <= SIZE:
            memoryview(self.words).cast("B")[TABLE : TABLE + len(content)] = content
            self.words[TABLE_SIZE] = len(content)

    # What the rank does next.

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """A phase begins, and the one before ends: also a step that follows a step. `step`: of which this is a part,
        counted from one; default: that of the phase before."""
        words, now = self.words, time.monotonic_ns()
        before = PHASES[words[PHASE]]
        spent = now - words[PHASE_SINCE]
        words[SPENT + words[PHASE]] += spent
        words[PHASE_SINCE] = now
        if before != "step" or self._warm:
            self.learn(before, spent)
        self._warm = self._warm or before == "step"
        words[PHASE] = _PHASE[phase]
        if step is not None:
            words[STEP] = step
        self.do("")

    def learn(self, phase: Phase, nanoseconds: int) -> None:
        """So long a phase, or a part of it that others may have to wait for, can take."""
        words, index, recent = self.words, _PHASE[phase], self._recent[phase]
        recent.append(nanoseconds)
        words[SEEN + index] += 1
        words[TYPICAL + index] = int(median(recent))
        words[LONGEST + index] = max(words[LONGEST + index], nanoseconds)

    def do(self, activity: Activity, stage: int = -1, micro_batch: int = -1) -> None:
        """What the rank itself works on from now."""
        words, now = self.words, time.monotonic_ns()
        if words[ACTIVITY] == READING:
            words[READ] += now - words[ACTIVITY_SINCE]
        words[ACTIVITY], words[STAGE], words[MICRO_BATCH] = _ACTIVITY[activity], stage, micro_batch
        words[ACTIVITY_SINCE] = words[CHANGED] = now
        words[WAIT] = 0
        words[CHANGES] += 1
        if self.mark is not None:
            self.mark()
        if self.observer is not None:
            self.observer.began(activity, stage, micro_batch)
        if self.hook is not None:
            self.hook()

    def wait(self, kind: Wait, slot: int = -1, sequence: int = 0) -> None:
        words = self.words
        words[TRACK], words[SEQUENCE], words[CHANGED], words[WAIT] = slot, sequence, time.monotonic_ns(), _WAIT[kind]
        words[CHANGES] += 1
        if self.observer is not None:
            self.observer.waits(kind, self._name_of(slot))
        if self.hook is not None:
            self.hook()

    def take_waits(self) -> list[tuple[Wait, str, float, float]]:
        """Kind, track, begin and end in seconds of all waits that ended since the last call."""
        taken, self.waits = self.waits or [], []
        return [(WAITS[kind], self._name_of(slot), begin / 1e9, end / 1e9) for kind, slot, begin, end in taken]

    def _name_of(self, slot: int) -> str:
        return next((track.name for track in self._tracks.values() if track.slot == slot), "")

    def end_wait(self) -> None:
        """What was waited for has come."""
        words, now = self.words, time.monotonic_ns()
        if words[PHASE] == STEPPING and words[WAIT] != DEVICE:
            words[WAITED] += now - words[CHANGED]
        if self.waits is not None and words[WAIT]:
            self.waits.append((words[WAIT], words[TRACK], words[CHANGED], now))
        words[WAIT], words[CHANGED] = 0, now
        words[CHANGES] += 1
        if self.mark is not None:
            self.mark()
        if self.observer is not None:
            self.observer.wait_ended()


HEARTBEAT = Heartbeat()
"""Of this process, which is one rank."""
NOWHERE = HEARTBEAT.track("", ())
"""The track of groups that have none: nobody is told apart by it."""


# A heartbeat as somebody else reads it: plain data, so that the nodes of a job can show theirs to each other.


@dataclass(frozen=True)
class Place:
    """A track by what all its ranks call it."""

    name: str
    ranks: Sequence[int]
    """A `range` where they are at equal distances: of all ranks of a job everybody tells, and it is compared by its
    ends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(short(self.ranks)))


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for: that all ranks of a track come as far as `sequence`."""

    kind: Wait
    place: Place | None
    """None: no other rank, as far as the host knows."""
    sequence: int = 0


@dataclass(frozen=True)
class Learned:
    """How long a phase takes, in seconds."""

    seen: int = 0
    typical: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Reading:
    """One rank at one moment."""

    rank: int
    pid: int = 0
    phase: Phase = "set-up"
    step: int = 0
    activity: Activity = ""
    stage: int = -1
    micro_batch: int = -1
    waiting: Waiting | None = None
    counts: Mapping[Place, int] = field(default_factory=dict)
    """How far it has come on each of its tracks."""
    changed: float = 0.0
    """When it last noted anything, on its machine's clock."""
    changes: int = 0
    device_left: int = 0
    """Marks that its GPU has still to pass; 0 also where none are made."""
    state: str = "S"
    """Of its process, as Linux calls it: R, S, D, T (stopped), Z; empty: there is none. `?`: it has not begun."""
    call: str = ""
    """The number of the system call its main thread is in, or `running`; empty where nobody can tell."""
    learned: Mapping[Phase, Learned] = field(default_factory=dict)
    waited: float = 0.0
    """Seconds of its steps in which it waited for others."""
    read: float = 0.0
    """Seconds it has taken to read data."""
    spent: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds in each phase, the one it is in up to its last note."""

    def as_json(self) -> dict[str, Any]:
        table = asdict(replace(self, counts={}, waiting=None))  # whose places are no strings
        table["counts"] = [[place.name, short(place.ranks), count] for place, count in self.counts.items()]
        if self.waiting is not None:
            place = self.waiting.place
            told = None if place is None else {"name": place.name, "ranks": short(place.ranks)}
            table["waiting"] = {"kind": self.waiting.kind, "place": told, "sequence": self.waiting.sequence}
        return table

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Reading:
        """The inverse of `as_json`."""
        values = dict(table)
        values["counts"] = {Place(name, _ranks(ranks)): count for name, ranks, count in table["counts"]}
        values["learned"] = {phase: Learned(**learned) for phase, learned in table["learned"].items()}
        waiting = table["waiting"]
        if waiting is not None:
            place = waiting["place"]
            known = None if place is None else Place(place["name"], _ranks(place["ranks"]))
            values["waiting"] = Waiting(waiting["kind"], known, waiting["sequence"])
        return cls(**values)


def process_state(pid: int) -> str:
    """One letter; empty if there is no such process, or nobody can tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def process_call(pid: int) -> str:
    """What `Reading.call` says; Linux tells it of one's own descendants."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return ""


def read_heartbeat(words: memoryview[int]) -> Reading:
    """`words`: those of a heartbeat file. Its rank may be writing: then parts of two moments are read."""
    assert words[VERSION] == CURRENT
    places = _places(words)
    slot, kind = words[TRACK], WAITS[words[WAIT]]
    waited_for = places[slot] if 0 <= slot < len(places) else None
    phase = PHASES[words[PHASE]]
    spent = {name: words[SPENT + index] / 1e9 for index, name in enumerate(PHASES)}
    spent[phase] += max(0, words[CHANGED] - words[PHASE_SINCE]) / 1e9
    return Reading(
        rank=words[RANK],
        pid=words[PID],
        phase=phase,
        step=words[STEP],
        activity=ACTIVITIES[words[ACTIVITY]],
        stage=words[STAGE],
        micro_batch=words[MICRO_BATCH],
        waiting=Waiting(kind, waited_for, words[SEQUENCE]) if kind else None,
        counts={place: words[COUNTS + index] for index, place in enumerate(places)},
        changed=words[CHANGED] / 1e9,
        changes=words[CHANGES],
        device_left=words[DEVICE_LEFT],
        state=process_state(words[PID]),
        call=process_call(words[PID]),
        learned={name: _learned(words, index) for index, name in enumerate(PHASES)},
        waited=words[WAITED] / 1e9,
        read=words[READ] / 1e9,
        spent=spent,
    )


def _learned(words: memoryview[int], phase: int) -> Learned:
    typical, longest = words[TYPICAL + phase] / 1e9, words[LONGEST + phase] / 1e9
    return Learned(words[SEEN + phase], typical, longest)


def _places(words: memoryview[int]) -> list[Place]:
    content = bytes(memoryview(words).cast("B")[TABLE : TABLE + words[TABLE_SIZE]])
    try:
        return [Place(name, _ranks(ranks)) for name, ranks in json.loads(content or b"[]")]
    except ValueError:
        return []  # it is being written


def _ranks(ranks: list[int] | dict[str, int]) -> Sequence[int]:
    """The inverse of `short`."""
    if isinstance(ranks, list):
        return tuple(ranks)
    first, stride = ranks["first"], ranks["stride"]
    return range(first, first + stride * ranks["count"], stride)
