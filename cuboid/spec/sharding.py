"""How parameters are split, which part of each a rank holds, and who else holds the same part.

Pure arithmetic on what modules declare: initial weights, gradients, checkpoints, the proof and the planner's count of
bytes all follow from it. Nothing is guessed from a name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cuboid.errors import UserError
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import LatentAttentionSpec, ModelSpec
from cuboid.spec.plugin import PythonModelSpec

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

    kind: Literal["even", "heads", "vocabulary", "expert", "replicated", "partial", "balance"]
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
        # of what is partial always. What is moved by a balance has none.
        rows = shape[0] if shape else 1
        partial = ranks > 1 and self.kind != "balance" and (rank.sequence_parallel or self.kind == "partial")
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

BALANCE = Split("balance")
"""Every rank holds all of it. No gradient changes it, but the load of experts; it keeps its precision."""


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


def shard_sizes(parts: list[Part], weights: Sequence[int]) -> list[int]:
    """Elements of each shard of a unit: one slot for each weight, the last one filled up."""
    slot = -(-(parts[-1].offset + parts[-1].size) // sum(weights))
    return [slot * weight for weight in weights]


# The parameters of a model by name, shape and split, in the order the modules of `cuboid.model` hold them, and the
# units they lie in: a block, an embedding, a head. It says what those modules declare, for those who plan without
# torch.
#
# The table of tokens is a unit of its own, so that first and last stage lay out a tied one alike; routed experts are,
# because other ranks hold the same ones; what balances a router is: it keeps its precision and has no gradient.


TIED = "embedding.tokens.weight"
"""The unit, and the parameter in it, that the embedding and a tied head share."""

EXPERTS = ".experts"
BALANCES = ".balance"
"""How the names of units end that hold such parameters."""

Table = dict[str, Declared]


@dataclass(frozen=True)
class DeclaredUnit:
    """Parameters that are gathered, released and reduced together."""

    name: str
    parameters: Table
    uses: int = 1
    """How many times one micro-batch uses the unit on its rank (twice when a tied embedding is first and last)."""
    routed: bool = False


def unit_of(prefix: str, name: str, split: Split) -> str:
    """The unit of a parameter under `prefix`: a block, the embedding or the head."""
    if name == TIED:
        return TIED
    return prefix + {"expert": EXPERTS, "balance": BALANCES}.get(split.kind, "")


def is_block_linear(unit: str, declared: Declared) -> bool:
    """Whether it is the weight of a linear in a block: what `training.precision=fp8` multiplies in fp8. A router's is
    not: each rank routes tokens of its own (partial), in float32."""
    return unit.startswith("layers.") and len(declared.shape) == 2 and declared.split.kind not in ("expert", "partial")


def _norm(model: ModelSpec, name: str, size: int, split: Split = REPLICATED) -> Table:
    kinds = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return {f"{name}.{kind}": Declared((size,), split) for kind in kinds}


def _linear(name: str, inputs: int, outputs: int, bias: bool, split: Split) -> Table:
    # What is added after the sum over tensor ranks is whole on each of them.
    added = {f"{name}.bias": Declared((outputs,), REPLICATED if split == ROW else split)} if bias else {}
    return {f"{name}.weight": Declared((outputs, inputs), split), **added}


def _latent_attention(model: ModelSpec, latent: LatentAttentionSpec, name: str) -> Table:
    table: Table = {}
    if latent.q_rank:
        table |= _linear(f"{name}.query_down", model.hidden, latent.q_rank, False, REPLICATED)
        table |= _norm(model, f"{name}.query_down_norm", latent.q_rank)
    query = model.heads * (latent.qk_nope_dim + latent.qk_rope_dim)
    matrix = "query_up" if latent.q_rank else "query"
    table |= _linear(f"{name}.{matrix}", latent.q_rank or model.hidden, query, False, COLUMN)
    table |= _linear(f"{name}.key_value_down", model.hidden, latent.kv_rank + latent.qk_rope_dim, False, REPLICATED)
    table |= _norm(model, f"{name}.key_value_down_norm", latent.kv_rank)
    both = model.heads * (latent.qk_nope_dim + latent.v_dim)
    table |= _linear(f"{name}.key_value_up", latent.kv_rank, both, False, COLUMN)
    return table | _linear(f"{name}.output", model.heads * latent.v_dim, model.hidden, False, ROW)


def attention_parameters(model: ModelSpec, name: str) -> Table:
    if model.latent is not None:
        return _latent_attention(model, model.latent, name)
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    table = {f"{name}.sinks": Declared((model.heads,), COLUMN)} if model.sinks else {}
    table |= _linear(f"{name}.query", model.hidden, query, model.qkv_bias, COLUMN)
    table |= _linear(f"{name}.key", model.hidden, key_value, model.qkv_bias, heads(model.kv_heads))
    table |= _linear(f"{name}.value", model.hidden, key_value, model.qkv_bias, heads(model.kv_heads))
    table |= _linear(f"{name}.output", query, model.hidden, model.output_bias, ROW)
    if model.qk_norm_whole:
        table |= _norm(model, f"{name}.query_norm", query, COLUMN)
        table |= _norm(model, f"{name}.key_norm", key_value, heads(model.kv_heads))
    elif model.qk_norm:
        for norm in ("query_norm", "key_norm"):
            table |= _norm(model, f"{name}.{norm}", model.head_dim, PARTIAL)
    return table


def _inner(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up") if model.is_gated else ("up",)


def _feed_forward(model: ModelSpec, name: str, width: int) -> Table:
    table: Table = {}
    for matrix in _inner(model):
        table |= _linear(f"{name}.{matrix}", model.hidden, width, model.mlp_bias, COLUMN)
    return table | _linear(f"{name}.down", width, model.hidden, model.mlp_bias, ROW)


def _mixture(model: ModelSpec, mixture: MixtureSpec, name: str) -> Table:
    table = _linear(f"{name}.router", model.hidden, mixture.experts, False, PARTIAL)
    if mixture.router_bias:
        table[f"{name}.router.bias"] = Declared((mixture.experts,), BALANCE)
    if mixture.biases:
        table[f"{name}.router.logit_bias"] = Declared((mixture.experts,), PARTIAL)
    for matrix in _inner(model):
        table[f"{name}.experts.{matrix}"] = Declared((mixture.experts, mixture.expert_ffn, model.hidden), EXPERT)
    table[f"{name}.experts.down"] = Declared((mixture.experts, model.hidden, mixture.expert_ffn), EXPERT)
    if mixture.biases:
        for matrix in _inner(model):
            table[f"{name}.experts.{matrix}_bias"] = Declared((mixture.experts, mixture.expert_ffn), EXPERT)
        table[f"{name}.experts.down_bias"] = Declared((mixture.experts, model.hidden), EXPERT)
    return table | (_feed_forward(model, f"{name}.shared", mixture.shared_ffn) if mixture.shared_ffn else {})


def block_parameters(model: ModelSpec, layer: int) -> Table:
    name = f"layers.{layer}"
    feed_forward = f"{name}.feed_forward"
    before, after = model.norms != "after", model.norms != "before"
    return {
        **(_norm(model, f"{name}.attention_norm", model.hidden) if before else {}),
        **attention_parameters(model, f"{name}.attention"),
        **(_norm(model, f"{name}.attention_post_norm", model.hidden) if after else {}),
        **(_norm(model, f"{name}.feed_forward_norm", model.hidden) if before else {}),
        **(
            _mixture(model, model.mixture, feed_forward)
            if model.mixture is not None and model.has_experts(layer)
            else _feed_forward(model, feed_forward, model.ffn)
        ),
        **(_norm(model, f"{name}.feed_forward_post_norm", model.hidden) if after else {}),
    }


def embedding_is_shared(model: ModelSpec) -> bool:
    """Whether the last stage has the token embedding too: as its head, or to predict further tokens."""
    return model.tie_embeddings or model.prediction_layers > 0


def prediction_parameters(model: ModelSpec, layer: int) -> Table:
    """What a prediction layer has beside its block, for itself; of other layers nothing."""
    name = f"layers.{layer}"
    if layer < model.layers:
        return {}
    return {
        **_norm(model, f"{name}.embedding_norm", model.hidden),
        **_norm(model, f"{name}.hidden_norm", model.hidden),
        **_linear(f"{name}.projection", 2 * model.hidden, model.hidden, False, REPLICATED),
        **_norm(model, f"{name}.head_norm", model.hidden),
    }


def _prediction_segment(model: ModelSpec, layer: int) -> Table:
    """With the token embedding; the first one also has the norm of the model's head, behind which it reads."""
    table = {**block_parameters(model, layer), TIED: embedding_parameters(model)[TIED]}
    table |= prediction_parameters(model, layer)
    return table | (_norm(model, "head.norm", model.hidden) if layer == model.layers else {})


def embedding_parameters(model: ModelSpec) -> Table:
    table = {TIED: Declared((model.vocab, model.hidden), VOCABULARY)}
    if model.positions == "learned":
        table["embedding.positions.weight"] = Declared((model.max_positions, model.hidden), REPLICATED)
    return table


def head_parameters(model: ModelSpec) -> Table:
    """A tied output matrix is under the embedding's name."""
    output = TIED if model.tie_embeddings else "head.output.weight"
    return {**_norm(model, "head.norm", model.hidden), output: Declared((model.vocab, model.hidden), VOCABULARY)}


def units(model: ModelSpec, layers: Iterable[int], first: bool, last: bool) -> list[DeclaredUnit]:
    """The units of a rank with these layers, with the embedding (`first`) and the head (`last`) or without."""
    prefixes = [*["embedding"] * first, *(f"layers.{layer}" for layer in layers), *["head"] * last]
    found: dict[str, Table] = {}
    uses: dict[str, int] = {}
    for prefix in prefixes:
        members: dict[str, Table] = {}
        for name, declared in segment_parameters(model, prefix).items():
            members.setdefault(unit_of(prefix, name, declared.split), {})[name] = declared
        for unit, held in members.items():
            found[unit] = held
            uses[unit] = 0 if unit.endswith(BALANCES) else uses.get(unit, 0) + 1
    return [DeclaredUnit(name, held, uses[name], name.endswith(EXPERTS)) for name, held in found.items()]


def count(table: Table) -> int:
    """Numbers in all of its parameters."""
    return sum(math.prod(declared.shape) for declared in table.values())


def segment_parameters(model: ModelSpec, prefix: str) -> Table:
    """Of the embedding, a block or the head."""
    if isinstance(model, PythonModelSpec):
        return model.built.declared(prefix)
    if prefix == "embedding":
        return embedding_parameters(model)
    if prefix == "head":
        table = head_parameters(model)
        moved = _norm(model, "head.norm", model.hidden) if model.prediction_layers else {}
        return {name: declared for name, declared in table.items() if name not in moved}
    layer = int(prefix.partition(".")[2])
    return block_parameters(model, layer) if layer < model.layers else _prediction_segment(model, layer)


def parameter_name(model: ModelSpec, prefix: str, inner: str) -> str:
    """What the whole model calls the parameter `inner` of a segment's module."""
    if inner == "tokens.weight" and prefix != "head":  # of the embedding, and of prediction layers
        return TIED
    if prefix == "head" and inner == "output.weight" and model.tie_embeddings:
        return TIED
    return f"head.norm.{inner.rpartition('.')[2]}" if inner.startswith("final_norm.") else f"{prefix}.{inner}"


# Which part of a sequence each context-parallel rank holds.
#
# A sequence is cut into 2 · cp chunks and rank i holds chunks i and 2 · cp - 1 - i: under a causal mask an early chunk
# is little work and a late one much, and every such pair is the same.


def chunks_of(index: int, size: int) -> tuple[int, int]:
    """The two chunks of a rank, earlier first."""
    return index, 2 * size - 1 - index


def places_of(index: int, size: int, length: int) -> list[range]:
    """The places of a sequence that a rank holds, in order."""
    if size == 1:
        return [range(length)]
    width = length // (2 * size)
    return [range(chunk * width, (chunk + 1) * width) for chunk in chunks_of(index, size)]


def seen_of(queries: range, keys: range, window: int) -> range:
    """Of keys that all stand before the queries, those that at least one of these sees."""
    return range(max(keys.start, queries.start - window + 1), keys.stop)


def seen_places(index: int, source: int, size: int, length: int, window: int) -> list[range]:
    """The places of keys that rank `source` holds and that rank `index`, another one, sees in a window."""
    found = []
    for keys in places_of(source, size, length):
        after = [queries for queries in places_of(index, size, length) if queries.start >= keys.stop]
        # The nearest queries look back farthest.
        if after and (seen := seen_of(after[0], keys, window)):
            found.append(seen)
    return found
