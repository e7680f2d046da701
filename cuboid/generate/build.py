"""The modules of one rank for generation: those of training, each with a cache in its attention, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cuboid.checkpoint.shards import ShardedTensor, TensorSlice
from cuboid.checkpoint.weights import copy_tensors, read_weights
from cuboid.generate.cache import Cache, CachedLatentAttention
from cuboid.generate.kernels import PanelTable, use_kernels
from cuboid.generate.window_cache import WindowCache
from cuboid.model.attention import Attention
from cuboid.model.feed_forward import FeedForward
from cuboid.model.initialize import initial_tensor
from cuboid.model.linear import Linear, declared_split
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.moe import MoE
from cuboid.model.rope import Positions, rotate
from cuboid.model.transformer import Block, Embedding, Head, Prediction
from cuboid.parallel.collectives import all_gather
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.expert import spread_experts
from cuboid.parallel.groups import Group, Groups, make_groups
from cuboid.parallel.parallelize import DTYPES, set_parameter
from cuboid.parallel.tensor import make_block, make_embedding, make_head
from cuboid.parallel.tensor_region import Region
from cuboid.spec.generation import GenerationSpec, cache_shape
from cuboid.spec.sharding import BALANCE, Part, ShardingRank, kv_part_count, parameter_name

# Fused QKV and fused gate-up: matmuls of the same rows made into one, because a decoding step has few rows, and takes
# as long as it takes to begin each operation. Queries and keys are rotated (RoPE) together too, where they have no
# norms of their own.


def fuse(matmuls: Sequence[Linear]) -> Linear:
    """One matmul, of whose weight and bias theirs become parts: what is loaded into them later is in it."""
    weights = [matmul.weight for matmul in matmuls]
    if weights[0].stride(0) == 1:  # the columns of each lie together, and do so in the whole
        weight = torch.cat([each.t() for each in weights], 1).t()
    else:
        weight = torch.cat(tuple(weights))
    _take_parts(weights, weight)
    biases = [matmul.bias for matmul in matmuls if matmul.bias is not None]
    bias = torch.cat(tuple(biases)) if biases else None
    if bias is not None:
        _take_parts(biases, bias)
    with torch.device("meta"):
        fused = Linear(weight.shape[1], len(weight), bias is not None)
    fused.weight = nn.Parameter(weight, requires_grad=False)
    fused.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return fused


def _take_parts(parameters: Sequence[nn.Parameter], whole: Tensor) -> None:
    for parameter, part in zip(parameters, whole.split([len(each) for each in parameters]), strict=True):
        parameter.data = part


class FusedAttention(nn.Module):
    def __init__(self, whole: Attention, cache: Cache) -> None:
        super().__init__()
        self.whole, self.cache = whole, cache
        self.heads = [len(each.weight) // whole.head_dim for each in (whole.query, whole.key, whole.value)]
        self.fused = fuse((whole.query, whole.key, whole.value))
        del whole.query, whole.key, whole.value

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        made = self.fused(x).view(1, x.shape[0], -1, self.whole.head_dim)
        whole, is_windowed = self.whole, self.whole.window > 0
        if whole.query_norm is not None:
            query, key, value = made.split(self.heads, 2)
            query, key = whole.normed(query, key)
            query, key = rotate(query, positions, is_windowed), rotate(key, positions, is_windowed)
        else:
            queries, keys, values = self.heads
            both, value = made.split((queries + keys, values), 2)
            query, key = rotate(both, positions, is_windowed).split((queries, keys), 2)
        if whole.query_scale != 1.0:
            query = query * whole.query_scale
        return whole.output(self.cache(query, key, value, positions, whole.sinks).reshape(x.shape[0], -1))


class FusedFeedForward(nn.Module):
    def __init__(self, gate: Linear, whole: FeedForward) -> None:
        super().__init__()
        self.fused = fuse((gate, whole.up))
        self.down, self.gating = whole.down, whole.gating

    def forward(self, x: Tensor, _: Positions) -> Tensor:
        gate, up = self.fused(x).chunk(2, 1)
        return self.down(self.gating(gate, up))


def fused_feed_forward(whole: FeedForward) -> FeedForward | FusedFeedForward:
    return whole if whole.gate is None else FusedFeedForward(whole.gate, whole)


LOAD_SECONDS = 1800.0
"""Until a rank gives up that waits to be told where its weights lie."""


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank computes."""

    embedding: Embedding | None
    blocks: tuple[Block, ...]
    head: Head | None
    caches: tuple[Cache, ...]
    tensor: Group
    vocabulary: int
    predictions: tuple[Prediction, ...] = ()
    """Which draft; the first has the norm of the head, because all of them read behind it."""

    def use_kernels(self) -> str:
        """See `generate.kernels`. A table that tokens are looked up in too stays as it is where ranks share it."""
        table = None if self.embedding is None else self.embedding.tokens.weight
        is_tied = self.head is not None and self.head.output.weight is table
        modules = (*self.blocks, *([] if self.head is None else [self.head]))
        reason = use_kernels(modules, kept=table if self.tensor.size > 1 else None)
        if is_tied and self.tensor.size == 1 and not reason:
            assert self.embedding is not None and self.head is not None
            self.embedding.tokens = PanelTable(self.head.output.weight)
        return reason

    def hidden(self, x: Tensor, positions: Positions) -> Tensor:
        """x: tokens (1, rows) on the first stage, what the stage before made of them (rows, hidden) on the others."""
        if self.embedding is not None:
            x = self.embedding(x, positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.predictions[0].final_norm(x) if self.predictions else x

    def logits(self, x: Tensor) -> Tensor:
        """Of these rows for the whole vocabulary, in float32 or better, the same on every tensor rank."""
        assert self.head is not None
        part = self.head(x)
        part = part.float() if part.element_size() < 4 else part
        if self.tensor.size == 1:
            return part[:, : self.vocabulary]
        whole = all_gather(part, self.tensor).unflatten(0, (self.tensor.size, -1)).transpose(0, 1).flatten(1)
        return whole[:, : self.vocabulary]


def make_generation_groups(spec: GenerationSpec, rank: int, device: torch.device) -> Groups:
    experts = spec.model.mixture is not None
    parts = kv_part_count(spec.model, spec.layout.tp)
    return make_groups(spec.layout, rank, parts, False, experts, device.type == "cpu")


class Builder:
    """Makes the stages of a rank. With `held`, the parameters that a training has, by name, nothing is read,
    and they stay where they are: matmuls are fused only where the memory is this builder's."""

    def __init__(
        self,
        spec: GenerationSpec,
        groups: Groups,
        context: Group,
        device: torch.device,
        held: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.spec, self.groups, self.context, self.device, self.held = spec, groups, context, device, held
        mixture = spec.model.mixture
        # Which tokens an expert has room for depends on how many follow, which nobody knows here: all are taken.
        mixture = mixture and replace(mixture, capacity_factor=0.0)
        self.model = replace(spec.model, mixture=mixture, prediction_layers=spec.draft)
        self.dtype = DTYPES[spec.precision]
        self.region = Region(groups.tensor, False) if groups.tensor.size > 1 else None
        self.parameters: dict[str, tuple[Part, nn.Parameter]] = {}

    def stage(self, layers: range) -> Stage:
        embedding = self._embedding() if layers.start == 0 else None
        is_last = layers.stop == self.model.layers
        stop = self.model.all_layers if is_last else layers.stop
        pairs = [self._block(layer) for layer in range(layers.start, stop)]
        head = self._head() if is_last else None
        blocks = tuple(block for block, _ in pairs if not isinstance(block, Prediction))
        predictions = tuple(block for block, _ in pairs if isinstance(block, Prediction))
        caches = tuple(cache for _, cache in pairs)
        return Stage(embedding, blocks, head, caches, self.groups.tensor, self.model.vocab, predictions)

    def _embedding(self) -> Embedding:
        embedding = make_embedding(self.model, self.region)
        self._materialize(embedding, "embedding")
        return embedding

    def _block(self, layer: int) -> tuple[Block, Cache]:
        block = make_block(self.model, layer, self.region, self.device)
        if isinstance(block.feed_forward, MoE):
            spread_experts(block.feed_forward, self.groups.expert)
        self._materialize(block, f"layers.{layer}")
        window = self.model.window_of(layer)
        sizes = self.model, self.spec.layout, self.spec.slots, self.spec.length
        shape = cache_shape(*sizes, window)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        attention = block.attention
        if isinstance(attention, MultiLatentAttention):
            cache = Cache(shape, self.context, None, like)
            block.attention = CachedLatentAttention(attention, cache)  # type: ignore[assignment]
        else:
            # The cache keeps each key-value head once, whichever query heads read it.
            served = attention.kv_head_of_query
            if window:
                cache = WindowCache(shape, self.context, served, like, window, cache_shape(*sizes).places)
            else:
                cache = Cache(shape, self.context, served, like)
            cache.cap = attention.cap
            attention.kv_head_of_query, attention.mix = None, cache
            if self.held is None:
                block.attention = FusedAttention(attention, cache)  # type: ignore[assignment]
        if self.held is None:
            self._fuse_feed_forward(block)
        return block, cache

    def _fuse_feed_forward(self, block: Block) -> None:
        whole = block.feed_forward
        if isinstance(whole, FeedForward):
            block.feed_forward = fused_feed_forward(whole)  # type: ignore[assignment]
        elif whole.shared is not None:
            whole.shared = fused_feed_forward(whole.shared)  # type: ignore[assignment]

    def _head(self) -> Head:
        head = make_head(self.model, self.region)
        self._materialize(head, "head")
        return head

    def _materialize(self, module: nn.Module, prefix: str) -> None:
        """Memory for what this rank holds of each parameter."""
        tensor, expert = self.groups.tensor, self.groups.expert
        place = ShardingRank(tensor.size, tensor.index, expert.size, expert.index)
        for inner, whole in list(module.named_parameters()):
            name, shape = parameter_name(self.model, prefix, inner), tuple(whole.shape)
            if self.held is not None:
                set_parameter(module, inner, self.held[name])
                continue
            if name not in self.parameters:
                split = declared_split(module, inner)
                assert split is not None, name
                part = Part(name, shape, split.slice_of(name, shape, place), 0)
                wide = self.dtype if self.dtype == torch.float64 else torch.float32
                dtype = wide if split == BALANCE else self.dtype
                self.parameters[name] = part, nn.Parameter(self._memory(part, dtype), requires_grad=False)
            set_parameter(module, inner, self.parameters[name][1])

    def _memory(self, part: Part, dtype: torch.dtype) -> Tensor:
        """A CPU multiplies a few rows by a matrix a fifth faster where the columns of that lie together; a table that
        tokens are looked up in needs its rows together."""
        if self.device.type == "cpu" and len(part.shape) == 2 and not part.name.startswith("embedding."):
            return torch.zeros(part.shape[::-1], dtype=dtype).t()
        return torch.zeros(part.shape, dtype=dtype, device=self.device)

    def load(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Fill what was made, and know it by name no more; `tensors`: of a model, under the names of Hugging Face, in
        place of the spec's."""
        self._fill(tensors)
        self.parameters.clear()

    def _fill(self, tensors: Mapping[str, Tensor] | None) -> None:
        wanted = {name: _sharded(part, held.data) for name, (part, held) in self.parameters.items()}
        if tensors is not None:
            copy_tensors(tensors, lambda name, index: tensors[name][index], self.spec.model, wanted)
            return
        if self.spec.weights:
            read_weights(self.spec.weights, self.spec.model, wanted, open_coordination(LOAD_SECONDS))
            return
        for name, (part, held) in self.parameters.items():
            cut = part.slice
            wanted_part = (cut.dimension, range(cut.start, cut.stop))
            drawn = initial_tensor(self.model, name, part.full_shape, 0, wanted_part, self.device)
            held.data.narrow(cut.dimension, 0, cut.stop - cut.start).copy_(drawn)


def _sharded(part: Part, values: Tensor) -> ShardedTensor:
    """Padding, which only a split vocabulary has, lies behind the real rows and is skipped."""
    cut = part.slice
    real = cut.stop - cut.start
    offsets = tuple(cut.start if dimension == cut.dimension else 0 for dimension in range(len(part.shape)))
    held = values.narrow(cut.dimension, 0, real)
    tensor_slice = TensorSlice(offsets, tuple(held.shape), 0)
    return ShardedTensor(part.full_shape, values.dtype, ((tensor_slice, held),) if real else ())
