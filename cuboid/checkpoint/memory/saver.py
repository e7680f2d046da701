"""Keeps the state in memory every few steps: each rank's part on its own node, and a copy on the next one."""

from __future__ import annotations

from typing import Any

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.manifest import FAST, PLAIN, Manifest, StoredFile, checksum_of_bytes, kind_here
from cuboid.checkpoint.memory.node_state import Slot, assign_copies, chunks, node_index, node_manifest
from cuboid.checkpoint.memory.nodes import Memory
from cuboid.checkpoint.memory.pairs import Pairs
from cuboid.checkpoint.save import BackgroundSaver, GivenUp, kept_state
from cuboid.checkpoint.state import Moments
from cuboid.checkpoint.storage import Staging, as_bytes, staged_bytes
from cuboid.console import say
from cuboid.errors import UserError
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.parallelize import Engine


class MemorySaver(BackgroundSaver):
    """Two slots take turns: the last whole generation stays untouched until all nodes have published the next.

    A save that is due while the one before is in flight is skipped: the next is only a few steps away."""

    place = "memory"
    kept = "copy in memory"

    def __init__(self, engine: Engine, optimizer: Moments, memory: Memory, quiet: bool = False) -> None:
        super().__init__(engine, optimizer, open_coordination(engine.run.checkpoint.timeout_seconds))
        self._memory = memory
        own = staged_bytes(kept_state(engine, optimizer))
        sizes = self._group.gather(own)
        self._bytes = self._sum_of_all(own)
        self._kind = self._group.agree("" if kind_here() == FAST else PLAIN) or FAST
        """Of checksums, which all nodes must be able to compute."""
        self._peer, self._copies = assign_copies(sizes, memory.nodes, self._group)
        """The rank that keeps a copy of this one's part; ranks whose parts are copied here, and their sizes."""
        self._pairs = Pairs(self._group, memory.secret)
        self._copied = True
        """Whether the last collective went well here."""
        self._slots: list[Slot | None] = [None, None]
        self._current = 0
        self._warned = False
        try:
            self._open_slot(0)
        except OSError as error:
            raise UserError(
                f"checkpoint.memory_folder={self._spec.memory_folder} cannot hold this node's part of the state: "
                f"{error.strerror}; use a memory file system with more room, or checkpoint.memory_every=0"
            ) from None
        assert self._slots[0] is not None
        self._index = node_index(self._slots[0].staging, memory.nodes, self._group)
        if self._rank == 0 and not quiet:
            self._announce(sizes)

    def _announce(self, sizes: list[int]) -> None:
        held = 2 * sum(sizes[rank] for rank in self._memory.neighbours)
        elsewhere = "each part with a copy on another node"
        if self._peer is None:
            elsewhere = "no copies elsewhere, because all ranks share it"
        else:
            held *= 2
        size, folder = f"{held / 1e6:,.1f} MB", self._spec.memory_folder
        say(f"state in memory every {self._spec.memory_every} steps: {size} of {folder} on this node, {elsewhere}")

    def _open_slot(self, number: int) -> None:
        state, device = kept_state(self._engine, self._optimizer), self._engine.device
        self._slots[number] = Slot(self._memory.folder, number, self._rank, state, self._copies, device)

    def _is_ready(self) -> bool:
        no_room = self._knows_it_is_kept and None in self._slots
        return not self._in_flight and self._settle() and not no_room

    @property
    def _hindrance(self) -> str:
        return f"that after step {self._step} is still in flight, or a node has no room; use a larger memory_every"

    def _leave_out(self, step: int, seconds: float) -> None:
        if not self._warned:  # once: it will often be so
            self._warned = True
            super()._leave_out(step, seconds)

    def _place_for(self, kept_before: bool) -> Staging:
        (broken,) = self._count(not self._copied)
        if broken:
            self._pairs.break_off()
        self._current = 1 - self._current if kept_before else self._current
        if self._slots[self._current] is None:  # this rank did not hear how the first save ended
            self._open_slot(self._current)
        slot = self._slots[self._current]
        assert slot is not None
        slot.withdraw()  # no more than a look, unless some rank did not hear how the last save ended
        return slot.staging

    def _keep(self, staging: Staging, manifest: Manifest) -> str:
        slot = self._slots[self._current]
        assert slot is not None
        self._copied = False
        works = self._start_copying(slot)
        own = StoredFile(slot.own.nbytes, checksum_of_bytes(staging.content, self._kind))
        for work in works:
            work.wait()
        self._copied = True
        received = {owner: checksum_of_bytes(as_bytes(copy), self._kind) for owner, copy in slot.copies.items()}
        whole = self._collect(own, received, manifest)
        # Only when every node has published it may what was there before go.
        if problem := self._agree(self._publish(slot, whole)):
            raise GivenUp(problem)
        self._withdraw_all_but(manifest.step)
        return self._open_second_slot() if None in self._slots else ""

    def _open_second_slot(self) -> str:
        """After the first save, when what an earlier attempt had left is gone from all nodes."""
        self._group.agree("")
        try:
            self._open_slot(1)
        except OSError as error:
            return f"no more copies in memory: {self._spec.memory_folder} holds one and not two ({error.strerror})"
        return ""

    def _collect(self, own: StoredFile, received: dict[int, str], manifest: Manifest) -> Manifest | None:
        """The manifest of this node, for who leads it, if all copies are as they were sent."""
        return node_manifest(own, received, manifest, self._index, self._memory.nodes, self._group)

    def _agree(self, problem: str) -> str:
        return self._group.agree(problem)

    def _start_copying(self, slot: Slot) -> list[Any]:
        self._pairs.connect([*slot.copies, *([] if self._peer is None else [self._peer])])
        works: list[Any] = []
        for owner, copy in slot.copies.items():
            works += [self._pairs.receive(part, owner) for part in chunks(copy)]
        if self._peer is not None:
            works += [self._pairs.send(part, self._peer) for part in chunks(slot.own)]
        return works

    def _publish(self, slot: Slot, manifest: Manifest | None) -> str:
        if manifest is None:  # another rank of this node does it
            return ""
        try:
            slot.publish(manifest.step, self._index, manifest.render(self._kind))
        except OSError as error:
            return f"node {self._memory.node}: {error}"
        return ""

    def _withdraw_all_but(self, step: int | None) -> None:
        if self._memory.leads:
            for slot in self._slots:
                if slot is not None and slot.step != step:
                    slot.withdraw()
            for path in checkpoints(self._memory.folder):  # what an earlier attempt left
                if step_of(path) != step:
                    path.remove()

    def take_back(self) -> None:
        """The run went back to a checkpoint: what is here belongs to a past that was given up. Every rank calls this,
        after `finish`."""
        self._withdraw_all_but(None)  # the next save fills none of it before all ranks have come to it

    def forget(self, ended_well: bool = True) -> None:
        """The run has come to its end: give the memory back, unless a rank knows why not. Every rank calls this, after
        `finish`."""
        (kept_from_going,) = self._count(not ended_well)
        if not kept_from_going and self._memory.leads:
            self._memory.folder.parent.remove()
