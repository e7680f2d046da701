"""A heartbeat as somebody else reads it: plain data, so that the nodes of a job can show theirs to each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cuboid.telemetry import heartbeat as file
from cuboid.telemetry.heartbeat import ACTIVITIES, PHASES, WAITS, Activity, Phase, Wait, short


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
    assert words[file.VERSION] == file.CURRENT
    places = _places(words)
    slot, kind = words[file.TRACK], WAITS[words[file.WAIT]]
    waited_for = places[slot] if 0 <= slot < len(places) else None
    phase = PHASES[words[file.PHASE]]
    spent = {name: words[file.SPENT + index] / 1e9 for index, name in enumerate(PHASES)}
    spent[phase] += max(0, words[file.CHANGED] - words[file.PHASE_SINCE]) / 1e9
    return Reading(
        rank=words[file.RANK],
        pid=words[file.PID],
        phase=phase,
        step=words[file.STEP],
        activity=ACTIVITIES[words[file.ACTIVITY]],
        stage=words[file.STAGE],
        micro_batch=words[file.MICRO_BATCH],
        waiting=Waiting(kind, waited_for, words[file.SEQUENCE]) if kind else None,
        counts={place: words[file.COUNTS + index] for index, place in enumerate(places)},
        changed=words[file.CHANGED] / 1e9,
        changes=words[file.CHANGES],
        device_left=words[file.DEVICE_LEFT],
        state=process_state(words[file.PID]),
        call=process_call(words[file.PID]),
        learned={name: _learned(words, index) for index, name in enumerate(PHASES)},
        waited=words[file.WAITED] / 1e9,
        read=words[file.READ] / 1e9,
        spent=spent,
    )


def _learned(words: memoryview[int], phase: int) -> Learned:
    typical, longest = words[file.TYPICAL + phase] / 1e9, words[file.LONGEST + phase] / 1e9
    return Learned(words[file.SEEN + phase], typical, longest)


def _places(words: memoryview[int]) -> list[Place]:
    content = bytes(memoryview(words).cast("B")[file.TABLE : file.TABLE + words[file.TABLE_SIZE]])
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
