"""Restores a state kept in the memory of nodes: what a node lacks comes from another that has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, Damage, Manifest, StoredFile, checksum_of_bytes, kind_of, read_manifest
from cuboid.checkpoint.memory.folder import sweep_all_but
from cuboid.checkpoint.memory.node_state import (
    NodeRecord,
    chunks,
    digest_of,
    join_entries,
    map_new_file,
    tell_leaders,
    with_index,
)
from cuboid.checkpoint.memory.nodes import (
    Generation,
    Held,
    Holdings,
    Memory,
    Transfer,
    holders,
    known,
    missing,
    ranks_by_node,
    transfers,
)
from cuboid.checkpoint.memory.pairs import Pairs
from cuboid.checkpoint.shards import Index, Wishes
from cuboid.checkpoint.storage import as_bytes
from cuboid.checkpoint.verify import check_entries, check_file
from cuboid.errors import UserError
from cuboid.parallel.coordination import Coordination
from cuboid.spec.layout import Layout

# A state in memory as rank 0 knows it from what the nodes say, and who brings whom what. Other ranks are told what
# they do and no more: a plan for all, told to all, would grow with the square of the ranks.


Check = tuple[str, StoredFile]
Duty = tuple[Transfer, StoredFile]


class Gathered:
    """Empty on all ranks but rank 0: what it gives for each rank is an empty list there."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._by_node = ranks_by_node(nodes)
        self.index: Index = {}
        self._files: dict[str, StoredFile] = {}
        self._entries: dict[str, Index] = {}
        """File -> what the index says of it."""
        self._held: dict[str, list[str]] = {}
        """File -> the nodes that have it, as far as is known now."""
        self._needed: dict[str, frozenset[str]] = {}
        self._reasons: dict[str, str] = {}
        self._plan: list[Transfer] = []
        self._brought: list[Transfer] = []

    def put_together(
        self, generation: Generation, holdings: Holdings, told: Sequence[NodeRecord | None], place: Location
    ) -> Manifest:
        """The manifest, without its files. A `UserError` if anything is on no node."""
        self._held = holders(holdings, generation)
        lacking = missing(holdings, generation)
        manifest: Manifest | None = None
        for record in told:
            if record is not None:
                manifest = record.manifest
                self._files |= manifest.files
                self._entries |= record.entries
        if lacking or manifest is None:
            raise UserError(f"{part(lacking[0]) if lacking else 'all of it'} is on no node that is left")
        if silent := sorted(self._held.keys() - self._entries.keys()):
            raise UserError(f"the index of {part(silent[0])} is damaged on every node that has it")
        self.index = check_entries(place, join_entries(self._entries.values()), self._files)
        return replace(manifest, files={})

    def checks(self, wanted: Sequence[frozenset[str]]) -> list[list[Check]]:
        """For each rank what it compares with its checksum, a part of what its node has and needs. `wanted`: by
        rank."""
        result: list[list[Check]] = [[] for _ in self._nodes]
        for node, ranks in self._by_node.items():
            self._needed[node] = frozenset[str]().union(*(wanted[rank] for rank in ranks))
            present = sorted(file for file in self._needed[node] if node in self._held[file])
            for number, file in enumerate(present):
                result[ranks[number % len(ranks)]].append((file, self._files[file]))
        return result

    def note_damage(self, told: Sequence[Mapping[str, str]]) -> None:
        """`told`: by rank, why files of its node are damaged."""
        for node, damaged in zip(self._nodes, told, strict=True):
            for file, reason in damaged.items():
                self._held[file].remove(node)
                self._reasons[file] = reason

    def plan(self) -> bool:
        """Whether anything is to be brought. A `UserError` if what is needed is on no node any more."""
        for file in sorted(frozenset[str]().union(*self._needed.values())):
            if not self._held[file]:
                raise UserError(self._reasons[file])
        self._plan = transfers(self._nodes, self._needed, self._held)
        return bool(self._plan)

    def duties(self) -> list[list[Duty]]:
        """For each rank what it sends and receives, in the one order of all."""
        result: list[list[Duty]] = [[] for _ in self._nodes]
        for transfer in self._plan:
            for rank in (transfer.source, transfer.target):
                result[rank].append((transfer, self._files[transfer.file]))
        return result

    def note_failed(self, told: Sequence[Mapping[Transfer, str]]) -> None:
        """Where it was damaged it is no more; else it has come."""
        failed = {transfer: reason for each in told for transfer, reason in each.items()}
        for transfer in self._plan:
            nodes, source = self._held[transfer.file], self._nodes[transfer.source]
            if transfer not in failed:
                nodes.append(self._nodes[transfer.target])
                self._brought.append(transfer)
            elif source in nodes:
                nodes.remove(source)
                self._reasons[transfer.file] = failed[transfer]

    def records(self, manifest: Manifest) -> dict[str, NodeRecord]:
        """For each node to which something was brought what it has now."""
        changed: dict[str, list[str]] = {self._nodes[transfer.target]: [] for transfer in self._brought}
        for file, nodes in self._held.items():
            for node in nodes:
                if node in changed:
                    changed[node].append(file)
        result = {}
        for node, files in changed.items():
            index = json.dumps(join_entries(self._entries[file] for file in files)).encode()
            kept = {file: self._files[file] for file in files}
            result[node] = NodeRecord(with_index(manifest, kept, index, kind_of(self._files[INDEX].checksum)), index)
        return result

    @property
    def sent(self) -> str:
        """Which parts came from where, each told once however many nodes it went to."""
        senders: dict[str, set[int]] = {}
        for transfer in self._brought:
            senders.setdefault(self._nodes[transfer.source], set()).add(rank_of(transfer.file))
        told = []
        for node, ranks in sorted(senders.items()):
            few = "part of rank " if len(ranks) == 1 else "parts of ranks "
            told.append(f"{few}{', '.join(map(str, sorted(ranks)))} from node {node}")
        return "; ".join(told)


def rank_of(file: str) -> int:
    """
    >>> rank_of("data-00003.bin")
    3
    """
    return int(file[5:-4])


def part(file: str) -> str:
    return f"the part of rank {rank_of(file)}"


Answer = TypeVar("Answer")


class Lost(Exception):
    """A state in memory cannot be restored, as all ranks know."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the state in memory after step {step} cannot be used: {reason}")


@dataclass(frozen=True)
class Brought:
    """A state in memory that can be loaded now: where it lies on this node, what this rank needs of its index, and, as
    rank 0 knows it, what other nodes sent."""

    folder: Location
    manifest: Manifest
    index: Index
    sent: str


class MemoryRestore:
    """Every rank makes one as a run starts, and calls the same methods in the same order."""

    def __init__(self, memory: Memory, group: Coordination, newest: int) -> None:
        """`newest`: the last step that the run's own rows tell of, as rank 0 sees it; a state of a later one belongs to
        a past that was given up."""
        self._memory, self._group = memory, group
        self._pairs = Pairs(group, memory.secret)
        if memory.leads:
            sweep_all_but(memory.folder, map(step_of, checkpoints(memory.folder)))
        self._here = _held_here(memory.folder) if memory.leads else {}
        told = zip(memory.nodes, group.gather(self._here), strict=True)
        self._holdings = {node: held for node, held in told if held}
        """On rank 0."""
        self.generations = group.broadcast(known(self._holdings, newest))

    def bring(self, generation: Generation, wishes: Wishes, layout: str) -> Brought:
        """Bring this node what its ranks need of it on this layout, all of it verified. Raises `Lost`."""
        step, group = generation.step, self._group
        folder = checkpoint_path(self._memory.folder, step)
        gathered = Gathered(self._memory.nodes)
        told = group.gather(self._record_here(folder, generation))
        manifest = self._first(step, lambda: gathered.put_together(generation, self._holdings, told, folder))
        self._agree(step, self._make_place(folder, generation))
        index = wishes.part(gathered.index)
        wanted = group.gather(files_for(index, with_generators=layout == manifest.layout))
        gathered.note_damage(group.gather(self._check(folder, group.scatter(gathered.checks(wanted)))))
        while self._first(step, gathered.plan):
            gathered.note_failed(group.gather(self._carry_out(folder, group.scatter(gathered.duties()))))
        self._agree(step, self._write(folder, tell_leaders(self._memory.nodes, gathered.records(manifest), group)))
        return Brought(folder, manifest, index, gathered.sent)

    def settle(self, step: int | None) -> None:
        """The run continues from this step in memory, or from elsewhere: everything else is given back."""
        self._group.agree("")
        if self._memory.leads:
            sweep_all_but(self._memory.folder, [] if step is None else [step])

    def _agree(self, step: int, problem: str) -> None:
        if problem := self._group.agree(problem):
            raise Lost(step, problem)

    def _first(self, step: int, work: Callable[[], Answer]) -> Answer:
        """What rank 0 finds, on all ranks; `Lost` if it cannot."""
        answer: tuple[Answer | None, str] = (None, "")
        if self._memory.rank == 0:
            try:
                answer = work(), ""
            except UserError as error:
                answer = None, str(error)
        found, problem = self._group.broadcast(answer)
        if problem:
            raise Lost(step, problem)
        return found  # type: ignore[return-value]

    def _record_here(self, folder: Location, generation: Generation) -> NodeRecord | None:
        """What this node says of what it has, once."""
        if generation in self._here:
            with suppress(UserError, OSError):
                manifest = read_manifest(folder)
                if digest_of(manifest) == generation.digest:
                    with suppress(UserError, OSError):
                        check_file(folder, INDEX, manifest.files[INDEX])
                        return NodeRecord(manifest, (folder / INDEX).read())
                    return NodeRecord(manifest, b"")
        return None

    def _make_place(self, folder: Location, generation: Generation) -> str:
        """On nodes that have nothing of it, or something of another attempt at the same step."""
        if not self._memory.leads or generation in self._here:
            return ""
        try:
            folder.remove()
            folder.make_folder()
        except OSError as error:
            return str(error)
        return ""

    def _check(self, folder: Location, files: list[Check]) -> dict[str, str]:
        """Why files are damaged; each comes from the next node that has it."""
        damaged: dict[str, str] = {}
        for name, facts in files:
            try:
                check_file(folder, name, facts)
            except Damage as damage:
                damaged[name] = f"{part(name)} on node {self._memory.node} {damage.reason}"
        return damaged

    def _carry_out(self, folder: Location, duties: list[Duty]) -> dict[Transfer, str]:
        """Those that failed."""
        failed: dict[Transfer, str] = {}
        for transfer, facts in duties:
            place = folder / transfer.file
            if self._memory.rank == transfer.source:
                self._send(place, facts, transfer.target)
            elif problem := self._receive(place, facts, transfer.source):
                failed[transfer] = problem
        return failed

    def _send(self, place: Location, facts: StoredFile, target: int) -> None:
        content = torch.from_file(place.path, shared=False, size=facts.bytes, dtype=torch.uint8)
        self._pairs.connect([target])
        for chunk in chunks(content):
            self._pairs.send(chunk, target).wait()

    def _receive(self, place: Location, facts: StoredFile, source: int) -> str:
        """Published under its name when it is whole; a sentence if it is not. All of it is taken in any case, because
        the other side sends all."""
        aside, problem = place.parent.parent / f".{place.name}.coming", ""
        try:
            aside.remove()
            content = map_new_file(aside, facts.bytes, torch.device("cpu"))
        except OSError as error:
            problem = f"node {self._memory.node} has no room for {part(place.name)} ({error.strerror})"
            content = torch.empty(facts.bytes, dtype=torch.uint8)
        self._pairs.connect([source])
        for chunk in chunks(content):
            self._pairs.receive(chunk, source).wait()
        if not problem and checksum_of_bytes(as_bytes(content), kind_of(facts.checksum)) != facts.checksum:
            problem = f"{part(place.name)} sent by rank {source} does not match its checksum"
        if not problem:
            aside.rename(place)
        return problem

    def _write(self, folder: Location, record: NodeRecord | None) -> str:
        """What was brought counts as this node's own, should the run start again before the next save."""
        try:
            if record is not None:
                record.write(folder)
        except OSError as error:
            return f"node {self._memory.node}: {error}"
        return ""


def _held_here(folder: Location) -> dict[Generation, Held]:
    """What this node has, by names and sizes."""
    result: dict[Generation, Held] = {}
    for path in checkpoints(folder):
        with suppress(UserError, OSError):  # what is damaged is as good as gone: another node may have it
            manifest = read_manifest(path)
            files = ((name, facts) for name, facts in manifest.files.items() if name != INDEX)
            present = frozenset(name for name, facts in files if (path / name).size == facts.bytes)
            if manifest.step == step_of(path):
                ranks = Layout.parse(manifest.layout).world_size
                result[Generation(manifest.step, digest_of(manifest))] = Held(ranks, present)
    return result


def files_for(index: Index, with_generators: bool) -> frozenset[str]:
    """The files that hold what a rank reads."""
    entries = (entry for name, entry in index.items() if with_generators or not name.startswith("generator/"))
    return frozenset(chunk["file"] for entry in entries for chunk in entry["chunks"])
