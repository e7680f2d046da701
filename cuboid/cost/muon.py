"""What Muon costs beside AdamW: arithmetic by the owners of matrices, their way there and back, and the memory of both.

Which matrix has which owner is exact in `spec.matrix_owners`; a search over many layouts takes the mean owner here, and
no less than the largest matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import all_to_all, group
from cuboid.cost.compute import attention_parameters, feed_forward_parameters
from cuboid.cost.constants import Chip, Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape, pick
from cuboid.cost.sharding import RankParameters, dense_layers_of, owned_parameters
from cuboid.spec.matrix_owners import BUCKET

COPIES = 10.0
"""So many times the elements of an owner's matrices are there at once: sent, received, whole, in a batch, and what the
iterations work with."""


SLOWER = 1.25
"""Newton-Schulz iterations take so much longer than large matmuls: of the shapes 1B and 8B-16L on one H200 an update
took 108 and 588 ms, of which 65 and 476 ms are arithmetic at 700 TFLOP/s."""


@dataclass(frozen=True)
class Work:
    """FLOPs that orthogonalise the matrices of a layer, on all ranks together."""

    dense: Array
    """Of a layer without experts."""
    mixture: Array
    """Of a layer with experts, these included."""
    largest: Array
    """Of the one that takes longest, which has one owner."""
    elements: Array
    """Of that one."""


def _flops(rows: Array, columns: Array, steps: int) -> Array:
    low, high = np.minimum(rows, columns), np.maximum(rows, columns)
    return np.asarray(steps * low**2 * (4 * high + 2 * low))


def _attention(shape: Shape) -> Iterator[tuple[Array, Array, Array]]:
    """How many matrices of how many rows and columns."""
    plain, latent = (np.asarray(each, dtype=np.float64) for each in (~shape.is_latent, shape.is_latent))
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield 2 * plain, width, shape.hidden  # queries and output
    yield 2 * plain, kv, shape.hidden
    query = shape.heads * (shape.nope_dim + shape.rope_dim)
    short = latent * (shape.q_rank > 0)
    yield short, shape.q_rank, shape.hidden
    yield short, query, shape.q_rank
    yield latent - short, query, shape.hidden
    yield latent, shape.kv_rank, shape.hidden
    yield latent, shape.rope_dim, shape.hidden
    for part in (shape.nope_dim, shape.v_dim):
        yield latent, shape.heads * part, shape.kv_rank
    yield latent, shape.heads * shape.v_dim, shape.hidden


def work(shape: Shape, steps: int) -> Work:
    def summed(matrices: list[tuple[Array, Array, Array]]) -> Array:
        return np.asarray(sum(count * _flops(rows, columns, steps) for count, rows, columns in matrices))

    each = 2 + shape.gated
    attention = list(_attention(shape))
    dense = (each, shape.ffn, shape.hidden)
    experts = [(each * shape.experts, shape.expert_ffn, shape.hidden), (each, shape.shared_ffn, shape.hidden)]
    every = [*attention, dense, *(experts if shape.any_routes else [])]
    present = [(np.where(count > 0, 1.0, 0.0), rows, columns) for count, rows, columns in every]
    return Work(
        dense=summed([*attention, dense]),
        mixture=pick(shape.routes, summed([*attention, *experts]), summed([*attention, dense])),
        largest=np.maximum.reduce([some * _flops(rows, columns, steps) for some, rows, columns in present]),
        elements=np.maximum.reduce([some * rows * columns for some, rows, columns in present]),
    )


def matrices(shape: Shape, jobs: Jobs, layers: Array, first: Array) -> RankParameters:
    """Elements of matrices that a rank holds, of so many layers, as `rank_parameters` counts all of its parameters."""
    dense = dense_layers_of(shape, jobs, layers, first)
    attention = layers * attention_parameters(shape, jobs.tp)
    plain = attention + dense * feed_forward_parameters(shape, shape.ffn / jobs.tp)
    plain = plain + (layers - dense) * feed_forward_parameters(shape, shape.shared_ffn / jobs.tp)
    routed = shape.experts * feed_forward_parameters(shape, shape.expert_ffn) / np.maximum(jobs.ep, 1)
    return RankParameters(plain, (layers - dense) * routed)


def _alone(jobs: Jobs) -> dict[str, Array]:
    """The same stages on one rank each."""
    kept = ("pp", "schedule", "vpp", "global_batch", "sequence")
    return {name: getattr(jobs, name) for name in kept}


def matrix_time(
    shape: Shape, jobs: Jobs, chip: Chip, fabric: Fabric, engine: Engine, layers: Array, first: Array
) -> Array:
    """Seconds of a step in which matrices travel and are orthogonalised."""
    if not engine.matrix_steps:
        return np.zeros(())
    each = work(shape, engine.matrix_steps)
    dense = dense_layers_of(shape, jobs, layers, first)
    ranks = jobs.copies * jobs.tp
    flops = np.maximum((dense * each.dense + (layers - dense) * each.mixture) / ranks, each.largest)
    wide = "float32" if engine.activation_wire == 4.0 else "bf16"
    rate = chip.peak[wide] * chip.linear_efficiency.get(wide, chip.linear_efficiency["bf16"]) / engine.linear_scale
    members = group(fabric, ranks, np.ones(()))
    whole = matrices(shape, Jobs.make(**_alone(jobs)), layers, first).total
    back = owned_parameters(jobs, matrices(shape, jobs, layers, first))
    apart = 1 - members.local / members.size
    moved = sum(
        all_to_all(fabric, engine.activation_wire * sent, members, engine.activation_wire * sent * apart)
        for sent in (whole / ranks, back)
    )
    passes = COPIES * engine.activation_wire * np.maximum(whole / ranks, each.elements)
    copied = passes / (chip.memory_bandwidth * chip.memory_efficiency)
    return np.asarray(SLOWER * flops / rate + moved + copied)


def matrix_bytes(shape: Shape, jobs: Jobs, engine: Engine, layers: Array, first: Array) -> Array:
    """Bytes on an owner while it orthogonalises a bucket: at least a layer of all ranks."""
    if not engine.matrix_steps:
        return np.zeros(())
    whole = matrices(shape, Jobs.make(**_alone(jobs)), layers, first).total
    bucket = BUCKET + whole / np.maximum(layers, 1) / (jobs.copies * jobs.tp)
    here = np.maximum(np.minimum(whole / (jobs.copies * jobs.tp), bucket), work(shape, 1).elements)
    return np.asarray(COPIES * engine.activation_wire * here)
