"""Puts a state kept in memory together again: what a node lacks comes from another that has it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.checksum import checksum_of_bytes, kind_of
from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.generators import generators
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile, read_manifest
from cuboid.checkpoint.memory import Memory, from_rank, gather
from cuboid.checkpoint.memory_copies import Generation, Held, Transfer, known, missing, transfers
from cuboid.checkpoint.memory_folder import sweep_all_but
from cuboid.checkpoint.memory_slot import chunks, map_new_file
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.staging import as_bytes
from cuboid.checkpoint.state import Moments, state_to_load
from cuboid.checkpoint.verify import check_file
from cuboid.data.opened import data_identity
from cuboid.errors import UserError
from cuboid.parallel.apply import Engine


class Lost(Exception):
    """A state in memory cannot be put together, as all ranks know; says why."""


class Recall:
    """Every rank makes one as a run starts, and calls the same methods in the same order."""

    def __init__(self, memory: Memory, group: dist.ProcessGroup | None, newest: int) -> None:
        """`newest`: the last step that the run's own rows tell of, as rank 0 sees it; a state of a later one belongs to
        a past that was given up."""
        self._memory, self._group = memory, group
        if memory.leads:
            sweep_all_but(memory.folder, map(step_of, checkpoints(memory.folder)))
        told = gather((memory.node, _held_here(memory.folder) if memory.leads else None), group)
        self._holdings = {node: held for node, held in told if held is not None}
        self.generations = known(self._holdings, from_rank(0, newest, group))

    def bring(self, generation: Generation, engine: Engine, optimizer: Moments) -> tuple[Location, Manifest, str]:
        """Verify it, and bring this node what its ranks need of it; where it lies then, and what was brought. Raises
        `Lost`."""
        folder = checkpoint_path(self._memory.folder, generation.step)
        if lacking := missing(self._holdings, generation):
            state = f"the state in memory after step {generation.step} cannot be used"
            raise Lost(f"{state}: {_part(lacking[0])} is on no node that is left")
        manifest = self._bring_manifest(folder, generation)
        held = self._verified(folder, manifest, generation)
        first = self._bring(folder, manifest, held, {INDEX})
        problem, needed = "", set[str]()
        try:
            needed = files_for(check_index(folder, manifest.files), _wanted(engine, optimizer, manifest))
        except UserError as error:
            problem = str(error)
        self._agree(problem)
        if not from_rank(0, self._memory.rank > 0 or manifest.data == data_identity(engine.run), self._group):
            raise UserError(
                f"data.source={', '.join(engine.run.data.sources)} holds other samples than it did when the state "
                f"after step {manifest.step} was kept in memory; use the same data, another folder, or --overwrite"
            )
        rest = self._bring(folder, manifest, held, needed)
        return folder, manifest, _tell([*first, *rest], self._memory.nodes)

    def settle(self, step: int | None) -> None:
        """The run goes on from this step in memory, or from elsewhere: everything else is given back."""
        gather(None, self._group)
        if self._memory.leads:
            sweep_all_but(self._memory.folder, [] if step is None else [step])

    def _agree(self, problem: str) -> None:
        if problem := next(filter(None, gather(problem, self._group)), ""):
            raise Lost(problem)

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
        self._agree(problem)
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            problem = str(error)
        self._agree(problem)
        assert manifest is not None
        return manifest

    def _verified(self, folder: Location, manifest: Manifest, generation: Generation) -> dict[str, list[str]]:
        """File -> the nodes that have it, byte for byte; the ranks of a node share the work."""
        node, neighbours = self._memory.node, self._memory.neighbours
        here = self._holdings[node].get(generation)
        share = sorted(here.present if here else ())[neighbours.index(self._memory.rank) :: len(neighbours)]
        good, bad = set[str](), dict[str, str]()
        for name in share:
            try:
                check_file(folder, name, manifest.files[name])
                good.add(name)
            except UserError as error:
                bad[name] = str(error)
        told = gather((good, bad), self._group)
        held: dict[str, list[str]] = {}
        for one, (names, _) in zip(self._memory.nodes, told, strict=True):
            for name in names:
                held.setdefault(name, []).append(one)
        if lacking := sorted(manifest.files.keys() - held.keys()):
            raise Lost(next(reasons[lacking[0]] for _, reasons in told if lacking[0] in reasons))
        return held

    def _bring(
        self, folder: Location, manifest: Manifest, held: dict[str, list[str]], wanted: Iterable[str]
    ) -> list[Transfer]:
        """To every node what its ranks want."""
        needed: dict[str, frozenset[str]] = {}
        for node, files in zip(self._memory.nodes, gather(frozenset(wanted), self._group), strict=True):
            needed[node] = needed.get(node, frozenset()) | files
        plan = transfers(self._memory.nodes, needed, held)
        problem = ""
        for transfer in plan:
            facts = manifest.files[transfer.file]
            if self._memory.rank == transfer.source:
                self._send(folder / transfer.file, facts, transfer.target)
            elif self._memory.rank == transfer.target:
                problem = self._receive(folder / transfer.file, facts, transfer.source) or problem
        self._agree(problem)
        return plan

    def _send(self, place: Location, facts: StoredFile, target: int) -> None:
        content = torch.from_file(place.path, shared=False, size=facts.bytes, dtype=torch.uint8)
        for part in chunks(content):
            dist.send(part, target, group=self._group)

    def _receive(self, place: Location, facts: StoredFile, source: int) -> str:
        """Published under its name when it is whole; a sentence if it is not. All of it is taken in any case, because
        the other side sends all."""
        aside, problem = place.parent.parent / f".{place.name}.coming", ""
        try:
            aside.remove()
            content = map_new_file(aside, facts.bytes, torch.device("cpu"))
        except OSError as error:
            problem = f"{place.name} has no room: {error.strerror}"
            content = torch.empty(facts.bytes, dtype=torch.uint8)
        for part in chunks(content):
            dist.recv(part, source, group=self._group)
        if not problem and checksum_of_bytes(as_bytes(content), kind_of(facts.checksum)) != facts.checksum:
            problem = f"{place.name} did not arrive as it was sent"
        if not problem:
            aside.rename(place)
        return problem


def _held_here(folder: Location) -> dict[Generation, Held]:
    """What this node has, by names and sizes."""
    result: dict[Generation, Held] = {}
    for path in checkpoints(folder):
        with suppress(UserError, OSError):  # what is damaged is as good as gone: another node may have it
            manifest = read_manifest(path)
            generation = Generation(manifest.step, sha256((path / MANIFEST).read()).hexdigest())
            present = frozenset(name for name, facts in manifest.files.items() if (path / name).size == facts.bytes)
            if manifest.step == step_of(path):
                result[generation] = Held(frozenset(manifest.files), present)
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
