"""Parameters and arithmetic of a model, per layer: dense, grouped-query, mixture of experts, latent attention."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.inputs import Array, Shape


def attention_parameters(shape: Shape) -> Array:
    """Matrix parameters of one attention block."""
    query, key_value = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    plain = shape.hidden * (2 * query + key_value)
    query_width = shape.heads * (shape.nope_dim + shape.rope_dim)
    down = np.where(shape.q_rank > 0, (shape.hidden + query_width) * shape.q_rank, shape.hidden * query_width)
    up = shape.kv_rank * shape.heads * (shape.nope_dim + shape.v_dim)
    latent = down + shape.hidden * (shape.kv_rank + shape.rope_dim) + up + shape.heads * shape.v_dim * shape.hidden
    return np.where(shape.latent > 0, latent, plain)


def feed_forward_parameters(shape: Shape, width: Array) -> Array:
    """Matrix parameters of one feed-forward block of some width."""
    return (2 + shape.gated) * shape.hidden * width


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer of each kind, split by what tensor and expert parallelism do to them."""

    dense: Array
    """A layer without experts."""
    mixture: Array
    """A layer with experts, without the routed experts themselves."""
    routed: Array
    """All routed experts of one layer."""


def layer_parameters(shape: Shape) -> LayerParameters:
    """Parameters of a layer of each kind."""
    norms = 2 * shape.hidden
    attention = attention_parameters(shape) + norms
    shared = feed_forward_parameters(shape, shape.shared_ffn) + shape.hidden * shape.experts
    return LayerParameters(
        dense=attention + feed_forward_parameters(shape, shape.ffn),
        mixture=attention + shared,
        routed=shape.experts * feed_forward_parameters(shape, shape.expert_ffn),
    )


def embedding_parameters(shape: Shape) -> Array:
    """Parameters of the input embedding, without positions."""
    return shape.hidden * shape.vocab


def position_parameters(shape: Shape) -> Array:
    """Parameters of learned positions, which every tensor rank holds whole."""
    return shape.hidden * shape.positions


def head_parameters(shape: Shape) -> Array:
    """Parameters of the output head, whether or not it shares the embedding's."""
    return shape.hidden * shape.vocab


def total_parameters(shape: Shape) -> Array:
    """All parameters, a tied embedding once (biases, a thousandth of the whole, are left out)."""
    layer = layer_parameters(shape)
    mixture_layers = shape.layers - shape.dense_layers
    body = shape.dense_layers * layer.dense + mixture_layers * (layer.mixture + layer.routed)
    tables = embedding_parameters(shape) + np.where(shape.tied > 0, 0.0, head_parameters(shape))
    return body + tables + position_parameters(shape) + shape.hidden


def active_parameters(shape: Shape) -> Array:
    """Parameters in the matrices one token is multiplied with, the output head among them."""
    layer = layer_parameters(shape)
    mixture_layers = shape.layers - shape.dense_layers
    routed = shape.top_k * feed_forward_parameters(shape, shape.expert_ffn)
    body = shape.dense_layers * layer.dense + mixture_layers * (layer.mixture + routed)
    return body + head_parameters(shape)


def attention_width(shape: Shape) -> Array:
    """Mean of the widths of queries with keys and of values, over all heads."""
    latent = shape.heads * (shape.nope_dim + shape.rope_dim + shape.v_dim) / 2
    return np.where(shape.latent > 0, latent, shape.heads * shape.head_dim)


def model_flops_per_token(shape: Shape, sequence: Array, causal: bool = False) -> Array:
    """Forward and backward arithmetic of one token, without recomputation; attention in full or its causal half."""
    attention = 12 * shape.layers * attention_width(shape) * sequence * (0.5 if causal else 1.0)
    return 6 * active_parameters(shape) + attention
