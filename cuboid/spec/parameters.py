"""The parameters of a model by name, shape and split, in the order the modules of `cuboid.model` hold them, and the
units they lie in: a block, an embedding, a head. It says what those modules declare, for those who plan without torch.

The table of tokens is a unit of its own, so that first and last stage lay out a tied one alike; routed experts are,
because other ranks hold the same ones; what balances a router is: it keeps its precision and has no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cuboid.spec.model import LatentAttentionSpec, MixtureSpec, ModelSpec
from cuboid.spec.sharding import COLUMN, EXPERT, PARTIAL, REPLICATED, ROW, VOCABULARY, Declared, Split, heads

TIED = "embedding.tokens.weight"
"""The unit, and the parameter in it, that the embedding and a tied head share."""

EXPERTS = ".experts"
BALANCE = ".balance"

Table = dict[str, Declared]


@dataclass(frozen=True)
class DeclaredUnit:
    """Parameters that are gathered, released and reduced together."""

    name: str
    parameters: Table
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


def _attention(model: ModelSpec, name: str) -> Table:
    if model.latent is not None:
        return _latent_attention(model, model.latent, name)
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    table = _linear(f"{name}.query", model.hidden, query, model.qkv_bias, COLUMN)
    table |= _linear(f"{name}.key", model.hidden, key_value, model.qkv_bias, heads(model.kv_heads))
    table |= _linear(f"{name}.value", model.hidden, key_value, model.qkv_bias, heads(model.kv_heads))
    table |= _linear(f"{name}.output", query, model.hidden, model.output_bias, ROW)
    if model.qk_norm:
        for norm in ("query_norm", "key_norm"):
            table |= _norm(model, f"{name}.{norm}", model.head_dim, PARTIAL)
    return table


def _inner(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up") if model.activation == "swiglu" else ("up",)


def _feed_forward(model: ModelSpec, name: str, width: int) -> Table:
    table: Table = {}
    for matrix in _inner(model):
        table |= _linear(f"{name}.{matrix}", model.hidden, width, model.mlp_bias, COLUMN)
    return table | _linear(f"{name}.down", width, model.hidden, model.mlp_bias, ROW)


def _mixture(model: ModelSpec, mixture: MixtureSpec, name: str) -> Table:
    table = _linear(f"{name}.router", model.hidden, mixture.experts, mixture.router_bias, PARTIAL)
    for matrix in _inner(model):
        table[f"{name}.experts.{matrix}"] = Declared((mixture.experts, mixture.expert_ffn, model.hidden), EXPERT)
    table[f"{name}.experts.down"] = Declared((mixture.experts, model.hidden, mixture.expert_ffn), EXPERT)
    return table | (_feed_forward(model, f"{name}.shared", mixture.shared_ffn) if mixture.shared_ffn else {})


def block_parameters(model: ModelSpec, layer: int) -> Table:
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
    segments = [("embedding", embedding_parameters(model))] if first else []
    segments += [(f"layers.{layer}", block_parameters(model, layer)) for layer in layers]
    segments += [("head", head_parameters(model))] if last else []
    found: dict[str, Table] = {}
    uses: dict[str, int] = {}
    for prefix, table in segments:
        members: dict[str, Table] = {}
        for name, declared in table.items():
            members.setdefault(unit_of(prefix, name), {})[name] = declared
        for unit, held in members.items():
            found[unit] = held
            uses[unit] = 0 if unit.endswith(BALANCE) else uses.get(unit, 0) + 1
    return [DeclaredUnit(name, held, uses[name], name.endswith(EXPERTS)) for name, held in found.items()]
