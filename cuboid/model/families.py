"""What Hugging Face calls the parameters of each family, and what its module of that family always computes.

To add a family: a `WeightNames` here and its line in `FAMILIES`; its name in `Family` (spec/model.py) with what its
tables need not say (spec/load.py); how its `config.json` is read and written (spec/huggingface.py and
spec/huggingface_config.py). A family whose tensors lie otherwise than as rows of one tensor, like experts of which each
is a tensor, also needs an `Origin` that says so (huggingface.py). The tests in tests/model take it from there: add a
case to `CASES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cuboid.errors import UserError
from cuboid.spec.model import ModelSpec

LLAMA_NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.key": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.feed_forward_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.up": "model.layers.*.mlp.up_proj",
    "layers.*.feed_forward.down": "model.layers.*.mlp.down_proj",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}

GPT2_NAMES = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "layers.*.attention_norm": "transformer.h.*.ln_1",
    "layers.*.attention.query": "transformer.h.*.attn.c_attn",
    "layers.*.attention.key": "transformer.h.*.attn.c_attn",
    "layers.*.attention.value": "transformer.h.*.attn.c_attn",
    "layers.*.attention.output": "transformer.h.*.attn.c_proj",
    "layers.*.feed_forward_norm": "transformer.h.*.ln_2",
    "layers.*.feed_forward.up": "transformer.h.*.mlp.c_fc",
    "layers.*.feed_forward.down": "transformer.h.*.mlp.c_proj",
    "head.norm": "transformer.ln_f",
    "head.output": "lm_head",
}

LLAMA_LIKE: dict[str, object] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """How the checkpoints of one family are written."""

    names: Mapping[str, str]
    """Our module -> theirs; * is the layer's number."""
    fixed: Mapping[str, object]
    """What their module always has; a model that differs is another function there."""
    prefix: str = "model."
    """What all names but the head's begin with; checkpoints of the bare model lack it."""
    transposed: tuple[str, ...] = ()
    """Endings of the tensors whose weight is held as (in, out)."""
    joined: str = ""
    """The tensor in which queries, keys and values lie one below the other."""
    ignored: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    """What older checkpoints hold besides weights: rotary frequencies and causal masks, which follow from the shape.
    No other tensor of a checkpoint is left unread."""
    one_bias_switch: bool = False
    """Whether one switch, attention_bias, is for the biases of queries, keys, values and output together."""

    def fixed_for(self, model: ModelSpec) -> dict[str, object]:
        fixed = dict(self.fixed)
        if self.one_bias_switch:
            fixed["output_bias"] = model.qkv_bias
        if self.joined:
            fixed |= {"kv_heads": model.heads, "head_dim": model.hidden // model.heads}
        return fixed


FAMILIES: dict[str, WeightNames] = {
    "llama": WeightNames(names=LLAMA_NAMES, fixed=LLAMA_LIKE | {"qk_norm": False}, one_bias_switch=True),
    "qwen2": WeightNames(
        names=LLAMA_NAMES,
        fixed=LLAMA_LIKE | {"qk_norm": False, "qkv_bias": True, "output_bias": False, "mlp_bias": False},
    ),
    "qwen3": WeightNames(
        names=LLAMA_NAMES, fixed=LLAMA_LIKE | {"qk_norm": True, "mlp_bias": False}, one_bias_switch=True
    ),
    "gpt2": WeightNames(
        names=GPT2_NAMES,
        fixed={
            "norm": "layernorm",
            "positions": "learned",
            "activation": "gelu",
            "qk_norm": False,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        joined=".c_attn.",
        ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    ),
}


def check_family(model: ModelSpec) -> WeightNames:
    """The names of the model's family, if Hugging Face's module of it computes what the model computes."""
    for name in ("mixture", "latent"):
        if getattr(model, name) is not None:
            raise UserError(f"model.{name} has no weight map yet; use a dense model without it")
    family = FAMILIES[model.family]
    for name, value in family.fixed_for(model).items():
        ours = getattr(model, name)
        if ours != value:
            raise UserError(
                f"model.{name}={_show(ours)} cannot be written as family={model.family}; use {name}={_show(value)}"
            )
    return family


def _show(value: object) -> str:
    return str(value).lower()
