"""The parameters of a model by name and shape, which part of each a rank holds, and who else holds the same part.

Parameters stand in the order the modules of `cuboid.model` hold them, in units that are gathered and reduced together:
a block, the embedding, the head. The table of tokens is a unit of its own, so that first and last stage lay out a tied
one alike; routed experts are, because other ranks hold the same ones; what balances a router is, because it keeps its
precision and has no gradient.

Pure arithmetic on names and shapes: initial weights, gradients, checkpoints, the proof and the planner's count of bytes
all read this one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cuboid.spec.model import LatentAttentionSpec, MixtureSpec, ModelSpec

TIED = "embedding.tokens.weight"
"""The unit, and the parameter in it, that the embedding and a tied head share."""

EXPERTS = ".experts"
BALANCE = ".balance"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class UnitShapes:
    """Parameters that are gathered, released and reduced together."""

    name: str
    shapes: Shapes
    uses: int = 1
    """How many times one micro-batch uses the unit on its rank (twice when a tied embedding is first and last)."""
    routed: bool = False


def unit_of(prefix: str, name: str) -> str:
    """The unit of a parameter under `prefix`: a block, the embedding or the head."""
    if name == TIED:
        return TIED
    if EXPERTS in name:
        return prefix + EXPERTS
    return prefix + BALANCE if name.endswith("router.bias") else prefix


def is_block_linear(unit: str, name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is the weight of a linear in a block: what `training.precision=fp8` multiplies in fp8."""
    return unit.startswith("layers.") and EXPERTS not in name and "router" not in name and len(shape) == 2


def _norm(model: ModelSpec, name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if model.norm == "layernorm" else {})}


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _latent_attention(model: ModelSpec, latent: LatentAttentionSpec, name: str) -> Shapes:
    shapes: Shapes = {}
    if latent.q_rank:
        shapes |= _linear(f"{name}.query_down", model.hidden, latent.q_rank, bias=False)
        shapes |= _norm(model, f"{name}.query_down_norm", latent.q_rank)
    query = model.heads * (latent.qk_nope_dim + latent.qk_rope_dim)
    shapes |= _linear(f"{name}.query_up", latent.q_rank or model.hidden, query, bias=False)
    shapes |= _linear(f"{name}.key_value_down", model.hidden, latent.kv_rank + latent.qk_rope_dim, bias=False)
    shapes |= _norm(model, f"{name}.key_value_down_norm", latent.kv_rank)
    both = model.heads * (latent.qk_nope_dim + latent.v_dim)
    shapes |= _linear(f"{name}.key_value_up", latent.kv_rank, both, bias=False)
    return shapes | _linear(f"{name}.output", model.heads * latent.v_dim, model.hidden, bias=False)


def _attention(model: ModelSpec, name: str) -> Shapes:
    if model.latent is not None:
        return _latent_attention(model, model.latent, name)
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = _linear(f"{name}.query", model.hidden, query, model.qkv_bias)
    shapes |= _linear(f"{name}.key", model.hidden, key_value, model.qkv_bias)
    shapes |= _linear(f"{name}.value", model.hidden, key_value, model.qkv_bias)
    shapes |= _linear(f"{name}.output", query, model.hidden, model.output_bias)
    if model.qk_norm:
        shapes |= _norm(model, f"{name}.query_norm", model.head_dim) | _norm(model, f"{name}.key_norm", model.head_dim)
    return shapes


def _inner(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up") if model.activation == "swiglu" else ("up",)


def _feed_forward(model: ModelSpec, name: str, width: int) -> Shapes:
    shapes: Shapes = {}
    for matrix in _inner(model):
        shapes |= _linear(f"{name}.{matrix}", model.hidden, width, model.mlp_bias)
    return shapes | _linear(f"{name}.down", width, model.hidden, model.mlp_bias)


def _mixture(model: ModelSpec, mixture: MixtureSpec, name: str) -> Shapes:
    shapes = _linear(f"{name}.router", model.hidden, mixture.experts, mixture.router_bias)
    for matrix in _inner(model):
        shapes[f"{name}.experts.{matrix}"] = (mixture.experts, mixture.expert_ffn, model.hidden)
    shapes[f"{name}.experts.down"] = (mixture.experts, model.hidden, mixture.expert_ffn)
    return shapes | (_feed_forward(model, f"{name}.shared", mixture.shared_ffn) if mixture.shared_ffn else {})


def block_shapes(model: ModelSpec, layer: int) -> Shapes:
    name = f"layers.{layer}"
    feed_forward = f"{name}.feed_forward"
    return {
        **_norm(model, f"{name}.attention_norm", model.hidden),
        **_attention(model, f"{name}.attention"),
        **_norm(model, f"{name}.feed_forward_norm", model.hidden),
        **(
            _mixture(model, model.mixture, feed_forward)
            if model.mixture is not None and model.has_experts(layer)
            else _feed_forward(model, feed_forward, model.ffn)
        ),
    }


def embedding_shapes(model: ModelSpec) -> Shapes:
    positions = {"embedding.positions.weight": (model.max_positions, model.hidden)}
    return {TIED: (model.vocab, model.hidden), **(positions if model.positions == "learned" else {})}


def head_shapes(model: ModelSpec) -> Shapes:
    """A tied output matrix is under the embedding's name."""
    output = TIED if model.tie_embeddings else "head.output.weight"
    return {**_norm(model, "head.norm", model.hidden), output: (model.vocab, model.hidden)}


def units(model: ModelSpec, layers: Iterable[int], first: bool, last: bool) -> list[UnitShapes]:
    """The units of a rank with these layers, with the embedding (`first`) and the head (`last`) or without."""
    segments = [("embedding", embedding_shapes(model))] if first else []
    segments += [(f"layers.{layer}", block_shapes(model, layer)) for layer in layers]
    segments += [("head", head_shapes(model))] if last else []
    found: dict[str, Shapes] = {}
    uses: dict[str, int] = {}
    for prefix, shapes in segments:
        members: dict[str, Shapes] = {}
        for name, shape in shapes.items():
            members.setdefault(unit_of(prefix, name), {})[name] = shape
        for unit, held in members.items():
            found[unit] = held
            uses[unit] = 0 if unit.endswith(BALANCE) else uses.get(unit, 0) + 1
    return [UnitShapes(name, held, uses[name], name.endswith(EXPERTS)) for name, held in found.items()]


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


# Context parallelism: a sequence is cut into 2 · cp chunks and rank i holds chunks i and 2 · cp - 1 - i (zigzag): under
# a causal mask an early chunk is little work and a late one much, and every such pair is the same.


def chunks_of(index: int, size: int) -> tuple[int, int]:
    """The two chunks of a rank, earlier first."""
    return index, 2 * size - 1 - index


def places_of(index: int, size: int, length: int) -> list[range]:
    """The places of a sequence that a rank holds, in order."""
    if size == 1:
        return [range(length)]
    width = length // (2 * size)
    return [range(chunk * width, (chunk + 1) * width) for chunk in chunks_of(index, size)]
