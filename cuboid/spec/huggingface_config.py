"""A model's `config.json`, from which Hugging Face builds the module that computes the same: the inverse of
`table_from_config`."""

from typing import Any

from cuboid.errors import UserError
from cuboid.spec.huggingface import LLAMA3_SCALING, READERS
from cuboid.spec.model import ModelSpec

Config = dict[str, Any]

MODULES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""Family, which is also their model_type -> their class."""


def config_from_model(model: ModelSpec) -> Config:
    """Every field that `table_from_config` reads, written out: what a config leaves unsaid differs by version."""
    if model.mixture is not None or model.latent is not None:
        raise UserError(f"model={model.name} has no config.json yet; use a dense model without latent attention")
    reader = READERS[model.family]
    config: Config = {"model_type": model.family, "architectures": [MODULES[model.family]]}
    config |= {theirs: getattr(model, ours) for theirs, ours in reader.fields.items()}
    config |= {key: values[0] for key, values in reader.only.items()}
    if model.family == "gpt2":
        return config | {"n_inner": model.ffn, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if model.family == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = model.qkv_bias
    return config | _rope(model) | {"attention_dropout": 0.0}


def _rope(model: ModelSpec) -> Config:
    """As version 4 writes it, which version 5 reads."""
    if model.rope_scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    scaling = {theirs: getattr(model.rope_scaling, ours) for theirs, ours in LLAMA3_SCALING.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "llama3", **scaling}}
