"""What the cost model reads, as structures of arrays: one entry per layout, or one number for all of them.

Every function of this room broadcasts, so that a search over a hundred thousand layouts of one model and a score card
over two thousand rows of different models run the same lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, SCHEDULES, Layout
from cuboid.spec.model import ModelSpec

Array = NDArray[np.float64]
"""Float64 of any shape; a zero-dimensional one stands for all entries."""


def number(value: Any) -> Array:
    """A number or a sequence of numbers as an array."""
    return np.asarray(value, dtype=np.float64)


def pick(condition: NDArray[np.bool_], yes: Any, no: Any) -> Array:
    """`np.where`; what is decided for all layouts at once is not asked of each of them."""
    chosen: Array = np.where(condition, yes, no) if condition.ndim else yes if condition else no
    return chosen


def of_size(value: Array, size: int) -> Array:
    """`np.broadcast_to`, which takes its time where there is nothing to do."""
    return value if value.shape == (size,) else np.broadcast_to(value, size)


def single(value: Array) -> float:
    """The number in an array of one entry."""
    return float(np.ravel(value)[0])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a model that its cost depends on."""

    hidden: Array
    layers: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    ffn: Array
    vocab: Array
    gated: Array
    """1 where the feed-forward block has a gate (three matrices), 0 where it has two."""
    tied: Array
    qk_norm: Array
    """1 where queries and keys are normalized."""
    layernorm: Array
    """1 where norms have a bias."""
    qkv_bias: Array
    output_bias: Array
    mlp_bias: Array
    router_bias: Array
    positions: Array
    """Learned position rows; 0 with rotary positions."""
    experts: Array
    """0 for a dense model."""
    top_k: Array
    expert_ffn: Array
    shared_ffn: Array
    dense_layers: Array
    """Leading layers without experts."""
    latent: Array
    """1 with low-rank latent attention; the five sizes below count only then."""
    q_rank: Array
    kv_rank: Array
    nope_dim: Array
    rope_dim: Array
    v_dim: Array
    norms: Array = field(default_factory=lambda: number(2))
    """Norms of the width of the residual stream in a layer."""
    post_norms: Array = field(default_factory=lambda: number(0))
    """1 where norms stand behind attention and feed-forward block."""
    qk_norm_whole: Array = field(default_factory=lambda: number(0))
    """1 where norms of queries and keys are of all heads together."""
    sinks: Array = field(default_factory=lambda: number(0))
    """1 where each head has a learned logit beside its scores."""
    expert_biases: Array = field(default_factory=lambda: number(0))
    """1 where the router and routed experts have biases."""
    window: Array = field(default_factory=lambda: number(0))
    """Tokens that a query of a layer with a window sees; the mean where windows differ."""
    windowed: Array = field(default_factory=lambda: number(0))
    """Fraction of the layers with a window."""
    predictions: Array = field(default_factory=lambda: number(0))
    """Prediction layers behind the others, which the last stage has beside the head."""

    @cached_property
    def routes(self) -> NDArray[np.bool_]:
        """Where there are experts."""
        return np.asarray(self.experts > 0)

    @cached_property
    def any_routes(self) -> bool:
        """Whether any of the models has experts."""
        return bool(np.any(self.routes))

    @cached_property
    def is_latent(self) -> NDArray[np.bool_]:
        """Where attention is that of a latent."""
        return np.asarray(self.latent > 0)

    @cached_property
    def any_latent(self) -> bool:
        """Whether any of the models has it."""
        return bool(np.any(self.is_latent))

    @cached_property
    def any_predictions(self) -> bool:
        """Whether any of the models has prediction layers."""
        return bool(np.any(self.predictions > 0))

    @cached_property
    def any_windows(self) -> bool:
        """Whether any of the models has layers with a window."""
        return bool(np.any(self.windowed > 0))

    @classmethod
    def of(cls, model: ModelSpec) -> "Shape":
        """The shape of one model."""
        return _shape(model)

    @classmethod
    def make(cls, **values: Any) -> "Shape":
        """From plain numbers or sequences of them."""
        return cls(**{key: number(value) for key, value in values.items()})

    @classmethod
    def stack(cls, shapes: Sequence["Shape"]) -> "Shape":
        """One entry per given shape."""
        return cls(**{each.name: np.stack([getattr(shape, each.name) for shape in shapes]) for each in fields(cls)})


@lru_cache(maxsize=64)
def _shape(model: ModelSpec) -> Shape:
    mixture, latent = model.mixture, model.latent
    windows = [window for window in map(model.window_of, range(model.layers)) if window]
    return Shape.make(
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        gated=model.is_gated,
        tied=model.tie_embeddings,
        qk_norm=model.qk_norm,
        layernorm=model.norm == "layernorm",
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        mlp_bias=model.mlp_bias,
        router_bias=mixture.router_bias if mixture else 0,
        positions=model.max_positions if model.positions == "learned" else 0,
        experts=mixture.experts if mixture else 0,
        top_k=mixture.top_k if mixture else 0,
        expert_ffn=mixture.expert_ffn if mixture else 0,
        shared_ffn=mixture.shared_ffn if mixture else 0,
        dense_layers=mixture.first_dense_layers if mixture else model.layers,
        latent=latent is not None,
        q_rank=latent.q_rank if latent else 0,
        kv_rank=latent.kv_rank if latent else 0,
        nope_dim=latent.qk_nope_dim if latent else 0,
        rope_dim=latent.qk_rope_dim if latent else 0,
        v_dim=latent.v_dim if latent else 0,
        norms=4 if model.norms == "both" else 2,
        post_norms=model.norms != "before",
        qk_norm_whole=model.qk_norm_whole,
        sinks=model.sinks,
        expert_biases=mixture.biases if mixture else 0,
        window=sum(windows) / len(windows) if windows else 0,
        windowed=len(windows) / model.layers,
        predictions=model.prediction_layers,
    )


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Layouts with the batch each of them works on."""

    dp: Array
    tp: Array
    pp: Array
    cp: Array
    cp_method: Array
    """Position in `spec.layout.CONTEXT_METHODS`."""
    cp_inner: Array
    ep: Array
    zero: Array
    shard: Array
    """Ranks that hold different parts of what ZeRO splits (never 0)."""
    schedule: Array
    """Position in `spec.layout.SCHEDULES`."""
    vpp: Array
    micro_batch: Array
    recompute: Array
    """Position in `spec.layout.RECOMPUTE`."""
    recompute_layers: Array
    """Layers of each stage that this is said of, the others being recomputed one kind less; 0 is all."""
    sequence_parallel: Array
    global_batch: Array
    sequence: Array
    offload: Array
    """1 where the optimizer state lives in host memory."""
    fuller: Array
    """What the rank with the largest shard keeps of what ZeRO splits, over the mean."""
    held: Array
    """Micro-batches kept in flight over those of the named schedule (2 for ZB-2p, less for V-Half and V-Min)."""

    @cached_property
    def world_size(self) -> Array:
        """Ranks of each layout."""
        return self.dp * self.tp * self.pp * self.cp

    @cached_property
    def copies(self) -> Array:
        """Ranks that hold the same parameters, but those of experts."""
        return self.dp * self.cp

    @cached_property
    def expert_copies(self) -> Array:
        """Ranks that hold the same experts."""
        return np.maximum(self.dp * self.cp * self.tp / np.maximum(self.ep, 1), 1)

    @cached_property
    def micro_batches(self) -> Array:
        """Micro-batches one replica runs per step."""
        return np.maximum(self.global_batch / (self.dp * self.micro_batch), 1.0)

    @cached_property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.micro_batch * self.sequence / self.cp

    @classmethod
    def make(cls, **values: Any) -> "Jobs":
        """From numbers or sequences; what is skipped has the default of a plain layout."""
        given = {key: number(value) for key, value in values.items()}
        one, none = number(1), number(0)
        for key in ("dp", "tp", "pp", "cp", "cp_inner", "ep", "vpp", "micro_batch"):
            given.setdefault(key, one)
        for key in ("zero", "shard", "recompute", "recompute_layers", "offload", "cp_method"):
            given.setdefault(key, none)
        given.setdefault("held", one)
        given.setdefault("fuller", one)
        given.setdefault("schedule", number(SCHEDULES.index("1f1b")))
        given.setdefault("sequence_parallel", (given["tp"] > 1).astype(np.float64))
        given["shard"] = np.where(given["shard"] > 0, given["shard"], given["dp"])
        return cls(**given)

    @classmethod
    def of(cls, layouts: Sequence[Layout], *, global_batch: int, sequence: int) -> "Jobs":
        """The given layouts, all on one batch."""
        degrees = ("dp", "tp", "pp", "cp", "cp_inner", "ep", "shard", "vpp", "micro_batch")
        names = (*degrees, "zero", "recompute_layers", "sequence_parallel", "offload")
        values: dict[str, Any] = {name: [getattr(layout, name) for layout in layouts] for name in names}
        values["fuller"] = [layout.fuller_shard for layout in layouts]
        values["cp_method"] = [CONTEXT_METHODS.index(layout.cp_method) for layout in layouts]
        values["schedule"] = [SCHEDULES.index(layout.schedule) for layout in layouts]
        values["recompute"] = [RECOMPUTE.index(layout.recompute) for layout in layouts]
        return cls.make(**values, global_batch=global_batch, sequence=sequence)


# Layouts that recompute some layers of a stage more than the others: both kinds are costed, and mixed by how many
# layers are of each. A layout whose layers are all alike costs to the bit what it costs without this.


def mixes(jobs: Jobs) -> bool:
    """Whether any of the layouts does."""
    return bool(np.any(jobs.recompute_layers > 0))


def heavier(jobs: Jobs) -> Jobs:
    """With all layers recomputed as those that are recomputed more."""
    return replace(jobs, recompute_layers=number(0))


def lighter(jobs: Jobs) -> Jobs:
    """… as those that are recomputed less."""
    return replace(jobs, recompute=np.maximum(jobs.recompute - 1, 0.0), recompute_layers=number(0))


def recomputed(jobs: Jobs, layers: Array) -> Array:
    """Of so many layers of a rank those that are recomputed more."""
    return np.where(jobs.recompute_layers > 0, np.minimum(jobs.recompute_layers * jobs.vpp, layers), layers)


def mixed(jobs: Jobs, layers: Array, more: Array, less: Array) -> Array:
    """The mean over the layers of a model, of what one takes that is recomputed more and one that is less."""
    fraction = np.minimum(jobs.recompute_layers * jobs.pp * jobs.vpp / layers, 1.0)
    return np.where(jobs.recompute_layers > 0, fraction * more + (1 - fraction) * less, more)


@dataclass(frozen=True)
class Kept:
    """What the layers of a rank keep of one micro-batch."""

    layers: Array
    """All of them."""
    layer: Array
    """One that is run backward, or again before."""
    last: Array
    """The same of those that are run backward first: the others are recomputed less."""
    spared: Array
    """Those of a stage that are recomputed less; they let go of it before the first ones are run again."""
