"""How parameters are split, which part of each a rank holds, and who else holds the same part.

Pure arithmetic on what modules declare: initial weights, gradients, checkpoints, the proof and the planner's count of
bytes all follow from it. Nothing is guessed from a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cuboid.errors import UserError
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


@dataclass(frozen=True)
class ShardingRank:
    """Where a rank stands among those that a parameter may be split over."""

    tensor: int = 1
    tensor_index: int = 0
    expert: int = 1
    expert_index: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Split:
    """How a parameter lies on ranks: what a module declares in `sharding`."""

    kind: Literal["even", "heads", "vocabulary", "expert", "replicated", "partial"]
    dimension: int = 0
    heads: int = 0
    """Of `heads`: how many there are. They are split as far as they go, and replicated beyond."""

    def slice_of(self, name: str, shape: tuple[int, ...], rank: ShardingRank) -> Slice:
        """What a rank holds of the parameter `name`."""
        ranks, index = rank.tensor, rank.tensor_index
        if self.kind == "vocabulary":
            start, rows = vocabulary_rows(shape[0], ranks, index)
            return Slice(0, start, start + rows, -(-shape[0] // ranks), "own", False)
        if self.kind == "even":
            if shape[self.dimension] % ranks:
                raise UserError(
                    f"tp={ranks} does not divide dimension {self.dimension} of {name}, which is "
                    f"{shape[self.dimension]}; use another tp"
                )
            return _even(self.dimension, shape, ranks, index, "own", False)
        if self.kind == "heads":
            parts = math.gcd(self.heads, ranks)
            replicated = parts < ranks
            return _even(0, shape, parts, index * parts // ranks, "kv" if replicated else "own", replicated)
        if self.kind == "expert":
            return _even(0, shape, rank.expert, rank.expert_index, "own", False)
        # Whole on every rank. The gradient is a part where a rank sees a part of the tokens (sequence parallelism), and
        # of what is partial always.
        rows = shape[0] if shape else 1
        partial = ranks > 1 and (rank.sequence_parallel or self.kind == "partial")
        return Slice(0, 0, rows, rows, "tensor", partial)


def split(dimension: int) -> Split:
    """Every tensor rank holds an equal part of one dimension: heads, channels, states."""
    return Split("even", dimension)


COLUMN, ROW = split(0), split(1)
"""Of the weight of a linear (out, in): its outputs, its inputs."""
VOCABULARY = Split("vocabulary")
"""Rows are split, the last rank's filled up if they do not divide."""
EXPERT = Split("expert")
"""Routed experts are spread whole over the ranks of an expert-parallel group, and not split by tensor ranks."""
REPLICATED = Split("replicated")
"""Every tensor rank holds all of it and computes the same gradient: it acts outside of what is split."""
PARTIAL = Split("partial")
"""Every tensor rank holds all of it, but sees its own part of the heads, channels or tokens only: gradients are
summed."""


def heads(count: int) -> Split:
    """Key-value heads, of which there may be fewer than tensor ranks."""
    return Split("heads", 0, count)


class Declared(NamedTuple):
    """A parameter of a model: its full shape, and how it is split."""

    shape: tuple[int, ...]
    split: Split


def _even(dimension: int, shape: tuple[int, ...], parts: int, index: int, sharing: Sharing, partial: bool) -> Slice:
    length = shape[dimension] // parts
    return Slice(dimension, index * length, (index + 1) * length, length, sharing, partial)


def lay_out(declared: Mapping[str, Declared], rank: ShardingRank) -> list[Part]:
    """The parameters of a unit one after another in its flat buffer, as a rank holds them."""
    parts: list[Part] = []
    offset = 0
    for name, (shape, split) in declared.items():
        parts.append(Part(name, shape, split.slice_of(name, shape, rank), offset))
        offset += parts[-1].size
    return parts
