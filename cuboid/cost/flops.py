"""Parameters and arithmetic of a model, per layer: dense, grouped-query, MoE, latent attention."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.communication import ONE
from cuboid.cost.inputs import Array, Shape
from cuboid.cost.reuse import recent


def _query_key_value(shape: Shape, tp: Array) -> tuple[Array, Array]:
    """Numbers of a token's queries, and of its keys and values, on a tensor rank: the latter are split as far as they
    have heads, and the same on several ranks beyond."""
    parts = np.gcd(shape.kv_heads.astype(np.int64), tp.astype(np.int64))
    return shape.heads * shape.head_dim / tp, 2 * shape.kv_heads * shape.head_dim / parts


def attention_parameters(shape: Shape, tp: Array = ONE) -> Array:
    """Matrix parameters of one attention block that a tensor rank holds: matmuls down to a latent are whole."""
    query, key_value = _query_key_value(shape, tp)
    plain = shape.hidden * (2 * query + key_value)
    heads = shape.heads / tp
    query_width = heads * (shape.nope_dim + shape.rope_dim)
    down = np.where(shape.q_rank > 0, (shape.hidden + query_width) * shape.q_rank, shape.hidden * query_width)
    up = shape.kv_rank * heads * (shape.nope_dim + shape.v_dim)
    latent = down + shape.hidden * (shape.kv_rank + shape.rope_dim) + up + heads * shape.v_dim * shape.hidden
    return np.where(shape.latent > 0, latent, plain)


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
    inner = np.where(shape.latent > 0, shape.q_rank + shape.kv_rank, 2 * shape.head_dim * shape.qk_norm)
    attention = attention_parameters(shape, tp) + np.where(shape.latent > 0, 0.0, biases)
    attention = attention + 2 * norm_parameters(shape) + (1 + shape.layernorm) * inner

    def feed_forward(width: Array) -> Array:
        biases = shape.mlp_bias * ((1 + shape.gated) * width / tp + shape.hidden)
        return feed_forward_parameters(shape, width / tp) + np.where(width > 0, biases, 0.0)

    router = (shape.hidden + shape.router_bias) * shape.experts
    return LayerParameters(
        dense=attention + feed_forward(shape.ffn),
        mixture=attention + feed_forward(shape.shared_ffn) + router,
        routed=shape.experts * feed_forward_parameters(shape, shape.expert_ffn),
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
    return body + table_parameters(shape)


def attention_width(shape: Shape) -> Array:
    """Mean of the widths of queries with keys and of values, over all heads."""
    latent = shape.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim) / 2
    return np.where(shape.latent > 0, latent, shape.heads * shape.head_dim)


def model_flops_per_token(shape: Shape, sequence: Array, causal: bool = False) -> Array:
    """Forward and backward arithmetic of one token, without recomputation; attention in full or its causal half."""
    attention = 12 * shape.layers * attention_width(shape) * sequence * (0.5 if causal else 1.0)
    return 6 * active_parameters(shape) + attention
