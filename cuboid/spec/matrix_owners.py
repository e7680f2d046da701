"""The owner of each matrix that Muon updates: the one rank that orthogonalises it.

The ranks of a pipeline stage (dp × cp × tp) keep elements of its matrices, as tensor and expert parallelism and ZeRO
split them. Orthogonalising needs a whole matrix, so its elements are sent to the owner, and the result back to every
rank that keeps them. Owners are balanced by FLOPs. This is pure data: the engine runs it, the planner counts it, and
both agree to the byte."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cuboid.errors import UserError
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.partition import held_layers
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import shard_weights
from cuboid.spec.run import Run
from cuboid.spec.sharding import (
    BALANCES,
    Declared,
    DeclaredUnit,
    Part,
    ShardingRank,
    is_block_linear,
    lay_out,
    shard_sizes,
    units,
)

Rows = tuple[tuple[int, int], ...]
"""Runs of rows (first, behind the last) of a parameter whose leading dimensions are flattened: one matrix of it."""

BUCKET = 2**24
"""Elements of a rank that travel together, at least: while one bucket is on its way another is orthogonalised."""


@dataclass(frozen=True)
class Span:
    """Elements of a matrix, one after another, that some ranks keep."""

    start: int
    """The first of them in the flattened tensor that such a rank holds of the parameter."""
    place: int
    """… and in the matrix as its owner receives it."""
    size: int
    ranks: tuple[int, ...]
    """Who keeps them, counted within the stage."""
    sender: int
    """Which of these sends them to the owner: the owner itself if it has them, else the nearest to it."""


@dataclass(frozen=True)
class Matrix:
    """One matrix that is orthogonalised by itself."""

    parameter: str
    rows: int
    columns: int
    stripes: int
    """Its owner receives it as so many stripes of columns one after another: as many as tensor ranks split columns."""
    owner: int
    spans: tuple[Span, ...]
    runs: Rows
    """Its rows in the parameter."""


Bucket = tuple[Matrix, ...]


def is_muon(unit: str, declared: Declared) -> bool:
    """Whether Muon updates a parameter: the weight of a linear in a block, or a stack of those of experts. The rest,
    embeddings, head, norms, biases and routers, is AdamW's; so are matrices of a single row or column."""
    shape, kind = declared.shape, declared.split.kind
    stacked = unit.startswith("layers.") and kind == "expert" and len(shape) == 3
    return (stacked or (is_block_linear(unit, declared) and kind != "vocabulary")) and min(shape[-2:]) > 1


def matrices_of(run: Run, name: str, shape: tuple[int, ...]) -> list[Rows]:
    """The matrices in one parameter, whatever the layout. Queries, keys, values, gate and up are parameters of their
    own in models of the catalog; what others fuse is taken apart as `optimizer.fused` says."""
    total = prod(shape[:-1])
    if len(shape) == 3:
        return _runs([shape[1]] * shape[0])
    for suffix, rows in run.optimizer.fused.items():
        if name.endswith(suffix):
            if sum(rows) != total:
                raise UserError(f"optimizer.fused.{suffix}={rows} has {sum(rows)} rows, but {name} has {total}")
            return _runs(rows)
    if isinstance(run.model, PythonModelSpec):
        return [((0, total),)]
    return _in_attention(run.model, name, total, run.optimizer.per_head)


def _runs(rows: list[int]) -> list[Rows]:
    ends = [sum(rows[: place + 1]) for place in range(len(rows))]
    return [((end - count, end),) for end, count in zip(ends, rows, strict=True)]


def _in_attention(model: ModelSpec, name: str, total: int, per_head: bool) -> list[Rows]:
    inside, matrix, _ = name.rsplit(".", 2)
    if not inside.endswith(".attention"):
        return [((0, total),)]
    latent = model.latent
    if latent is None:
        heads = {"query": model.heads, "key": model.kv_heads, "value": model.kv_heads}.get(matrix, 0)
        return _runs([total // heads] * heads) if per_head and heads else [((0, total),)]
    if matrix == "key_value_down":  # the latent of keys and values, and the rotated key that all heads share
        return _runs([latent.kv_rank, latent.qk_rope_dim])
    if matrix == "key_value_up":  # head by head the keys, then the values
        width = latent.qk_nope_dim + latent.v_dim
        keys = [(head * width, head * width + latent.qk_nope_dim) for head in range(model.heads)]
        values = [(start + latent.qk_nope_dim, start + width) for start, _ in keys]
        return [(run,) for run in (*keys, *values)] if per_head else [tuple(keys), tuple(values)]
    if per_head and matrix in ("query", "query_up"):
        return _runs([total // model.heads] * model.heads)
    return [((0, total),)]


def arithmetic(rows: int, columns: int, steps: int) -> int:
    """FLOPs that orthogonalise a matrix: each iteration squares the smaller side, squares that, and multiplies."""
    low, high = sorted((rows, columns))
    return steps * low * low * (4 * high + 2 * low)


# Who keeps what of a unit.


@dataclass(frozen=True)
class Kept:
    """What some ranks keep of a parameter: elements start:stop of their flattened tensor."""

    part: Part
    start: int
    stop: int
    ranks: tuple[int, ...]


def kept_by(unit: DeclaredUnit, layout: Layout) -> dict[str, list[Kept]]:
    """By parameter; ranks that keep the same elements stand together."""
    size = stage_size(layout)
    sharded = layout.zero and not unit.name.endswith(BALANCES)
    variants = layout.ep if unit.routed else layout.tp
    found: dict[str, dict[tuple[int, int, int], Kept]] = {name: {} for name in unit.parameters}
    for variant in range(variants):
        place = ShardingRank(layout.tp, variant % layout.tp, layout.ep, variant % layout.ep, layout.sequence_parallel)
        parts = lay_out(unit.parameters, place)
        weights = shard_weights(variant, layout, unit.routed)[0] if sharded else (1,)
        ends = [0, *accumulate(shard_sizes(parts, weights))]
        for part in parts:
            first = bisect_right(ends, part.offset) - 1
            for shard in range(first, bisect_left(ends, part.offset + part.size)):
                start = max(ends[shard] - part.offset, 0)
                stop = min(ends[shard + 1] - part.offset, part.size)
                ranks = tuple(range(variant + variants * shard, size, variants * len(weights)))
                key = (part.slice.start, start, stop)
                others = found[part.name][key].ranks if key in found[part.name] else ()
                found[part.name][key] = Kept(part, start, stop, tuple(sorted((*others, *ranks))))
    return {name: list(kept.values()) for name, kept in found.items()}


def _spans(rows: Rows, kept: list[Kept]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Start, place, size and ranks of what each keeps of one matrix."""
    columns = kept[0].part.full_shape[-1]
    height = sum(stop - start for start, stop in rows)
    for each in kept:
        cut = each.part.slice
        striped = cut.dimension == len(each.part.full_shape) - 1 > 0 and cut.length < columns
        width = cut.length if striped else columns
        # Of a row split the elements before a rank's own; of a column split it holds a stripe of every row.
        before = 0 if striped else cut.start * prod(each.part.full_shape[1:])
        place = cut.start // width * height * width if striped else 0
        for first, last in rows:
            low = max(first * width, before + each.start)
            high = min(last * width, before + each.stop)
            if low < high:
                yield low - before, place + low - first * width, high - low, each.ranks
            place += (last - first) * width


# Owners.


def _placeless(run: Run, layer: int) -> list[Matrix]:
    """The matrices of a layer, which have no owner yet."""
    found = []
    for unit in units(run.model, [layer], first=False, last=False):
        kept = kept_by(unit, run.layout)
        for name, declared in unit.parameters.items():
            if not is_muon(unit.name, declared):
                continue
            cut = kept[name][0].part.slice
            stripes = declared.shape[-1] // cut.length if cut.dimension == len(declared.shape) - 1 else 1
            for rows in matrices_of(run, name, declared.shape):
                height = sum(stop - start for start, stop in rows)
                spans = tuple(Span(*each, sender=-1) for each in _spans(rows, kept[name]))
                found.append(Matrix(name, height, declared.shape[-1], stripes, -1, spans, rows))
    return found


def _holders(matrix: Matrix) -> NDArray[np.int64]:
    """Who keeps some of it, those that keep most first."""
    kept: dict[int, int] = {}
    for span in matrix.spans:
        for rank in span.ranks:
            kept[rank] = kept.get(rank, 0) + span.size
    return np.array(sorted(kept, key=lambda rank: (-kept[rank], rank)))


def with_owner(matrix: Matrix, name: str, owner: int) -> Matrix:
    spans = [Span(each.start, each.place, each.size, each.ranks, _nearest(each.ranks, owner)) for each in matrix.spans]
    return replace(matrix, parameter=name, owner=owner, spans=tuple(spans))


def _nearest(ranks: tuple[int, ...], owner: int) -> int:
    """Of ranks in their order; of two that are as near the lower."""
    if len(ranks) == 1:
        return ranks[0]
    above = bisect_left(ranks, owner)
    return min(ranks[max(above - 1, 0) : above + 1], key=lambda rank: abs(rank - owner))


@lru_cache(maxsize=16)
def stage_buckets(run: Run, pipeline_rank: int) -> tuple[Bucket, ...]:
    """The matrices of all layers that a pipeline rank holds, with their owners, in the order they travel."""
    layout, model, steps = run.layout, run.model, run.optimizer.newton_schulz_steps
    size = stage_size(layout)
    layers = held_layers(model, layout, run.training.sequence)
    own = isinstance(model, PythonModelSpec)  # whose layers may all differ
    known: dict[object, list[tuple[Matrix, NDArray[np.int64]]]] = {}
    lots: list[list[tuple[str, Matrix, NDArray[np.int64]]]] = [[]]
    for layer in (layer for stage in layout.stages_of(pipeline_rank) for layer in layers[stage]):
        # The first prediction layer's unit holds the head's norm too, which moves what ranks keep of it.
        kind = layer if own else (model.has_experts(layer), max(-1, min(layer - model.layers, 1)))
        if kind not in known:
            known[kind] = [(matrix, _holders(matrix)) for matrix in _placeless(run, layer)]
        elements = sum(matrix.rows * matrix.columns for _, matrix, _ in lots[-1])
        if len(lots[-1]) >= size and elements >= size * BUCKET:  # with fewer matrices than ranks some would idle
            lots.append([])
        for matrix, holders in known[kind]:
            inside = matrix.parameter.split(".", 2)[2]
            lots[-1].append((f"layers.{layer}.{inside}", matrix, holders))
    loads = np.zeros(size)
    found = []
    for lot in lots:
        # The longest first, each to the least loaded of its holders: no owner has much more than another.
        work = [arithmetic(matrix.rows, matrix.columns, steps) for _, matrix, _ in lot]
        owners = [0] * len(lot)
        for place in sorted(range(len(lot)), key=lambda place: -work[place]):
            holders = lot[place][2]
            owners[place] = int(holders[np.argmin(loads[holders])])
            loads[owners[place]] += work[place]
        found.append(
            tuple(with_owner(matrix, name, owner) for (name, matrix, _), owner in zip(lot, owners, strict=True))
        )
    return tuple(bucket for bucket in found if bucket)


def stage_size(layout: Layout) -> int:
    """Ranks of a pipeline stage."""
    return layout.dp * layout.cp * layout.tp


def wire_precision(run: Run) -> Literal["bf16", "float32", "float64"]:
    """In which matrices travel and are orthogonalised."""
    asked, weights = run.optimizer.newton_schulz_precision, run.training.weights
    if asked != "auto":
        return asked
    return "bf16" if weights == "bf16" or weights == "fp16" else weights


def sent_elements(run: Run, rank: int) -> list[tuple[int, int]]:
    """Of each bucket, the elements that a rank hands to the all-to-all there, and to the one back."""
    size = stage_size(run.layout)
    here = rank % size
    return [
        (
            sum(span.size for matrix in bucket for span in matrix.spans if span.sender == here),
            sum(span.size * len(span.ranks) for matrix in bucket if matrix.owner == here for span in matrix.spans),
        )
        for bucket in stage_buckets(run, rank // size)
    ]
