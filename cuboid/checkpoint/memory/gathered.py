"""A state in memory as rank 0 knows it from what the nodes say, and who brings whom what. Other ranks are told what
they do and no more: a plan for all, told to all, would grow with the square of the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cuboid.checkpoint.checksum import kind_of
from cuboid.checkpoint.index import check_entries
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import INDEX, Manifest, StoredFile
from cuboid.checkpoint.memory.copies import Generation, Holdings, Transfer, holders, missing, ranks_by_node, transfers
from cuboid.checkpoint.memory.shares import Share, join_entries, with_index
from cuboid.checkpoint.parts import Index
from cuboid.errors import UserError

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
        self, generation: Generation, holdings: Holdings, told: Sequence[Share | None], place: Location
    ) -> Manifest:
        """The manifest, without its files. A `UserError` if anything is on no node."""
        self._held = holders(holdings, generation)
        lacking = missing(holdings, generation)
        manifest: Manifest | None = None
        for share in told:
            if share is not None:
                manifest = share.manifest
                self._files |= manifest.files
                self._entries |= share.entries
        if lacking or manifest is None:
            raise UserError(f"{part(lacking[0]) if lacking else 'all of it'} is on no node that is left")
        if silent := sorted(self._held.keys() - self._entries.keys()):
            raise UserError(f"the index of {part(silent[0])} is damaged on every node that has it")
        self.index = check_entries(place, join_entries(self._entries.values()), self._files)
        return replace(manifest, files={})

    def checks(self, wanted: Sequence[frozenset[str]]) -> list[list[Check]]:
        """For each rank what it compares with its checksum, a share of what its node has and needs. `wanted`: by
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

    def shares(self, manifest: Manifest) -> dict[str, Share]:
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
            result[node] = Share(with_index(manifest, kept, index, kind_of(self._files[INDEX].checksum)), index)
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
