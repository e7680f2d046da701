"""Who holds up a job that stands still: a pure function of what the ranks noted last.

A rank that waits on a track waits for those that have not come as far. Followed to its roots, this graph ends at the
ranks that wait for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cuboid.telemetry.heartbeat import Activity, Phase, Place, Reading, Wait, Waiting

STOPPED = ("T", "t")
GONE = ("", "Z", "X")
NOT_BEGUN = "?"
GROUPS = {
    "data": "the data-parallel ranks",
    "tp": "the tensor-parallel ranks",
    "sequence": "the ranks of one sequence",
    "shard": "the ranks that shard ZeRO's state",
    "replicate": "the replicas of ZeRO's shards",
    "ep": "the expert-parallel ranks",
    "expert_data": "the holders of the same experts",
    "cp_inner": "the context-parallel ranks",
    "cp_outer": "the context-parallel ranks",
    "world": "all ranks",
    "link": "the pipeline ranks",
}
KINDS: dict[Wait, str] = {"new group": "making of the communicator"}
ACTIVITIES: dict[Activity, str] = {
    "data": "reading data",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "input backward": "in its backward pass (inputs)",
    "weight backward": "in its backward pass (weights)",
    "gradients": "finishing the gradients",
    "update": "in the optimizer's update",
    "reading": "reading a checkpoint",
    "writing": "writing a checkpoint",
}


@dataclass(frozen=True)
class Diagnosis:
    culprits: tuple[int, ...]
    """The ranks that keep the others waiting, most likely first; empty: all stand at the same place, and no rank can be
    told from the others."""
    sentence: str
    """Who, where, and who waits for it in what."""


def diagnose(readings: Sequence[Reading]) -> Diagnosis:
    """`readings`: of as many ranks as can be read; a rank that others wait for may be missing."""
    known = {reading.rank: reading for reading in readings if not (reading.phase == "finish" and reading.state in GONE)}
    late = Late(known)
    edges = {rank: _waits_for(reading, known, late) for rank, reading in known.items()}
    behind = Behind(edges)
    if different := _in_different_collectives(known):
        return different
    culprits = _culprits(known, edges, behind) or _odd_one(known, known)
    if not culprits:
        return Diagnosis((), _together(readings))
    first = culprits[0]
    if first in known:
        text = f"{_who(culprits)} {_state(known[first], edges, len(culprits))}"
    else:
        text = f"{_who(culprits)} did not come"
    if first in known and len(culprits) > 1 and _in_circle(first, edges):
        text += ": " + _each_in(culprits, known)
    all_behind = set().union(*(behind[rank] for rank in culprits)) - set(culprits)
    direct = sorted(rank for rank in all_behind if not edges[rank].isdisjoint(culprits))
    return Diagnosis(culprits, text + _waiters(direct, sorted(all_behind - set(direct)), known))


class Late:
    """Who has not come as far on a track: looked up once, however many ranks wait there."""

    def __init__(self, known: Mapping[int, Reading]) -> None:
        self._known = known
        self._found: dict[tuple[Place, int], frozenset[int]] = {}

    def on(self, place: Place, sequence: int) -> frozenset[int]:
        """Of the ranks whose heartbeats are known."""
        if (place, sequence) not in self._found:
            self._found[place, sequence] = frozenset(
                rank
                for rank in place.ranks
                if rank in self._known and self._known[rank].counts.get(place, 0) < sequence
            )
        return self._found[place, sequence]


def _waits_for(reading: Reading, known: Mapping[int, Reading], late: Late) -> frozenset[int]:
    """Ranks of other nodes whose heartbeats are not known count as not come, unless a known one did not come."""
    waiting = reading.waiting
    if waiting is None:
        return frozenset()
    if waiting.place is not None:
        found = late.on(waiting.place, waiting.sequence)
    elif waiting.kind == "device":
        # The host waits for its device, where everything it has begun may be what is waited for.
        found = frozenset().union(*(late.on(place, sequence) for place, sequence in reading.counts.items()))
    else:
        return frozenset()
    # Its own thread may be what writes the checkpoint it waits for; of messages it counts those that have come.
    if reading.rank in found and waiting.kind != "save":
        found -= {reading.rank}
    if found or waiting.place is None:
        return found
    return frozenset(rank for rank in waiting.place.ranks if rank not in known)


class Behind(Mapping[int, set[int]]):
    """Rank -> all that wait for it, at first or second hand. Ranks that wait for the same ones are looked at together:
    a job of thousands has few such groups."""

    def __init__(self, edges: Mapping[int, frozenset[int]]) -> None:
        members: dict[frozenset[int], list[int]] = {}
        for rank, ones in edges.items():
            members.setdefault(ones, []).append(rank)
        self._members = list(members.values())
        self._waiting: dict[int, list[int]] = {rank: [] for rank in edges}
        """Rank -> the groups that wait for it."""
        for number, ones in enumerate(members):
            for rank in ones:
                self._waiting.setdefault(rank, []).append(number)
        self._found: dict[tuple[int, ...], set[int]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, rank: int) -> set[int]:
        groups = tuple(self._waiting[rank])
        if groups not in self._found:
            seen, latest = set(groups), list(groups)
            while latest:
                after = {group for number in latest for one in self._members[number] for group in self._waiting[one]}
                latest = list(after - seen)
                seen |= after
            self._found[groups] = {one for number in seen for one in self._members[number]}
        return self._found[groups] - {rank}


def _culprits(
    known: Mapping[int, Reading], edges: Mapping[int, frozenset[int]], behind: Mapping[int, set[int]]
) -> tuple[int, ...]:
    for states in (GONE, STOPPED, (NOT_BEGUN,)):
        if found := [rank for rank, reading in known.items() if reading.state in states]:
            return _ordered(found, known, behind)
    roots = [rank for rank in behind if edges.get(rank, frozenset()) <= {rank}]
    working = [rank for rank in roots if rank not in known or known[rank].waiting is None or rank in edges[rank]]
    if working:
        most = max(len(behind[rank]) for rank in working)
        return _ordered([rank for rank in working if len(behind[rank]) == most], known, behind)
    if held_up := {one for rank in roots if behind[rank] for one in _together_with(known[rank], known)}:
        return _odd_one(held_up, known) or _ordered(held_up, known, behind)
    return _ordered([rank for rank in edges if _in_circle(rank, edges)], known, behind)


def _in_different_collectives(known: Mapping[int, Reading]) -> Diagnosis | None:
    """Ranks of one group that began its same collective, but not the same kind of it: neither can end."""
    kinds: dict[tuple[Place, int], dict[str, list[int]]] = {}
    if any(reading.state in (*GONE, *STOPPED, NOT_BEGUN) for reading in known.values()):
        return None  # which tells more
    for rank, reading in known.items():
        waiting = reading.waiting
        if waiting is not None and waiting.place is not None and waiting.kind not in ("message", "send", "save"):
            kinds.setdefault((waiting.place, waiting.sequence), {}).setdefault(waiting.kind, []).append(rank)
    for found in kinds.values():
        if len(found) > 1:
            everybody = sorted(rank for ranks in found.values() for rank in ranks)
            fewest = min(found.values(), key=len)
            culprits = tuple(fewest if 2 * len(fewest) < len(everybody) else everybody)
            text = f"ranks of one group are in different collectives, {where(known[culprits[0]])}: "
            return Diagnosis(culprits, text + _each_in(everybody, known))
    return None


def _each_in(ranks: Iterable[int], known: Mapping[int, Reading]) -> str:
    """Which ranks are in what, ranks in the same together."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        waiting = known[rank].waiting if rank in known else None
        if waiting is not None:
            groups.setdefault(_in(waiting), []).append(rank)
    return ", ".join(f"{_who(members)} {what}" for what, members in groups.items())


def tell_busy(readings: Sequence[Reading], ranks: Sequence[int]) -> str:
    """Who works while the others wait, at what, and who waits in what."""
    known = {reading.rank: reading for reading in readings}
    waiters = _each_in([rank for rank in known if rank not in ranks], known)
    one = len(ranks) == 1
    does = f"work{'s' if one else ''} {where(known[ranks[0]])}"
    if known[ranks[0]].state == NOT_BEGUN:
        does = f"{'has' if one else 'have'} not begun"
    return f"{_who(ranks)} {does}, and the others wait" + (f": {waiters}" if waiters else "")


def _together_with(reading: Reading, known: Mapping[int, Reading]) -> list[int]:
    """Who waits in the same collective, the rank itself among them: any of them may be what keeps it there."""
    return [rank for rank, other in known.items() if rank == reading.rank or _same(reading.waiting, other.waiting)]


def _same(one: Waiting | None, other: Waiting | None) -> bool:
    return one is not None and one.place is not None and one == other


def _odd_one(candidates: Iterable[int], known: Mapping[int, Reading]) -> tuple[int, ...]:
    """Of ranks that have come to the same point, the one whose process computes, or is in a system call in which no
    other rank of the job waits."""
    calls = Counter(reading.call for reading in known.values())
    odd = [rank for rank in candidates if rank in known and known[rank].call and calls[known[rank].call] == 1]
    running = [rank for rank in candidates if rank in known and known[rank].call == "running"]
    return next((tuple(found) for found in (running, odd) if len(found) == 1), ())


def _in_circle(rank: int, edges: Mapping[int, frozenset[int]]) -> bool:
    seen: set[int] = set()
    latest = set(edges[rank])
    while latest:
        if rank in latest:
            return True
        seen |= latest
        latest = {one for other in latest for one in edges.get(other, ())} - seen
    return False


def _ordered(ranks: Iterable[int], known: Mapping[int, Reading], behind: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Whom most wait for first, then who fell silent first."""
    return tuple(
        sorted(ranks, key=lambda rank: (-len(behind[rank]), known[rank].changed if rank in known else 0.0, rank))
    )


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def spans(ranks: Iterable[int]) -> str:
    """Ranks in order, those in a row by first and last.

    >>> spans([5, 0, 1, 2])
    '0–2, 5'
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def where(reading: Reading) -> str:
    """The place of a rank in words, as they follow "hangs"."""
    phases: dict[Phase, str] = {
        "set-up": "while it sets up",
        "step": f"in step {reading.step}",
        "evaluation": f"in the evaluation after step {reading.step}",
        "save": f"in the save after step {reading.step}",
        "finish": "as it finishes",
    }
    parts = [phases[reading.phase]]
    if doing := ACTIVITIES.get(reading.activity):
        parts.append(doing + (f" of stage {reading.stage}" if reading.stage >= 0 else ""))
    return ", ".join(parts)


def _state(reading: Reading, edges: Mapping[int, frozenset[int]], number: int) -> str:
    """What is the matter with a culprit, as a verb and a place."""
    place = where(reading)
    if reading.state == NOT_BEGUN:
        return "did not begin" if number == 1 else "did not begin, all of them"
    if reading.state in GONE:
        return f"ended {place}"
    if reading.state in STOPPED:
        return f"{'is' if number == 1 else 'are'} stopped by a signal {place}"
    verb = "hangs" if number == 1 else "hang"
    waiting = reading.waiting
    if waiting is not None and waiting.kind == "save" and reading.rank in edges[reading.rank]:
        return f"{verb} writing a checkpoint, {place}"
    if waiting is not None and edges[reading.rank]:
        return f"wait for each other in a circle, {place}"
    if waiting is not None:
        return f"{verb} {place}, {_in(waiting)}, to which all have come and in which the others wait"
    return f"{verb} {place}"


def _in(waiting: Waiting) -> str:
    """What a rank waits in."""
    place = waiting.place
    if waiting.kind == "device":
        return "on the device"
    if waiting.kind == "save":
        return "in the save of a checkpoint"
    if waiting.kind == "message" and place is not None:
        return f"in the receive of a message from rank {place.ranks[0]}"
    if waiting.kind == "send" and place is not None:
        return f"in the send of a message to rank {place.ranks[-1]}"
    if place is None or not place.ranks:
        return f"in {waiting.kind}"
    group = GROUPS.get(place.name, place.name)
    return f"in the {KINDS.get(waiting.kind, waiting.kind)} of {group}" + (
        "" if place.name == "world" else f" {spans(place.ranks)}"
    )


def _waiters(direct: Sequence[int], others: Sequence[int], known: Mapping[int, Reading]) -> str:
    """Who waits for the culprits, grouped by what in; then those that wait for these."""
    groups: dict[str, list[int]] = {}
    for rank in direct:
        waiting = known[rank].waiting
        if waiting is not None:
            groups.setdefault(_in(waiting), []).append(rank)
    told = sorted(groups.items(), key=lambda item: -len(item[1]))
    texts = [f"{_who(members)} wait{'s' if len(members) == 1 else ''} for it {what}" for what, members in told]
    if others:
        texts.append(f"{_who(others)} wait{'s' if len(others) == 1 else ''} behind")
    return ": " + ", ".join(texts) if texts else ""


def _together(readings: Sequence[Reading]) -> str:
    places = {_in(reading.waiting) for reading in readings if reading.waiting is not None}
    where_all = places.pop() if len(places) == 1 else "at places that do not depend on each other"
    return (
        f"all ranks have come to the same point and none continues, {where_all}: a device or a link may be at fault, "
        f"in step {max((reading.step for reading in readings), default=0)}"
    )
