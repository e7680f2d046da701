"""Which part of each full parameter a tensor rank holds, and who else holds the same part.

Pure arithmetic on names and shapes: initial weights, gradients, checkpoints, the proof and the planner's count of bytes
all read this one table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cuboid.spec.model import ModelSpec

Sharing = Literal["own", "tensor", "kv"]


@dataclass(frozen=True)
class Slice:
    """Rows (or columns) `start:stop` of the full tensor, followed by padding up to `length`."""

    dimension: int
    start: int
    stop: int
    length: int
    sharing: Sharing
    """Who holds the same elements: nobody else, all tensor ranks, or the ranks with the same key-value heads."""
    partial_gradient: bool
    """Whether the holders' gradients are parts that must be summed (else they are equal already)."""

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dimension], self.length, *shape[self.dimension + 1 :])


@dataclass(frozen=True)
class Part:
    """One parameter of a unit: parameters that lie in one flat buffer, and are gathered and reduced together."""

    name: str
    full_shape: tuple[int, ...]
    slice: Slice
    offset: int
    """Where it begins in the unit's flat buffer."""
    rate_factor: float = 1.0
    """What multiplies its learning rate."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slice.local_shape(self.full_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def kv_part_count(model: ModelSpec, tensor_size: int) -> int:
    """Key-value heads are split as far as the tensor ranks allow and replicated beyond: always whole heads, never
    mixed, because the query heads of each run of tensor_size / parts ranks read exactly that part."""
    return math.gcd(model.kv_heads, tensor_size)


def kv_head_of_query(model: ModelSpec, tensor_size: int, index: int) -> list[int] | None:
    """For each query head of a tensor rank, which of the key-value heads it holds serves it (None: equal consecutive
    groups)."""
    parts = kv_part_count(model, tensor_size)
    held = model.kv_heads // parts
    first = (index * parts // tensor_size) * held
    local_heads = model.heads // tensor_size
    heads = range(index * local_heads, (index + 1) * local_heads)
    served = [head * model.kv_heads // model.heads - first for head in heads]
    regular = local_heads % held == 0 and served == [head * held // local_heads for head in range(local_heads)]
    return None if regular else served


def vocabulary_rows(vocabulary: int, tensor_size: int, index: int) -> tuple[int, int]:
    """(first row, number of real rows) of this rank; every rank holds ceil(vocabulary / size) rows, padding
    included."""
    length = -(-vocabulary // tensor_size)
    start = min(index * length, vocabulary)
    return start, min(start + length, vocabulary) - start


def slice_of(
    name: str, shape: tuple[int, ...], model: ModelSpec, tensor_size: int, index: int, sequence_parallel: bool
) -> Slice:
    if name in ("embedding.tokens.weight", "head.output.weight"):
        start, rows = vocabulary_rows(shape[0], tensor_size, index)
        return Slice(0, start, start + rows, -(-shape[0] // tensor_size), "own", False)
    module, kind = name.rsplit(".", 2)[-2:]
    if module in ("query", "query_up", "key_value_up", "gate", "up"):
        return _even(0, shape, tensor_size, index, "own", False)
    if module in ("key", "value"):
        parts = kv_part_count(model, tensor_size)
        replicated = parts < tensor_size
        return _even(0, shape, parts, index * parts // tensor_size, "kv" if replicated else "own", replicated)
    if module in ("output", "down") and kind == "weight":
        return _even(1, shape, tensor_size, index, "own", False)
    # Norms, biases added after the sum, learned positions: whole on every rank. Their gradient is a part where a rank
    # sees a part of the tokens (sequence parallelism, and a router always) or of the heads (norms of queries and keys).
    partial = tensor_size > 1 and (sequence_parallel or module in ("query_norm", "key_norm", "router"))
    return Slice(0, 0, shape[0], shape[0], "tensor", partial)


def expert_slice(shape: tuple[int, ...], ranks: int, index: int) -> Slice:
    """Routed experts are spread whole over the ranks of an expert-parallel group, and not split by tensor ranks."""
    return _even(0, shape, ranks, index, "own", False)


def even_slice(dimension: int, shape: tuple[int, ...], parts: int, index: int) -> Slice:
    """An equal part of one dimension, which nobody else holds."""
    return _even(dimension, shape, parts, index, "own", False)


def _even(dimension: int, shape: tuple[int, ...], parts: int, index: int, sharing: Sharing, partial: bool) -> Slice:
    length = shape[dimension] // parts
    return Slice(dimension, index * length, (index + 1) * length, length, sharing, partial)


def lay_out(shapes: dict[str, tuple[int, ...]], slice_of_name: Callable[[str, tuple[int, ...]], Slice]) -> list[Part]:
    parts: list[Part] = []
    offset = 0
    for name, shape in shapes.items():
        parts.append(Part(name, shape, slice_of_name(name, shape), offset))
        offset += parts[-1].size
    return parts
