"""Puts a state kept in memory together again: what a node lacks comes from another that has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.checksum import checksum_of_bytes, kind_of
from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.generators import generators
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Damage, Manifest, StoredFile, read_manifest
from cuboid.checkpoint.memory.copies import Generation, Held, Transfer, holders, known, missing, transfers
from cuboid.checkpoint.memory.folder import sweep_all_but
from cuboid.checkpoint.memory.nodes import Memory, from_rank
from cuboid.checkpoint.memory.pairs import Pairs
from cuboid.checkpoint.memory.slot import chunks, map_new_file
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.staging import as_bytes
from cuboid.checkpoint.state import Moments, state_to_load
from cuboid.checkpoint.verify import check_file
from cuboid.data.opened import data_identity
from cuboid.errors import UserError
from cuboid.parallel.apply import Engine
from cuboid.parallel.coordination import Coordination


class Lost(Exception):
    """A state in memory cannot be put together, as all ranks know."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the state in memory after step {step} cannot be used: {reason}")


@dataclass(frozen=True)
class Brought:
    """A state in memory that can be loaded now: where it lies on this node, its index, and what other nodes sent."""

    folder: Location
    manifest: Manifest
    index: dict[str, Any]
    sent: str


class Recall:
    """Every rank makes one as a run starts, and calls the same methods in the same order."""

    def __init__(self, memory: Memory, group: Coordination, newest: int) -> None:
        """`newest`: the last step that the run's own rows tell of, as rank 0 sees it; a state of a later one belongs to
        a past that was given up."""
        self._memory, self._group = memory, group
        self._pairs = Pairs(group, memory.nodes)
        if memory.leads:
            sweep_all_but(memory.folder, map(step_of, checkpoints(memory.folder)))
        told = group.gather(_held_here(memory.folder) if memory.leads else None)
        holdings = {node: held for node, held in zip(memory.nodes, told, strict=False) if held is not None}
        self._holdings, newest = group.broadcast((holdings, newest))
        self.generations = known(self._holdings, newest)

    def bring(self, generation: Generation, engine: Engine, optimizer: Moments) -> Brought:
        """Bring this node what its ranks need of it, all of it verified. Raises `Lost`."""
        folder = checkpoint_path(self._memory.folder, generation.step)
        if lacking := missing(self._holdings, generation):
            raise Lost(generation.step, f"{_part(lacking[0])} is on no node that is left")
        manifest = self._bring_manifest(folder, generation)
        held = holders(self._holdings, generation)
        self._bring(folder, manifest, held, {INDEX})
        problem, needed, index = "", set[str](), dict[str, Any]()
        try:
            index = check_index(folder, manifest.files)
            needed = files_for(index, _wanted(engine, optimizer, manifest))
        except UserError as error:
            problem = str(error)
        self._agree(manifest.step, problem)
        if not from_rank(0, self._memory.rank > 0 or manifest.data == data_identity(engine.run), self._group):
            raise UserError(
                f"data.source={', '.join(engine.run.data.sources)} holds other samples than it did when the state "
                f"after step {manifest.step} was kept in memory; use the same data, another folder, or --overwrite"
            )
        brought = self._bring(folder, manifest, held, needed)
        return Brought(folder, manifest, index, _tell(brought, self._memory.nodes))

    def settle(self, step: int | None) -> None:
        """The run goes on from this step in memory, or from elsewhere: everything else is given back."""
        self._group.agree("")
        if self._memory.leads:
            sweep_all_but(self._memory.folder, [] if step is None else [step])

    def _agree(self, step: int, problem: str) -> None:
        if problem := self._group.agree(problem):
            raise Lost(step, problem)

    def _bring_manifest(self, folder: Location, generation: Generation) -> Manifest:
        """To nodes that have nothing of it, or something of another attempt at the same step."""
        holder = next(node for node, held in self._holdings.items() if generation in held)
        source = self._memory.nodes.index(holder)
        has = generation in self._holdings[self._memory.node]
        content, problem = b"", ""
        with suppress(OSError):
            content = (folder / MANIFEST).read() if self._memory.rank == source else b""
        content = from_rank(source, content, self._group)
        if self._memory.leads and not has:
            try:
                folder.remove()
                folder.make_folder()
                (folder / MANIFEST).write_durably(content)
            except OSError as error:
                problem = str(error)
        self._agree(generation.step, problem)
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            problem = str(error)
        self._agree(generation.step, problem)
        assert manifest is not None
        return manifest

    def _bring(
        self, folder: Location, manifest: Manifest, held: dict[str, list[str]], wanted: Iterable[str]
    ) -> list[Transfer]:
        """To every node what its ranks want. What a node has of that its ranks verify, each a share; what it is sent
        is verified as it arrives; what is damaged comes from the next who has it. `held`, file -> nodes, is kept
        true."""
        needed: dict[str, frozenset[str]] = {}
        for node, files in zip(self._memory.nodes, self._group.gather(frozenset(wanted)), strict=False):
            needed[node] = needed.get(node, frozenset()) | files
        needed = self._group.broadcast(needed)
        here, neighbours = self._memory.node, self._memory.neighbours
        present = sorted(file for file in needed[here] if here in held.get(file, ()))
        damaged: dict[str, str] = {}
        for name in present[neighbours.index(self._memory.rank) :: len(neighbours)]:
            try:
                check_file(folder, name, manifest.files[name])
            except Damage as damage:
                damaged[name] = f"{_part(name)} on node {here} {damage.reason}"
        reasons: dict[str, str] = {}
        for node, found in _told_by_some(self._memory.nodes, damaged, self._group):
            reasons |= found
            for name in found:
                held[name].remove(node)
        brought: list[Transfer] = []
        while True:
            for name in sorted(frozenset[str]().union(*needed.values())):
                if not held.get(name):
                    raise Lost(manifest.step, reasons[name])
            plan = transfers(self._memory.nodes, needed, held)
            if not plan:
                return brought
            brought += self._carry_out(plan, folder, manifest, held, reasons)

    def _carry_out(
        self,
        plan: list[Transfer],
        folder: Location,
        manifest: Manifest,
        held: dict[str, list[str]],
        reasons: dict[str, str],
    ) -> list[Transfer]:
        """Those that went well."""
        failed: dict[Transfer, str] = {}
        for transfer in plan:
            place, facts = folder / transfer.file, manifest.files[transfer.file]
            if self._memory.rank == transfer.source:
                self._send(place, facts, transfer.target)
            elif self._memory.rank == transfer.target and (problem := self._receive(place, facts, transfer.source)):
                failed[transfer] = problem
        for _, told in _told_by_some(self._memory.nodes, failed, self._group):
            failed |= told
        for transfer in plan:
            nodes = held[transfer.file]
            if transfer not in failed:
                nodes.append(self._memory.nodes[transfer.target])
            elif self._memory.nodes[transfer.source] in nodes:
                nodes.remove(self._memory.nodes[transfer.source])
                reasons[transfer.file] = failed[transfer]
        return [transfer for transfer in plan if transfer not in failed]

    def _send(self, place: Location, facts: StoredFile, target: int) -> None:
        content = torch.from_file(place.path, shared=False, size=facts.bytes, dtype=torch.uint8)
        self._pairs.connect([target])
        for part in chunks(content):
            self._pairs.send(part, target).wait()

    def _receive(self, place: Location, facts: StoredFile, source: int) -> str:
        """Published under its name when it is whole; a sentence if it is not. All of it is taken in any case, because
        the other side sends all."""
        aside, problem = place.parent.parent / f".{place.name}.coming", ""
        try:
            aside.remove()
            content = map_new_file(aside, facts.bytes, torch.device("cpu"))
        except OSError as error:
            problem = f"node {self._memory.node} has no room for {_part(place.name)} ({error.strerror})"
            content = torch.empty(facts.bytes, dtype=torch.uint8)
        self._pairs.connect([source])
        for part in chunks(content):
            self._pairs.receive(part, source).wait()
        if not problem and checksum_of_bytes(as_bytes(content), kind_of(facts.checksum)) != facts.checksum:
            problem = f"{_part(place.name)} from node {self._memory.nodes[source]} does not match its checksum"
        if not problem:
            aside.rename(place)
        return problem


def _told_by_some(nodes: Sequence[str], own: dict[Any, str], group: Coordination) -> list[tuple[str, dict[Any, str]]]:
    """What ranks have to tell, with their nodes, on all ranks: most have nothing."""
    return group.broadcast([(node, told) for node, told in zip(nodes, group.gather(own), strict=False) if told])


def _held_here(folder: Location) -> dict[Generation, Held]:
    """What this node has, by names and sizes."""
    result: dict[Generation, Held] = {}
    for path in checkpoints(folder):
        with suppress(UserError, OSError):  # what is damaged is as good as gone: another node may have it
            manifest = read_manifest(path)
            generation = Generation(manifest.step, sha256((path / MANIFEST).read()).hexdigest())
            present = frozenset(name for name, facts in manifest.files.items() if (path / name).size == facts.bytes)
            if manifest.step == step_of(path):
                result[generation] = Held(len(manifest.files) - 1, present)  # all but the index
    return result


def _wanted(engine: Engine, optimizer: Moments, manifest: Manifest) -> dict[str, Scattered]:
    own = generators(engine) if manifest.layout == str(engine.run.layout) else {}
    return {**state_to_load(engine, optimizer), **own}


def files_for(index: dict[str, Any], state: dict[str, Scattered]) -> set[str]:
    """The files that hold something of a state."""
    result: set[str] = set()
    for name, held in state.items():
        for chunk in index[name]["chunks"] if name in index else ():
            place, stored = chunk["file"], list(zip(chunk["offsets"], chunk["lengths"], strict=True))
            if place not in result and any(_overlap(box, stored) for box, _ in held.boxes):
                result.add(place)
    return result


def _overlap(box: Box, stored: list[tuple[int, int]]) -> bool:
    return all(
        start < offset + length and offset < start + extent
        for start, extent, (offset, length) in zip(box.offsets, box.lengths, stored, strict=True)
    )


def _part(file: str) -> str:
    """
    >>> _part("data-00003.bin")
    'the part of rank 3'
    """
    return file if file == INDEX else f"the part of rank {int(file[5:-4])}"


def _tell(brought: list[Transfer], nodes: tuple[str, ...]) -> str:
    """Which parts came from where, each told once however many nodes it went to."""
    senders: dict[str, set[int]] = {}
    for transfer in brought:
        if transfer.file != INDEX:
            senders.setdefault(nodes[transfer.source], set()).add(int(transfer.file[5:-4]))
    told = []
    for node, ranks in sorted(senders.items()):
        few = "part of rank " if len(ranks) == 1 else "parts of ranks "
        told.append(f"{few}{', '.join(map(str, sorted(ranks)))} from node {node}")
    return "; ".join(told)
