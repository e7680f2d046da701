"""Which rank sits where in the cuboid, and who talks to whom: process groups as plain data.

Order: pp outermost, then dp, cp, and tp innermost, so that tensor-parallel neighbours sit on the fastest links.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cuboid.errors import UserError, up_to
from cuboid.spec.layout import Layout

Group = tuple[int, ...]


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in the cuboid."""

    pp: int
    dp: int
    cp: int
    tp: int


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """Where a rank sits."""
    if not 0 <= rank < layout.world_size:
        raise UserError(f"rank={rank} is outside {layout}; use {up_to(layout.world_size - 1, 'rank=')}")
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    pp, dp = divmod(rank, layout.dp)
    return Coordinates(pp, dp, cp, tp)


def rank_of(place: Coordinates, layout: Layout) -> int:
    """The rank at a place; the inverse of `coordinates`."""
    for name in ("pp", "dp", "cp", "tp"):
        size, index = getattr(layout, name), getattr(place, name)
        if not 0 <= index < size:
            raise UserError(f"coordinate {name}={index} is outside {layout}; use {up_to(size - 1, f'{name}=')}")
    return ((place.pp * layout.dp + place.dp) * layout.cp + place.cp) * layout.tp + place.tp


def shard_weights(rank: int, layout: Layout, routed: bool = False) -> tuple[tuple[int, ...], int]:
    """The weights of the ranks that ZeRO splits over together with this one, and its place among them. `routed`: what
    routed experts keep."""
    stride, count = (layout.ep, layout.expert_shard_size) if routed else (layout.tp, layout.shard_size * layout.cp)
    here = rank % (layout.dp * layout.cp * layout.tp)
    place = here // stride % count
    first, replica = here - place * stride, layout.cp * layout.tp
    return tuple(layout.shard_weight_of((first + stride * each) // replica) for each in range(count)), place


def groups(layout: Layout) -> dict[str, tuple[Group, ...]]:
    """Kind -> the groups of ranks that communicate; each kind but `embedding` puts every rank in exactly one group.

    tp, cp, dp, pp: ranks that differ in that coordinate only. cp_inner: the part of a cp group that trades heads
    for tokens (all-to-all); cp_outer: ranks of it that pass keys and values on. data: dp × cp, ranks that hold the same
    dense parameters and see other tokens. shard: the part of a data group over which ZeRO splits; replicate: ranks of
    it that hold the same shard. sequence: ranks that hold shards of the same sequences. ep: ranks that share one set of
    experts; expert_data, expert_shard, expert_replicate: as data, shard and replicate for ranks with the same experts.
    model: one data replica. stage: ranks that hold the same pipeline stages. embedding: holders of a tied embedding on
    the first and the last stage, where these are different ranks.
    """
    stride = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.tp * layout.cp * layout.dp}
    found = {
        kind: tuple(_along(stride[kind], getattr(layout, kind), layout.world_size)) for kind in ("tp", "cp", "dp", "pp")
    }
    found["cp_inner"] = tuple(_along(stride["cp"], layout.cp_inner, layout.world_size))
    found["cp_outer"] = tuple(_along(stride["cp"] * layout.cp_inner, layout.cp // layout.cp_inner, layout.world_size))
    copies, shard = layout.dp * layout.cp, layout.shard_size * layout.cp if layout.zero else 1
    found["data"] = tuple(_along(stride["cp"], copies, layout.world_size))
    found["shard"] = tuple(_along(stride["cp"], shard, layout.world_size))
    found["replicate"] = tuple(_along(stride["cp"] * shard, copies // shard, layout.world_size))
    found["stage"] = tuple(_along(1, copies * layout.tp, layout.world_size))
    found["sequence"] = tuple(_along(1, layout.cp * layout.tp, layout.world_size))
    found["ep"] = tuple(_along(1, layout.ep, layout.world_size))
    copies, shard = copies * layout.tp // layout.ep, layout.expert_shard_size
    found["expert_data"] = tuple(_along(layout.ep, copies, layout.world_size))
    found["expert_shard"] = tuple(_along(layout.ep, shard, layout.world_size))
    found["expert_replicate"] = tuple(_along(layout.ep * shard, copies // shard, layout.world_size))
    last = layout.last_stage_rank
    found["embedding"] = tuple((line[0], line[last]) for line in found["pp"]) if last else ()
    found["model"] = tuple(
        tuple(
            stage * stride["pp"] + replica * stride["dp"] + inner
            for stage in range(layout.pp)
            for inner in range(stride["dp"])
        )
        for replica in range(layout.dp)
    )
    return found


def _along(stride: int, size: int, world_size: int) -> Iterator[Group]:
    """Groups of `size` ranks `stride` apart, ordered by their first rank."""
    for start in range(0, world_size, stride * size):
        for offset in range(stride):
            yield tuple(range(start + offset, start + offset + stride * size, stride))
