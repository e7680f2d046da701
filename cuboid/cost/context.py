"""What context-parallel ranks wait for in a layer, by the way they bring queries and keys together.

An inner group trades heads for tokens (all of cp with ulysses, none with a ring), an outer group then brings in keys
and values: in a ring, behind the computing with those at hand, or all at once."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import Group, Links, all_gather, all_to_all, group, one_port
from cuboid.cost.constants import Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.reuse import recent
from cuboid.spec.layout import CONTEXT_METHODS

GATHER = CONTEXT_METHODS.index("allgather")


@dataclass(frozen=True)
class Widths:
    """Elements a token has on one rank."""

    query: Array
    keys: Array
    """Keys and values together."""
    output: Array

    @classmethod
    def of(cls, shape: Shape, jobs: Jobs) -> "Widths":
        """Key-value heads are repeated where fewer than the ranks that trade heads."""
        latent = shape.latent > 0
        heads = shape.heads / jobs.tp
        shared = np.where(latent, heads, np.maximum(shape.kv_heads / jobs.tp, 1))
        shared = np.lcm(np.rint(shared).astype(np.int64), jobs.cp_inner.astype(np.int64))
        query = np.where(latent, shape.nope_dim + shape.rope_dim, shape.head_dim)
        value = np.where(latent, shape.v_dim, shape.head_dim)
        return cls(heads * query, shared * (query + value), heads * value)


def outer_group(fabric: Fabric, jobs: Jobs) -> Group:
    """The ranks that pass keys and values on."""
    return group(fabric, jobs.cp / jobs.cp_inner, jobs.tp * jobs.cp_inner)


@dataclass(frozen=True)
class ContextWaits:
    """Seconds in one layer, forward and backward without what recomputation repeats."""

    seconds: tuple[Array, Array]
    links: tuple[Links, Links]
    """What is held for how long, hidden or not."""


def waiting(engine: Engine, fabric: Fabric, shape: Shape, jobs: Jobs, attention: tuple[Array, Array]) -> ContextWaits:
    """What ranks wait for. `attention`: the seconds that its core computes forward and backward."""
    widths, token = Widths.of(shape, jobs), engine.activation_wire * jobs.tokens
    inner, outer = group(fabric, jobs.cp_inner, jobs.tp), outer_group(fabric, jobs)
    given = token * (widths.query + widths.keys + widths.output)
    heads = all_to_all(fabric, given, inner, given * (1 - 1 / inner.nodes))
    rings = (outer.size > 1) & (jobs.cp_method != GATHER)
    whole = token * widths.keys * outer.size
    # In a ring the rank at the end of a node sends its message alone, whoever else has a port there.
    passed = np.where(rings, all_gather(fabric, whole, one_port(outer)), all_gather(fabric, whole, outer))
    # A ring hides a message behind the computing of one of its steps, if that takes as long.
    share = (outer.size - 1) / outer.size
    hidden = [
        np.minimum(engine.context_overlap * times * passed, share * seconds)
        for times, seconds in zip((1, 2), attention, strict=True)
    ]
    forward, backward = (times * passed - rings * saved for times, saved in zip((1, 2), hidden, strict=True))
    exchanged, brought = Links.of(inner, heads), Links.of(outer, passed)
    return ContextWaits((heads + forward, heads + backward), (exchanged + brought, exchanged + brought.times(2)))


def further_blocks(jobs: Jobs) -> Array:
    """Blocks of attention beside the first: one more for every rank of a ring, three with gathered keys."""
    outer = jobs.cp / jobs.cp_inner
    return np.where(jobs.cp_method == GATHER, 3.0, outer - 1) * (outer > 1)


@recent
def gathered_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """All keys and values of a layer, and their gradients, while it is computed."""
    gathered = 2 * engine.activation_wire * jobs.tokens * jobs.cp * Widths.of(shape, jobs).keys
    return np.where((jobs.cp_method == GATHER) & (jobs.cp > 1), gathered, 0.0)
