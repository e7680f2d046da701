"""Puts a state kept in memory together again: what a node lacks comes from another that has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from cuboid.checkpoint.checksum import checksum_of_bytes, kind_of
from cuboid.checkpoint.folder import checkpoint_path, checkpoints, step_of
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, Damage, Manifest, StoredFile, read_manifest
from cuboid.checkpoint.memory.copies import Generation, Held, Transfer, known
from cuboid.checkpoint.memory.folder import sweep_all_but
from cuboid.checkpoint.memory.gathered import Check, Duty, Gathered, part
from cuboid.checkpoint.memory.nodes import Memory
from cuboid.checkpoint.memory.pairs import Pairs
from cuboid.checkpoint.memory.shares import Share, digest_of, tell_leaders
from cuboid.checkpoint.memory.slot import chunks, map_new_file
from cuboid.checkpoint.parts import Index, Wishes
from cuboid.checkpoint.staging import as_bytes
from cuboid.checkpoint.verify import check_file
from cuboid.errors import UserError
from cuboid.parallel.coordination import Coordination
from cuboid.spec.layout import Layout

Answer = TypeVar("Answer")


class Lost(Exception):
    """A state in memory cannot be put together, as all ranks know."""

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


class Recall:
    """Every rank makes one as a run starts, and calls the same methods in the same order."""

    def __init__(self, memory: Memory, group: Coordination, newest: int) -> None:
        """`newest`: the last step that the run's own rows tell of, as rank 0 sees it; a state of a later one belongs to
        a past that was given up."""
        self._memory, self._group = memory, group
        self._pairs = Pairs(group)
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
        told = group.gather(self._share(folder, generation))
        manifest = self._first(step, lambda: gathered.put_together(generation, self._holdings, told, folder))
        self._agree(step, self._make_place(folder, generation))
        index = wishes.part(gathered.index)
        wanted = group.gather(files_for(index, with_generators=layout == manifest.layout))
        gathered.note_damage(group.gather(self._check(folder, group.scatter(gathered.checks(wanted)))))
        while self._first(step, gathered.plan):
            gathered.note_failed(group.gather(self._carry_out(folder, group.scatter(gathered.duties()))))
        self._agree(step, self._write(folder, tell_leaders(self._memory.nodes, gathered.shares(manifest), group)))
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

    def _share(self, folder: Location, generation: Generation) -> Share | None:
        """What this node says of what it has, once."""
        if generation in self._here:
            with suppress(UserError, OSError):
                manifest = read_manifest(folder)
                if digest_of(manifest) == generation.digest:
                    with suppress(UserError, OSError):
                        check_file(folder, INDEX, manifest.files[INDEX])
                        return Share(manifest, (folder / INDEX).read())
                    return Share(manifest, b"")
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
        for optimizer_shard in chunks(content):
            self._pairs.send(optimizer_shard, target).wait()

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
        for optimizer_shard in chunks(content):
            self._pairs.receive(optimizer_shard, source).wait()
        if not problem and checksum_of_bytes(as_bytes(content), kind_of(facts.checksum)) != facts.checksum:
            problem = f"{part(place.name)} sent by rank {source} does not match its checksum"
        if not problem:
            aside.rename(place)
        return problem

    def _write(self, folder: Location, share: Share | None) -> str:
        """What was brought counts as this node's own, should the run start again before the next save."""
        try:
            if share is not None:
                share.write(folder)
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
