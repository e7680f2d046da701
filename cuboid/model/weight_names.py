"""What Hugging Face calls the parameters of each family, and what its module of that family always computes.

To add a family: a `WeightNames` here and its line in `FAMILIES`; its name in `Family` (spec/model.py) with what its
tables need not say (spec/load.py); how its `config.json` is read (spec/huggingface.py) and written
(spec/huggingface_writer.py). The tests in tests/model take it from there: add a case to `CASES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cuboid.errors import UserError
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec

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

MIXTRAL_NAMES = {
    "layers.*.feed_forward.router": "model.layers.*.block_sparse_moe.gate",
    "layers.*.feed_forward.experts.gate": "model.layers.*.block_sparse_moe.experts.#.w1",
    "layers.*.feed_forward.experts.up": "model.layers.*.block_sparse_moe.experts.#.w3",
    "layers.*.feed_forward.experts.down": "model.layers.*.block_sparse_moe.experts.#.w2",
}

EXPERT_NAMES = {
    "layers.*.feed_forward.router": "model.layers.*.mlp.gate",
    "layers.*.feed_forward.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.feed_forward.experts.gate": "model.layers.*.mlp.experts.#.gate_proj",
    "layers.*.feed_forward.experts.up": "model.layers.*.mlp.experts.#.up_proj",
    "layers.*.feed_forward.experts.down": "model.layers.*.mlp.experts.#.down_proj",
    "layers.*.feed_forward.shared.gate": "model.layers.*.mlp.shared_experts.gate_proj",
    "layers.*.feed_forward.shared.up": "model.layers.*.mlp.shared_experts.up_proj",
    "layers.*.feed_forward.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
}

LATENT_NAMES = {
    "layers.*.attention.query_down": "model.layers.*.self_attn.q_a_proj",
    "layers.*.attention.query_down_norm": "model.layers.*.self_attn.q_a_layernorm",
    "layers.*.attention.query_up": "model.layers.*.self_attn.q_b_proj",
    "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.key_value_down": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "layers.*.attention.key_value_down_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "layers.*.attention.key_value_up": "model.layers.*.self_attn.kv_b_proj",
}

PREDICTION_NAMES = {
    "layers.*.embedding_norm": "model.layers.*.enorm",
    "layers.*.hidden_norm": "model.layers.*.hnorm",
    "layers.*.projection": "model.layers.*.eh_proj",
    "layers.*.head_norm": "model.layers.*.shared_head.norm",
}
PREDICTION_COPIES = {"embed_tokens.weight": "embedding.tokens.weight", "shared_head.head.weight": "head.output.weight"}
"""What each of their prediction layers holds a copy of."""

GEMMA_NAMES = LLAMA_NAMES | {
    "layers.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.feed_forward_post_norm": "model.layers.*.post_feedforward_layernorm",
}

OLMO_NAMES = LLAMA_NAMES | {
    "layers.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward_post_norm": "model.layers.*.post_feedforward_layernorm",
}

GPT_OSS_NAMES = LLAMA_NAMES | {
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.feed_forward.router": "model.layers.*.mlp.router",
    "layers.*.feed_forward.router.logit_bias": "model.layers.*.mlp.router.bias",
    "layers.*.feed_forward.experts.gate": "model.layers.*.mlp.experts.gate_up_proj",
    "layers.*.feed_forward.experts.up": "model.layers.*.mlp.experts.gate_up_proj",
    "layers.*.feed_forward.experts.down": "model.layers.*.mlp.experts.down_proj",
    "layers.*.feed_forward.experts.gate_bias": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.feed_forward.experts.up_bias": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.feed_forward.experts.down_bias": "model.layers.*.mlp.experts.down_proj_bias",
}

NO_BIASES: dict[str, object] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
PLAIN_ROUTING: dict[str, object] = {
    "scoring": "softmax",
    "scaling": 1.0,
    "groups": 1,
    "shared_experts": 0,
    "first_dense_layers": 0,
    "router_bias": False,
    "capacity_factor": 0.0,
    "biases": False,
}

PLAIN: dict[str, object] = {
    "windows": (),
    "sinks": False,
    "norms": "before",
    "unit_norms": False,
    "window_rope_theta": 0.0,
    "embedding_scale": 1.0,
    "query_scale": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "qk_norm_whole": False,
    "prediction_layers": 0,
}
"""What a family has that does not say otherwise."""

LLAMA_LIKE: dict[str, object] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}


OLMO_LIKE: dict[str, object] = {"norms": "after", "qk_norm": True, "qk_norm_whole": True, "mlp_bias": False}


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """How the checkpoints of one family are written."""

    names: Mapping[str, str]
    """Our module -> theirs; * is the layer's number. An expert's parameter -> their module of it; # is its number."""
    fixed: Mapping[str, object]
    """What their module always has; a model that differs is another function there."""
    prefix: str = "model."
    """What all names but the head's begin with; checkpoints of the bare model lack it."""
    transposed: tuple[str, ...] = ()
    """Endings of the tensors whose weight is held as (in, out)."""
    fused: str = ""
    """The tensor in which queries, keys and values lie one below the other."""
    ignored: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    """What older checkpoints hold besides weights: rotary frequencies and causal masks, which follow from the shape.
    No other tensor of a checkpoint is left unread."""
    mixture: Mapping[str, object] | None = None
    """What its mixture always has; None: it has no experts."""
    latent: bool = False
    """Whether it has latent attention."""
    one_bias_switch: bool = False
    """Whether one switch, attention_bias, is for the biases of queries, keys, values and output together."""
    free: tuple[str, ...] = ()
    """Of `PLAIN`, what a model of this family may have as it likes."""
    stacks: bool = False
    """Whether one tensor holds a matrix of all experts, and gate and up alternate in it."""

    def fixed_for(self, model: ModelSpec) -> dict[str, object]:
        fixed = {**{name: value for name, value in PLAIN.items() if name not in self.free}, **self.fixed}
        if "embedding_scale" in self.free:
            fixed["embedding_scale"] = model.hidden**0.5
        if self.one_bias_switch:
            fixed["output_bias"] = model.qkv_bias
        if self.fused:
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
    "mixtral": WeightNames(
        names=LLAMA_NAMES | MIXTRAL_NAMES,
        fixed=LLAMA_LIKE | NO_BIASES | {"qk_norm": False},
        mixture=PLAIN_ROUTING | {"normalized": True},
    ),
    "qwen3_moe": WeightNames(
        names=LLAMA_NAMES | EXPERT_NAMES,
        fixed=LLAMA_LIKE | {"qk_norm": True, "mlp_bias": False},
        mixture=PLAIN_ROUTING,
        one_bias_switch=True,
    ),
    "deepseek_v3": WeightNames(
        names=LLAMA_NAMES | EXPERT_NAMES | LATENT_NAMES | PREDICTION_NAMES,
        fixed=LLAMA_LIKE | NO_BIASES | {"qk_norm": False},
        mixture={"scoring": "sigmoid", "router_bias": True, "capacity_factor": 0.0, "biases": False},
        latent=True,
        free=("prediction_layers",),
    ),
    "mistral": WeightNames(names=LLAMA_NAMES, fixed=LLAMA_LIKE | NO_BIASES | {"qk_norm": False}, free=("windows",)),
    "gemma2": WeightNames(
        names=GEMMA_NAMES,
        fixed=LLAMA_LIKE
        | {"activation": "geglu", "norms": "both", "unit_norms": True, "qk_norm": False, "mlp_bias": False},
        one_bias_switch=True,
        free=("windows", "query_scale", "embedding_scale", "attention_softcap", "logit_softcap"),
    ),
    "gemma3_text": WeightNames(
        names=GEMMA_NAMES,
        fixed=LLAMA_LIKE
        | {"activation": "geglu", "norms": "both", "unit_norms": True, "qk_norm": True, "mlp_bias": False},
        one_bias_switch=True,
        free=("windows", "window_rope_theta", "query_scale", "embedding_scale", "logit_softcap"),
    ),
    "olmo2": WeightNames(
        names=OLMO_NAMES,
        fixed=LLAMA_LIKE | OLMO_LIKE,
        one_bias_switch=True,
    ),
    "olmo3": WeightNames(
        names=OLMO_NAMES,
        fixed=LLAMA_LIKE | OLMO_LIKE,
        one_bias_switch=True,
        free=("windows", "window_rope_theta"),
    ),
    "gpt_oss": WeightNames(
        names=GPT_OSS_NAMES,
        fixed=LLAMA_LIKE | {"activation": "clamped_swiglu", "sinks": True, "qk_norm": False, "mlp_bias": False},
        mixture=PLAIN_ROUTING | {"normalized": True, "biases": True},
        one_bias_switch=True,
        free=("windows",),
        stacks=True,
    ),
    "gpt2": WeightNames(
        names=GPT2_NAMES,
        fixed={
            "norm": "layernorm",
            "positions": "learned",
            "activation": "gelu",
            "rope_factor": 1.0,
            "qk_norm": False,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        fused=".c_attn.",
        ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    ),
}


def check_family(model: ModelSpec) -> WeightNames:
    """The names of the model's family, if Hugging Face's module of it computes what the model computes."""
    if isinstance(model, PythonModelSpec):
        raise UserError(
            f"model={model.name} is one's own, and no family of Hugging Face; "
            "read its weights with cuboid.load_checkpoint"
        )
    family = FAMILIES[model.family]
    for name, wanted in (("mixture", family.mixture is not None), ("latent", family.latent)):
        if (getattr(model, name) is not None) != wanted:
            raise UserError(
                f"model.{name} {'is missing in' if wanted else 'has no place in'} family={model.family}; "
                f"use a family {'without' if wanted else 'with'} it"
            )
    _check_fixed(model, "model", model.family, family.fixed_for(model))
    _check_fixed(model.mixture, "mixture", model.family, family.mixture or {})
    return family


def _check_fixed(instance: object, where: str, family: str, fixed: Mapping[str, object]) -> None:
    for name, value in fixed.items():
        ours = getattr(instance, name)
        if ours != value:
            raise UserError(
                f"{where}.{name}={_show(ours)} cannot be written as family={family}; use {name}={_show(value)}"
            )


def _show(value: object) -> str:
    return str(value).lower()
