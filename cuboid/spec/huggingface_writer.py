"""Hugging Face's `config.json`, written from a model."""

from pathlib import Path
from typing import Any

from cuboid.errors import UserError, nearest_numbers, use
from cuboid.readers import read_json
from cuboid.spec.huggingface import READERS
from cuboid.spec.huggingface_parts import (
    DEEPSEEK_KEYS,
    GPT_OSS_KEYS,
    LATENT_KEYS,
    LLAMA3_SCALING,
    MIXTRAL_KEYS,
    QWEN_KEYS,
    SOFTCAPS,
    YARN_SCALING,
)
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec

Config = dict[str, Any]

MODULES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Family, which is also their model_type -> their class."""

MIXTURES = {
    "mixtral": MIXTRAL_KEYS,
    "qwen3_moe": QWEN_KEYS,
    "deepseek_v3": DEEPSEEK_KEYS,
    "gpt_oss": {key: ours for key, ours in GPT_OSS_KEYS.items() if key != "num_experts"},
}
"""Family -> their key -> our field of its mixture."""


def config_from_model(model: ModelSpec) -> Config:
    """Every field that `table_from_config` reads, written out: what a config leaves unsaid differs by version."""
    if isinstance(model, PythonModelSpec):
        return _own_config(model)
    if (model.mixture is not None) != (model.family in MIXTURES) or (model.latent is not None) != (
        model.family == "deepseek_v3"
    ):
        raise UserError(
            f"model={model.name} is none of family={model.family} to Hugging Face; use a family with its parts"
        )
    _check_heads(model)
    reader = READERS[model.family]
    config: Config = {"model_type": model.family, "architectures": [MODULES[model.family]]}
    config |= {theirs: getattr(model, ours) for theirs, ours in reader.fields.items()}
    config |= {key: values[0] for key, values in reader.only.items()}
    if model.family == "gpt2":
        return config | {"n_inner": model.ffn, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if model.family == "qwen2":
        config["use_sliding_window"] = False
    elif model.family not in ("mixtral", "mistral"):
        config["attention_bias"] = model.qkv_bias
    if model.family in WINDOWED:
        config |= _windows(model)
    if model.family in ("gemma2", "gemma3_text"):
        config |= {theirs: getattr(model, ours) or None for theirs, ours in SOFTCAPS.items()}
        config["query_pre_attn_scalar"] = _number(model.query_scale**-2) if model.query_scale else model.head_dim
    if model.mixture is not None:
        config |= {theirs: getattr(model.mixture, ours) for theirs, ours in MIXTURES[model.family].items()}
        own = "aux_loss_alpha" if model.family == "deepseek_v3" else "router_aux_loss_coef"
        config |= {own: model.mixture.balance_coefficient, "seq_aux": model.mixture.balance_over == "sequence"}
        if model.mixture.z_coefficient:
            config["router_z_loss_coef"] = model.mixture.z_coefficient
    if model.family in ("mixtral", "gpt_oss") and model.mixture is not None:
        config["intermediate_size"] = model.mixture.expert_ffn
    if model.latent is not None:
        config |= {theirs: getattr(model.latent, ours) for theirs, ours in LATENT_KEYS.items()}
        config["q_lora_rank"] = model.latent.q_rank or None
    return config | _rope(model) | {"attention_dropout": 0.0}


def _check_heads(model: ModelSpec) -> None:
    """What the config classes of some families refuse to read, whatever head_dim is."""
    if model.family in ("llama", "gemma2", "gemma3_text") and model.hidden % model.heads:
        near = nearest_numbers(model.heads, lambda number: model.hidden % number == 0, 1, model.hidden)
        raise UserError(
            f"model.heads={model.heads} does not divide hidden={model.hidden}, which family={model.family} of Hugging "
            f"Face refuses; {use('heads', near)}"
        )


WINDOWED = ("mistral", "gemma2", "gemma3_text", "olmo3", "gpt_oss")
"""Families whose modules have layers with a window."""


def _windows(model: ModelSpec) -> Config:
    """One window for all layers that have one."""
    windows = [model.window_of(layer) for layer in range(model.layers)]
    sizes = sorted({window for window in windows if window})
    if len(sizes) > 1:
        raise UserError(
            f"model.windows={list(model.windows)} cannot be written as family={model.family}; use one window, or 0"
        )
    if model.family == "mistral":
        if sizes and 0 in windows:
            raise UserError(
                f"model.windows={list(model.windows)} cannot be written as family=mistral; use [{sizes[0]}]"
            )
        return {"sliding_window": sizes[0] if sizes else None}
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    # Where no layer has a window their modules ask for its size all the same.
    return {"sliding_window": sizes[0] if sizes else model.max_positions, "layer_types": kinds}


def _number(value: float) -> float:
    """A whole one where the difference is rounding."""
    return round(value) if abs(value - round(value)) < 1e-9 * abs(value) else value


def _rope(model: ModelSpec) -> Config:
    """As version 4 writes it, which version 5 reads; that has no other way where layers rotate in two ways."""
    written = _one_rope(model)
    if model.family not in ("gemma3_text", "olmo3"):
        return written
    full = {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": model.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": model.window_rope_theta or model.rope_theta}
    local = {"rope_local_base_freq": sliding["rope_theta"]} if model.family == "gemma3_text" else {}
    return {**written, **local, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _one_rope(model: ModelSpec) -> Config:
    if model.rope_factor != 1:
        return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "linear", "factor": model.rope_factor}}
    if model.yarn is not None:
        scaling = {theirs: getattr(model.yarn, ours) for theirs, ours in YARN_SCALING.items()}
        kept = {key: value for key, value in scaling.items() if value or key == "truncate"}
        if model.yarn.truncate:
            del kept["truncate"]  # which older versions do not know
        return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "yarn", **kept}}
    if model.rope_scaling is None:
        # To GPT-OSS nothing said means YaRN.
        plain = {"rope_type": "default"} if model.family == "gpt_oss" else None
        return {"rope_theta": model.rope_theta, "rope_scaling": plain}
    scaling = {theirs: getattr(model.rope_scaling, ours) for theirs, ours in LLAMA3_SCALING.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "llama3", **scaling}}


def _own_config(model: PythonModelSpec) -> Config:
    """Of a family that Cuboid has no reader for: as the folder has it that the model was read from."""
    folder = model.options.get("folder")
    path = Path(str(folder)) / "config.json"
    if folder is None or not path.is_file():
        raise UserError(f"model={model.name} is one's own: it has no config.json; read it with cuboid.load_checkpoint")
    return read_json(path)
