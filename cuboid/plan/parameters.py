"""The parameters of a model by name and shape, in the order the modules of `cuboid.model` hold them, and the units they
lie in: a block, an embedding, a head, and a tied embedding for itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cuboid.spec.model import ModelSpec

TIED = "embedding.tokens.weight"
"""The unit, and the parameter in it, that the embedding and a tied head share."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class UnitShapes:
    """Parameters that are gathered, released and reduced together."""

    name: str
    shapes: Shapes
    uses: int = 1
    """How many times one micro-batch uses the unit on its rank (twice when a tied embedding is first and last)."""


def _norm(model: ModelSpec, name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if model.norm == "layernorm" else {})}


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _attention(model: ModelSpec, name: str) -> Shapes:
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = _linear(f"{name}.query", model.hidden, query, model.qkv_bias)
    shapes |= _linear(f"{name}.key", model.hidden, key_value, model.qkv_bias)
    shapes |= _linear(f"{name}.value", model.hidden, key_value, model.qkv_bias)
    shapes |= _linear(f"{name}.output", query, model.hidden, model.output_bias)
    if model.qk_norm:
        shapes |= _norm(model, f"{name}.query_norm", model.head_dim) | _norm(model, f"{name}.key_norm", model.head_dim)
    return shapes


def _feed_forward(model: ModelSpec, name: str) -> Shapes:
    inner = ("gate", "up") if model.activation == "swiglu" else ("up",)
    shapes: Shapes = {}
    for matrix in inner:
        shapes |= _linear(f"{name}.{matrix}", model.hidden, model.ffn, model.mlp_bias)
    return shapes | _linear(f"{name}.down", model.ffn, model.hidden, model.mlp_bias)


def block_shapes(model: ModelSpec, layer: int) -> Shapes:
    name = f"layers.{layer}"
    return {
        **_norm(model, f"{name}.attention_norm", model.hidden),
        **_attention(model, f"{name}.attention"),
        **_norm(model, f"{name}.feed_forward_norm", model.hidden),
        **_feed_forward(model, f"{name}.feed_forward"),
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
    found = []
    for name, shapes in segments:
        if model.tie_embeddings:
            shapes.pop(TIED, None)
        if shapes:
            found.append(UnitShapes(name, shapes))
    if model.tie_embeddings and (first or last):
        found.append(UnitShapes(TIED, {TIED: (model.vocab, model.hidden)}, uses=first + last))
    return found
