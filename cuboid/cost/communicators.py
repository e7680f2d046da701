"""Communicators of a rank, as `parallel/groups.py` makes them, and the memory they take on its accelerator."""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from cuboid.cost.constants import Engine
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.pipeline import turns_back
from cuboid.cost.reuse import recent


@dataclass(frozen=True)
class Communicators:
    """Of the rank that belongs to most."""

    collective: Array
    """Groups of two ranks and more with collectives."""
    peers: Array
    """Other ranks in these, added up."""
    links: Array
    """Pairs of pipeline neighbours, one for each direction, with messages alone."""


def communicators(shape: Shape, jobs: Jobs) -> Communicators:
    copies = jobs.dp * jobs.cp
    kv_parts = np.gcd(shape.kv_heads.astype(np.int64), jobs.tp.astype(np.int64))
    experts, zero = shape.experts > 0, jobs.zero > 0
    expert_copies = copies * jobs.tp / jobs.ep
    expert_shard = np.maximum(np.where(zero, jobs.shard * jobs.cp * jobs.tp / jobs.ep, 1.0), 1.0)
    hybrid = (jobs.shard != jobs.dp) & (jobs.shard > 0)
    shard = np.where(zero, jobs.shard * jobs.cp, 1.0)
    none = np.ones(())
    # Of kinds that come to the same ranks, a stride and a size, one communicator is made.
    shared = [
        (jobs.tp, copies),
        (none, jobs.tp),
        (jobs.ep, np.where(experts, expert_copies, 1.0)),
        (jobs.ep, np.where(experts & zero, expert_shard, 1.0)),
        (jobs.ep * expert_shard, np.where(experts & zero, expert_copies / expert_shard, 1.0)),
        (none, np.where(experts, jobs.cp * jobs.tp, 1.0)),
    ]
    sizes = [
        np.where(
            reduce(np.logical_or, ((stride == other) & (size == same) for other, same in shared[:number])), 1.0, size
        )
        if number
        else size
        for number, (stride, size) in enumerate(shared)
    ]
    sizes += [
        jobs.world_size,
        np.where(experts, jobs.ep, 1.0),
        np.where(hybrid, shard, 1.0),
        np.where(hybrid, copies / shard, 1.0),
        jobs.cp_inner,
        jobs.cp / jobs.cp_inner,
        np.where(kv_parts > 1, jobs.tp / kv_parts, 1.0),
        np.where((shape.tied > 0) & (jobs.pp > 1) & (turns_back(jobs) == 0), 2.0, 1.0),
    ]
    return Communicators(
        collective=np.asarray(sum(np.where(size > 1, 1.0, 0.0) for size in sizes)),
        peers=np.asarray(sum(size - 1 for size in sizes)),
        links=2 * np.minimum(jobs.pp - 1, 2.0),
    )


@recent
def communicator_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes on the accelerator, beside what `engine.fixed` holds."""
    found = communicators(shape, jobs)
    library = engine.communicator_first * (found.collective > 0)
    collective = engine.communicator * found.collective + engine.communicator_peer * found.peers
    return np.asarray(library + collective + engine.communicator_link * found.links)
