"""The process groups of one rank, made from the pure data of `spec.ranks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise

import torch
import torch.distributed as dist

from cuboid.parallel.shm_collectives import SharedMemoryGroup, connect
from cuboid.schedule.schedules import FAMILIES
from cuboid.spec.layout import Layout
from cuboid.spec.ranks import Coordinates, coordinates
from cuboid.spec.ranks import groups as rank_groups
from cuboid.telemetry.communication_ledger import Kind, Ledger
from cuboid.telemetry.heartbeat import HEARTBEAT, NOWHERE, Track


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, this one among them. A group of one has no handle and never communicates."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    local: SharedMemoryGroup | None = None
    """The short way, where all ranks of the group share a machine and compute on its CPU."""
    dimension: str = ""
    ledger: Ledger | None = None
    """Where its collectives are counted, under its dimension; None: nowhere."""
    track: Track = NOWHERE
    """Where this rank notes that it waits for the others."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_fake(self) -> bool:
        """Whether this rank runs alone in place of a whole job: it then communicates with copies of itself,
        because what is computed on decides how much power a GPU draws, and so how fast it is."""
        return self.handle is not None and dist.get_backend(self.handle) == "fake"

    @property
    def is_gloo(self) -> bool:
        return self.handle is not None and dist.get_backend(self.handle) == "gloo"

    @property
    def is_nccl(self) -> bool:
        return self.handle is not None and dist.get_backend(self.handle) == "nccl"

    def count(self, kind: Kind, size: int) -> None:
        """Enter one collective of `size` bytes."""
        if self.ledger is not None:
            self.ledger.add(self.dimension, kind, self.size, size)


@dataclass(frozen=True)
class Holders:
    """Who holds the same parameters."""

    data: Group
    """Ranks that hold the same parameters and see other tokens."""
    shard: Group
    """The ranks of the data group that split ZeRO's state among them."""
    replicate: Group
    """The ranks of the data group that hold the same part of ZeRO's state."""

    @property
    def nobody_adds(self) -> bool:
        """Whether a rank's own gradients are all there is."""
        return self.data.size == 1


@dataclass(frozen=True, kw_only=True)
class Groups(Holders):
    """The holders of dense parameters, dp × cp, and every other group."""

    coordinates: Coordinates
    world: Group
    tensor: Group
    sequence: Group
    """Ranks that hold parts of the same sequences: cp × tp."""
    expert: Group
    """Ranks over which the experts of a layer are spread."""
    routed: Holders
    """The holders of the same experts: dp × cp × tp / ep."""
    stage: Group
    """All ranks of these pipeline stages, dp × cp × tp, between which matrices travel to be orthogonalised; alone where
    none are."""
    context_inner: Group
    """The context-parallel ranks that trade heads for tokens."""
    context_outer: Group
    """The context-parallel ranks that pass keys and values round."""
    kv_replicas: Group
    """The tensor ranks that hold the same key-value heads."""
    embedding: Group | None
    """First and last stage, which share a tied embedding; None on the stages between, or when one rank holds both."""
    pipeline: Group
    """The ranks of this pipeline, which have no collective: their messages go over `links`."""
    links: dict[tuple[int, int], Group]
    """(sending, receiving) pipeline rank -> the group of these two, for messages in this direction alone: NCCL runs
    what is issued on one communicator in order, and so no direction waits for the other."""

    @property
    def nobody_adds(self) -> bool:
        return self.data.size == 1 and self.tensor.size == 1 and self.embedding is None

    def counted(self, ledger: Ledger) -> Groups:
        """The same groups, whose collectives are entered in a ledger."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, group in named.items():
            if isinstance(group, Group):
                named[name] = replace(group, dimension=DIMENSIONS.get(name, name), ledger=ledger)
        routed = {
            field.name: replace(getattr(self.routed, field.name), dimension=f"expert_{field.name}", ledger=ledger)
            for field in fields(Holders)
        }
        return Groups(**named | {"routed": Holders(**routed)})


DIMENSIONS = {
    "tensor": "tp",
    "expert": "ep",
    "kv_replicas": "kv",
    "pipeline": "pp",
    "context_inner": "cp",
    "context_outer": "cp",
}
"""Field of `Groups` -> the dimension its collectives belong to, where that has another name."""


Members = tuple[tuple[int, ...], ...]
"""The ranks of every group of one kind."""


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """With its own ranks alone. Torch names such a group by its ranks and by the number of groups that this process
    has, so all ranks must make as many, in one order; a rank for which there is none makes one of itself."""
    handle: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return handle


def _own(kind: str, rank: int, members: tuple[tuple[int, ...], ...], world: Track) -> Group | None:
    """Make this rank's group of one kind, and no other rank's. Every rank of the job calls this for the same kinds in
    the same order; groups of one kind have no rank in common, so no group waits for another of its kind."""
    ranks = next((ranks for ranks in members if rank in ranks), None)
    handle: dist.ProcessGroup | None = None
    if any(len(each) > 1 for each in members):
        with world.collective("new group"):
            handle = _new_group(ranks or (rank,))
    if ranks is None:
        return None
    if len(ranks) == 1:
        return Group(ranks, 0)
    return Group(ranks, ranks.index(rank), handle, track=HEARTBEAT.track(kind, ranks))


def _kv_replica_ranks(tensor_groups: tuple[tuple[int, ...], ...], parts: int) -> tuple[tuple[int, ...], ...]:
    result = []
    for ranks in tensor_groups:
        width = len(ranks) // parts
        result += [ranks[start : start + width] for start in range(0, len(ranks), width)]
    return tuple(result)


def make_groups(
    layout: Layout,
    rank: int,
    kv_parts: int,
    embedding_on_two_ranks: bool,
    experts: bool,
    on_cpu: bool,
    matrices_travel: bool = False,
) -> Groups:
    """`kv_parts`: into how many parts the key-value heads are split over the tensor ranks. `matrices_travel`: between
    the ranks of a stage (Muon, islands)."""
    kinds = rank_groups(layout)
    world = tuple(range(layout.world_size))
    everybody = HEARTBEAT.everybody("world", len(world))
    alone = Group((rank,), 0)

    def own(kind: str, members: Members, busy: bool = False) -> Group:
        group = _own(kind, rank, members, everybody) or alone
        if busy and on_cpu and group.handle is not None:
            with group.track.collective("new group"):
                group = replace(group, local=connect(group.handle, group.index, group.size))
        return group

    made: dict[Members, Group] = {}

    def shared(kind: str) -> Group:
        """Kinds that come to the same ranks share one group."""
        members = kinds[kind]
        if members not in made:
            made[members] = own(kind, members, busy=True)
        return made[members]

    # The order of these calls is the order in which torch numbers groups: it must be one on all ranks.
    data, tensor = shared("data"), shared("tp")
    # Hybrid sharding (HSDP): parameters are sharded inside a group of `shard` replicas and replicated between groups.
    hybrid = layout.shard not in (0, layout.dp)
    routed = Holders(alone, alone, alone)
    whole = Group(world, rank, dist.group.WORLD if len(world) > 1 else None, track=everybody)
    if experts:
        routed = Holders(
            shared("expert_data"),
            shared("expert_shard") if layout.zero else alone,
            shared("expert_replicate") if layout.zero else alone,
        )
    return Groups(
        coordinates=coordinates(rank, layout),
        world=whole,
        tensor=tensor,
        sequence=shared("sequence") if experts else alone,
        expert=own("ep", kinds["ep"]) if experts else alone,
        routed=routed,
        stage=_stage(layout, whole, made, own) if matrices_travel else alone,
        data=data,
        shard=own("shard", kinds["shard"], busy=True) if hybrid else data,
        replicate=own("replicate", kinds["replicate"]) if hybrid else alone,
        context_inner=own("cp_inner", kinds["cp_inner"], busy=True),
        context_outer=own("cp_outer", kinds["cp_outer"], busy=True),
        kv_replicas=tensor if kv_parts == 1 else own("kv", _kv_replica_ranks(kinds["tp"], kv_parts)),
        embedding=_own("embedding", rank, kinds["embedding"], everybody) if embedding_on_two_ranks else None,
        pipeline=next(Group(line, line.index(rank)) for line in kinds["pp"] if rank in line),
        links=_links(layout, rank, next(line for line in kinds["pp"] if rank in line)),
    )


def _stage(layout: Layout, world: Group, made: dict[Members, Group], own: Callable[[str, Members], Group]) -> Group:
    """One that is there already, where it comes to the same ranks."""
    members = rank_groups(layout)["stage"]
    return world if layout.pp == 1 else made.get(members) or own("stage", members)


def _links(layout: Layout, rank: int, line: tuple[int, ...]) -> dict[tuple[int, int], Group]:
    """Both directions between ranks with neighbouring stages, in rounds of pairs that have no rank in common: first
    those that begin at an even rank, then those at an odd one, then what leads from the last rank back to the first. So
    at most three of these wait for one another, however long the pipeline is."""
    placed = FAMILIES[layout.schedule].place(layout.pp, layout.vpp)
    pairs = {pair for here, there in pairwise(placed) if here != there for pair in ((here, there), (there, here))}
    links: dict[tuple[int, int], Group] = {}

    def round_of(pair: tuple[int, int]) -> tuple[bool, int, bool]:
        return abs(pair[0] - pair[1]) > 1, min(pair) % 2, pair[0] > pair[1]

    for _, together in groupby(sorted(pairs, key=round_of), key=round_of):
        own = next((pair for pair in together if line.index(rank) in pair), None)
        if own is None:
            _new_group((rank,))
            continue
        ranks = (line[own[0]], line[own[1]])
        track = HEARTBEAT.track("link", ranks)
        with track.collective("new group"):
            handle = _new_group(ranks)
        links[own] = Group(ranks, ranks.index(rank), handle, dimension="pp", track=track)
    return links


def connect_groups(groups: Groups, device: torch.device) -> None:
    """Make NCCL's communicators now, in one order on all ranks. Left to itself each is made by the first call that
    needs it, which blocks the host until the other ranks make the same call: in a pipeline that is a deadlock."""
    named = [group for group in vars(groups).values() if isinstance(group, Group)]
    collective = [*named, *vars(groups.routed).values()]
    word = torch.zeros(1, device=device)
    known = set[int]()
    for group in collective:
        if group.is_nccl and id(group.handle) not in known:
            known.add(id(group.handle))
            with group.track.collective("new group"):
                dist.all_reduce(word, group=group.handle)
    # A send and a receive on each link, before any step: both ends take them in the order of `_links`.
    for link in groups.links.values():  # in the order they were made in
        if link.is_nccl:
            with link.track.collective("new group"):
                (dist.send, dist.recv)[link.index](word, link.ranks[1 - link.index], group=link.handle)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def context_group(groups: Groups, layout: Layout, rank: int) -> Group:
    """All context-parallel ranks of a replica, however attention divides them; every rank of the job calls this."""
    if layout.cp_inner == 1:
        return groups.context_outer
    if layout.cp_inner == layout.cp:
        return groups.context_inner
    return _own("cp", rank, rank_groups(layout)["cp"], groups.world.track) or groups.context_outer
