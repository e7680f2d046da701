"""How long the kernels of one layer take on one rank: multiplications, attention, what is bound by memory."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.communication import ONE
from cuboid.cost.constants import Chip, Engine
from cuboid.cost.inputs import Array, Jobs, Shape, pick
from cuboid.cost.reuse import each_once, recent
from cuboid.spec.layout import CONTEXT_METHODS

# Parameters and arithmetic of a model, per layer: dense, grouped-query, MoE, latent attention.


def _query_key_value(shape: Shape, tp: Array) -> tuple[Array, Array]:
    """Numbers of a token's queries, and of its keys and values, on a tensor rank: the latter are split as far as they
    have heads, and the same on several ranks beyond."""
    return shape.heads * shape.head_dim / tp, 2 * shape.kv_heads * shape.head_dim / kv_parts(shape, tp)


@recent
def kv_parts(shape: Shape, tp: Array) -> NDArray[np.int64]:
    """Parts that tensor ranks split key-value heads into."""
    return np.gcd(shape.kv_heads.astype(np.int64), tp.astype(np.int64))


def attention_parameters(shape: Shape, tp: Array = ONE) -> Array:
    """Matrix parameters of one attention block that a tensor rank holds: matmuls down to a latent are whole."""
    query, key_value = _query_key_value(shape, tp)
    plain = shape.hidden * (2 * query + key_value)
    if not shape.any_latent:
        return plain
    heads = shape.heads / tp
    query_width = heads * (shape.nope_dim + shape.rope_dim)
    down = np.where(shape.q_rank > 0, (shape.hidden + query_width) * shape.q_rank, shape.hidden * query_width)
    up = shape.kv_rank * heads * (shape.nope_dim + shape.v_dim)
    latent = down + shape.hidden * (shape.kv_rank + shape.rope_dim) + up + heads * shape.v_dim * shape.hidden
    return pick(shape.is_latent, latent, plain)


def feed_forward_parameters(shape: Shape, width: Array) -> Array:
    """Matrix parameters of one feed-forward block of some width."""
    return (2 + shape.gated) * shape.hidden * width


def norm_parameters(shape: Shape) -> Array:
    """Parameters of the norm before attention, a feed-forward block or the head."""
    return (1 + shape.layernorm) * shape.hidden


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer of each kind that a tensor rank holds."""

    dense: Array
    """A layer without experts."""
    mixture: Array
    """A layer with experts, without the routed experts themselves."""
    routed: Array
    """All routed experts of one layer, which tensor parallelism does not split."""


@recent
def layer_parameters(shape: Shape, tp: Array = ONE) -> LayerParameters:
    """Parameters of a layer of each kind on one of so many tensor ranks: norms, routers and biases added after a sum
    are whole on each, as `spec.sharding` has them."""
    query, key_value = _query_key_value(shape, tp)
    biases = shape.qkv_bias * (query + key_value) + shape.output_bias * shape.hidden
    normed = pick(np.asarray(shape.qk_norm_whole > 0), query + key_value / 2, 2 * shape.head_dim)
    inner = pick(shape.is_latent, shape.q_rank + shape.kv_rank, normed * shape.qk_norm)
    attention = attention_parameters(shape, tp) + pick(shape.is_latent, 0.0, biases) + shape.sinks * shape.heads / tp
    attention = attention + shape.norms * norm_parameters(shape) + (1 + shape.layernorm) * inner

    def feed_forward(width: Array) -> Array:
        biases = shape.mlp_bias * ((1 + shape.gated) * width / tp + shape.hidden)
        return feed_forward_parameters(shape, width / tp) + pick(np.asarray(width > 0), biases, 0.0)

    router = (shape.hidden + shape.router_bias + shape.expert_biases) * shape.experts
    expert_biases = shape.expert_biases * ((1 + shape.gated) * shape.expert_ffn + shape.hidden)
    return LayerParameters(
        dense=attention + feed_forward(shape.ffn),
        mixture=attention + feed_forward(shape.shared_ffn) + router,
        routed=shape.experts * (feed_forward_parameters(shape, shape.expert_ffn) + expert_biases),
    )


def table_parameters(shape: Shape, tp: Array = ONE) -> Array:
    """Parameters of the input embedding, without positions, or of the output head on one of so many tensor ranks."""
    return shape.hidden * np.ceil(shape.vocab / tp)


def position_parameters(shape: Shape) -> Array:
    """Parameters of learned positions, which every tensor rank holds whole."""
    return shape.hidden * shape.positions


def active_parameters(shape: Shape) -> Array:
    """Parameters one token is multiplied with: matrices, the output head among them, and norms of layers."""
    mixture_layers = shape.layers - shape.dense_layers
    body = shape.layers * (attention_parameters(shape) + 2 * shape.hidden)
    body = body + shape.dense_layers * feed_forward_parameters(shape, shape.ffn)
    width = shape.shared_ffn + shape.top_k * shape.expert_ffn
    body = body + mixture_layers * (feed_forward_parameters(shape, width) + shape.hidden * shape.experts)
    if shape.any_predictions:
        wide = pick(shape.routes, feed_forward_parameters(shape, width) + shape.hidden * shape.experts, 0.0)
        layer = attention_parameters(shape) + pick(shape.routes, wide, feed_forward_parameters(shape, shape.ffn))
        layer = layer + projection_parameters(shape) + table_parameters(shape) + 2 * shape.hidden
        body = body + shape.predictions * layer
    return body + table_parameters(shape)


def projection_parameters(shape: Shape) -> Array:
    """Of the matrix that joins hidden states and embeddings in a prediction layer, whole on every tensor rank."""
    return 2 * shape.hidden**2


def attention_width(shape: Shape) -> Array:
    """Mean of the widths of queries with keys and of values, over all heads."""
    latent = shape.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim) / 2
    return pick(shape.is_latent, latent, shape.heads * shape.head_dim)


def seen_fraction(shape: Shape, sequence: Array) -> Array:
    """Of all pairs of a query and a key before it, those that layers compute, as a mean over layers: 1 without windows.
    Query i sees min(i, window) keys."""
    window = np.minimum(np.maximum(shape.window, 1.0), sequence)
    seen = window * (2 * sequence + 1 - window) / (sequence * (sequence + 1))
    return 1 - shape.windowed * (1 - seen)


def model_flops_per_token(shape: Shape, sequence: Array, causal: bool = False) -> Array:
    """Forward and backward arithmetic of one token, without recomputation; attention in full or its causal half."""
    layers = shape.layers + shape.predictions
    attention = 12 * layers * attention_width(shape) * sequence * (0.5 if causal else 1.0)
    if shape.any_windows:
        attention = attention * seen_fraction(shape, sequence)
    return 6 * active_parameters(shape) + attention


COOL, WARM = 0.58, 0.7
"""Fraction of a layer's time that multiplications take: below the first nothing limits their power, at the second their
rate was measured."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of one micro-batch on one rank, without communication."""

    dense_forward: Array
    """One layer without experts."""
    dense_backward: Array
    mixture_forward: Array
    """One layer with experts."""
    mixture_backward: Array
    attention_forward: Array
    """The attention core alone, which selective recomputation repeats."""
    attention_backward: Array
    light_forward: Array
    """What lies between multiplications and attention, which this program's selective recomputation repeats."""
    light_mixture: Array
    """… in a layer with experts."""
    embedding: Array
    """The input embedding, forward and backward."""
    head_forward: Array
    head_backward: Array
    attention_columns: Array
    """The weight gradients of queries, keys and values (MLA: of the up-projections), under which their input gradient
    can be summed."""
    feed_columns: Array
    """… of gate and up."""
    shared_columns: Array
    """… of those of shared experts."""
    projection: Array
    """What joins hidden states and embeddings in a prediction layer, forward; backward takes twice that."""


@dataclass(frozen=True)
class _Rates:
    """What one accelerator does per second in one precision."""

    linear: float
    plain: float
    """Multiplications that stay in 16 bits whatever the precision."""
    cast: float
    """Bytes per input element to convert before an fp8 matmul."""
    floor: float
    narrow: float
    bandwidth: float


def _rates(chip: Chip, engine: Engine, precision: str) -> _Rates:
    wide = "float32" if precision == "float32" else "bf16"
    plain = chip.peak[wide] * chip.linear_efficiency.get(wide, chip.linear_efficiency["bf16"]) / engine.linear_scale
    low = precision in ("fp8", "fp4") and precision in chip.peak
    linear = chip.peak[precision] * chip.linear_efficiency[precision] / engine.linear_scale if low else plain
    linear = linear / engine.fp8_slower if low else linear
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    return _Rates(linear, plain, engine.cast_traffic if low else 0.0, chip.kernel_floor, chip.narrow, bandwidth)


def _multiply(
    rates: _Rates, rows: Array, inner: Array, columns: Array, wide: bool = False, again: bool = False
) -> Array:
    """Seconds of one matrix multiplication rows × inner by inner × columns. `again`: its rows are those of another one
    too, converted with that."""
    rate = rates.plain if wide else rates.linear
    smallest = np.minimum(np.minimum(rows, inner), columns)
    arithmetic = 2 * rows * inner * columns / rate * (1 + rates.narrow / np.maximum(smallest, 1))
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    cast = 0.0 if wide or again else rates.cast * rows * inner / rates.bandwidth
    return rates.floor + np.maximum(arithmetic, moved / rates.bandwidth) + cast


def _projections(rates: _Rates, shape: Shape, rows: Array, tp: Array, apart: bool, parts: Array) -> Array:
    """The multiplications of an attention block. `apart`: each by itself. `parts`: in how many tokens are split where
    latents are made."""
    width, kv = shape.heads * shape.head_dim / tp, np.maximum(shape.kv_heads / tp, 1) * shape.head_dim
    if apart:
        inputs = _multiply(rates, rows, shape.hidden, width)
        inputs = inputs + 2 * _multiply(rates, rows, shape.hidden, kv, again=True)
    else:
        inputs = _multiply(rates, rows, shape.hidden, width + 2 * kv)
    plain = inputs + _multiply(rates, rows, width, shape.hidden)
    if not shape.any_latent:
        return plain
    heads = shape.heads / tp
    rank = np.maximum(shape.q_rank, 1)
    latent = (
        _multiply(rates, rows / parts, shape.hidden, rank)
        + _multiply(rates, rows, rank, heads * (shape.nope_dim + shape.rope_dim))
        + _multiply(rates, rows / parts, shape.hidden, shape.kv_rank + shape.rope_dim)
        + _multiply(rates, rows, shape.kv_rank, heads * (shape.nope_dim + shape.v_dim))
        + _multiply(rates, rows, heads * shape.v_dim, shape.hidden)
    )
    return pick(shape.is_latent, latent, plain)


def _feed_forward(
    rates: _Rates, shape: Shape, rows: Array, width: Array, wide: bool = False, apart: bool = False
) -> Array:
    if apart:
        up = _multiply(rates, rows, shape.hidden, width, wide)
        up = up + shape.gated * _multiply(rates, rows, shape.hidden, width, wide, again=True)
    else:
        up = _multiply(rates, rows, shape.hidden, (1 + shape.gated) * width, wide)
    return up + _multiply(rates, rows, width, shape.hidden, wide)


ROUNDED, ROUNDED_BESIDE = 3.0, 1.0
"""Bytes moved for each number that becomes fp8; where what makes it in 16 bits writes it in fp8 too."""


def _expert(rates: _Rates, shape: Shape, rows: Array, engine: Engine, travel: NDArray[np.bool_]) -> Array:
    """One expert's matmuls, of which there are three times as many with the backward pass: this engine multiplies them
    in 16 bits whatever the precision, or, where asked to, two of three in fp8. `travel`: rows come from other ranks."""
    plain = _feed_forward(rates, shape, rows, shape.expert_ffn, wide=engine.own_collectives)
    if not engine.experts_in_fp8:
        return plain
    # Weights, and rows that came from other ranks, are rounded once for each pass by kernels of their own: read in 2
    # bytes and written in one. Whatever the linears' scales are, these are rows'.
    narrow = replace(rates, cast=ROUNDED_BESIDE, linear=rates.linear * engine.fp8_slower)
    moved = ROUNDED * (2 + shape.gated) * shape.hidden * shape.expert_ffn
    moved = moved + pick(travel, (ROUNDED - ROUNDED_BESIDE) * rows * shape.hidden, 0.0)
    return (2 * (_feed_forward(narrow, shape, rows, shape.expert_ffn) + moved / rates.bandwidth) + plain) / 3


def _heated(engine: Engine, linear: Array, rest: Array) -> Array:
    """Seconds of multiplications forward and backward, of which three times `linear`, beside the rest of a layer."""
    if not engine.heat:
        return linear
    fraction = 3 * linear / (3 * linear + rest)
    return np.asarray(linear * (1 + engine.heat * (np.maximum(fraction, COOL) - WARM)))


GATHER = CONTEXT_METHODS.index("allgather")


def added_blocks(jobs: Jobs) -> Array:
    """Blocks of attention whose outputs a ring adds to that of the first."""
    return np.where(jobs.cp_method == GATHER, 0.0, jobs.cp / jobs.cp_inner - 1)


def _attention(shape: Shape, jobs: Jobs, chip: Chip, engine: Engine, precision: str) -> tuple[Array, Array]:
    """The attention core, forward and backward."""
    full = 4 * jobs.tokens * jobs.sequence * attention_width(shape) / jobs.tp
    if shape.any_windows and engine.own_collectives:
        full = full * seen_fraction(shape, jobs.sequence)
    peak = chip.peak["bf16"]
    if engine.fused_attention:
        width = pick(shape.is_latent, shape.nope_dim + shape.rope_dim, shape.head_dim)
        scale = engine.attention_scale * (1 + engine.attention_narrow * np.maximum(128 / width - 1, 0.0))
        scale = scale * pick(shape.is_latent, engine.attention_latent, 1.0)
        forward = 0.5 * full / (peak * chip.attention_forward) * scale + chip.kernel_floor
        scale = scale * engine.attention_back
        backward = 1.25 * full / (peak * chip.attention_backward) * scale + 2 * chip.kernel_floor
        if engine.block_traffic:
            moved = engine.block_traffic * added_blocks(jobs) * jobs.tokens * attention_width(shape) / jobs.tp
            added = moved / (chip.memory_bandwidth * chip.memory_efficiency)
            forward, backward = forward + added, backward + added
        return forward, backward
    scores = jobs.tokens * jobs.sequence * shape.heads / jobs.tp
    wide = "float32" if precision == "float32" else "bf16"
    batched = full / (chip.peak[wide] * chip.linear_efficiency.get(wide, chip.linear_efficiency["bf16"]) * 0.6)
    moved = scores / (chip.memory_bandwidth * chip.memory_efficiency)
    floor = 6 * chip.kernel_floor
    return (
        batched + 14 * moved * engine.attention_scale + floor,
        (2 * batched + 22 * moved * engine.attention_scale) * engine.attention_back + floor,
    )


@recent
def kernels(shape: Shape, jobs: Jobs, chip: Chip, engine: Engine, precision: str) -> Kernels:
    """Seconds of every part of one micro-batch on one rank."""
    columns = (jobs.tp, jobs.ep, *_decides_tokens(jobs), jobs.sequence_parallel, adds_nothing(jobs))
    columns += (adds_nothing(jobs, routed=True),)
    if engine.block_traffic:
        columns += (added_blocks(jobs),)
    return each_once(shape, jobs, columns, lambda some, _: _kernels(shape, some, chip, engine, precision))


def _decides_tokens(jobs: Jobs) -> tuple[Array, ...]:
    """The tokens of a micro-batch on a rank, or, where they are no whole number, what they follow from."""
    return (jobs.cp, jobs.micro_batch) if np.any(jobs.tokens % 1) else (jobs.tokens,)


def _kernels(shape: Shape, jobs: Jobs, chip: Chip, engine: Engine, precision: str) -> Kernels:
    rates = _rates(chip, engine, precision)
    rows, tp = jobs.tokens, jobs.tp
    split = np.where(jobs.sequence_parallel > 0, tp, 1.0)
    parts = split if engine.own_collectives else np.ones(())
    projections = _projections(rates, shape, rows, tp, engine.apart, parts)
    attention_forward, attention_backward = _attention(shape, jobs, chip, engine, precision)
    element = engine.hidden_traffic * rows * shape.hidden / split / rates.bandwidth
    if shape.any_latent:
        heads = rows * shape.heads / tp * (2 * (shape.nope_dim + shape.rope_dim) + shape.v_dim)
        element = element + pick(shape.is_latent, engine.latent_traffic * heads / rates.bandwidth, 0.0)
    inner = engine.ffn_traffic * rows * (1 + shape.gated) * shape.ffn / tp / rates.bandwidth
    linear = projections + _feed_forward(rates, shape, rows, shape.ffn / tp, apart=engine.apart)
    rest = element + inner
    whole = engine.whole_traffic * rows * shape.hidden * (1 - 1 / split) / rates.bandwidth
    linear = _heated(engine, linear, attention_forward + attention_backward + 2.6 * rest + whole)
    dense_forward = linear + attention_forward + rest
    dense_backward = 2 * linear + attention_backward + 1.6 * rest + whole
    mixture_forward, mixture_backward, light_mixture = dense_forward, dense_backward, rest
    if shape.any_routes:
        routed = rows * shape.top_k
        local = np.maximum(shape.experts / jobs.ep, 1)
        # Each of the local experts multiplies its own part of the copies; the kernel does them in one launch.
        per_expert = routed / tp / local
        copies = routed / tp
        each = _expert(rates, shape, per_expert, engine, jobs.ep > 1) - 2 * rates.floor
        slower = engine.grouped_fp8 if rates.linear != rates.plain and not engine.own_collectives else 1.0
        grouped = engine.grouped_scale * slower * local * each + 2 * rates.floor
        shared = _feed_forward(rates, shape, rows, shape.shared_ffn / tp)
        shared = pick(np.asarray(shape.shared_ffn > 0), shared, 0.0)
        router = _multiply(rates, rows / split, shape.hidden, np.maximum(shape.experts, 1), wide=True)
        linear = projections + grouped + shared + router
        width = copies * shape.expert_ffn + rows * shape.shared_ffn / tp
        rest = element + engine.ffn_traffic * (1 + shape.gated) * width / rates.bandwidth
        rest = rest + engine.routing_traffic * copies * shape.hidden / rates.bandwidth
        light_mixture = rest + engine.routing_floor
        ahead, back = (engine.mixture_attention * each for each in (attention_forward, attention_backward))
        linear = _heated(engine, linear, ahead + back + 2.6 * rest + 2 * engine.routing_floor + whole)
        mixture_forward = pick(shape.routes, linear + ahead + rest + engine.routing_floor, dense_forward)
        backward = 2 * linear + back + 1.6 * rest + engine.routing_floor + whole
        mixture_backward = pick(shape.routes, backward, dense_backward)
    dense_backward, mixture_backward, table = _with_gradients(
        shape, jobs, engine, rates, dense_backward, mixture_backward
    )
    head = _multiply(rates, rows, shape.hidden, shape.vocab / tp, wide=True)
    loss = engine.loss_traffic * rows * shape.vocab / tp / rates.bandwidth
    embedding = 12 * rows * shape.hidden / rates.bandwidth
    return Kernels(
        dense_forward,
        dense_backward,
        mixture_forward,
        mixture_backward,
        attention_forward,
        attention_backward,
        element + inner,
        light_mixture,
        embedding,
        head + 0.5 * loss,
        2 * head + 0.5 * loss + table,
        *_columns(rates, shape, rows, tp),
        _multiply(rates, rows / split, 2 * shape.hidden, shape.hidden),
    )


def adds_nothing(jobs: Jobs, routed: bool = False) -> Array:
    """1 where gradients stay as the one backward pass leaves them. `routed`: those of routed experts, which so many
    ranks hold as are left of the others."""
    holders = jobs.expert_copies if routed else jobs.copies * jobs.tp
    return np.asarray((holders <= 1) & (jobs.micro_batches == 1), dtype=np.float64)


def _columns(rates: _Rates, shape: Shape, rows: Array, tp: Array) -> tuple[Array, Array, Array]:
    """A weight gradient takes as long as the multiplication forward."""
    width, kv = shape.heads * shape.head_dim / tp, np.maximum(shape.kv_heads / tp, 1) * shape.head_dim
    attention = _multiply(rates, rows, shape.hidden, width + 2 * kv)
    if shape.any_latent:
        heads, rank = shape.heads / tp, np.where(shape.q_rank > 0, shape.q_rank, shape.hidden)
        up = _multiply(rates, rows, rank, heads * (shape.nope_dim + shape.rope_dim))
        up = up + _multiply(rates, rows, shape.kv_rank, heads * (shape.nope_dim + shape.v_dim))
        attention = pick(shape.is_latent, up, attention)
    feed, shared = (
        _multiply(rates, rows, shape.hidden, (1 + shape.gated) * each / tp) for each in (shape.ffn, shape.shared_ffn)
    )
    return attention, feed, pick(np.asarray(shape.shared_ffn > 0), shared, 0.0)


def _with_gradients(
    shape: Shape, jobs: Jobs, engine: Engine, rates: _Rates, dense: Array, mixture: Array
) -> tuple[Array, Array, Array]:
    """Backward passes of layers with their gradients added to others, and what that takes for the head."""
    each, table = layer_parameters(shape, jobs.tp), table_parameters(shape, jobs.tp)
    moved = np.where(adds_nothing(jobs), 0.0, engine.accumulate_traffic / rates.bandwidth)
    moved_routed = np.where(adds_nothing(jobs, routed=True), 0.0, engine.accumulate_traffic / rates.bandwidth)
    routed = moved * each.mixture + moved_routed * each.routed / np.maximum(jobs.ep, 1)
    return dense + moved * each.dense, mixture + routed, moved * table
