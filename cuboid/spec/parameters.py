"""The parameters of a model by name and shape, in the order the modules of `cuboid.model` hold them, and the units they
lie in: a block, an embedding, a head.

The table of tokens is a unit of its own, so that first and last stage lay out a tied one alike; routed experts are,
because other ranks hold the same ones; what balances a router is: it keeps its precision and has no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
