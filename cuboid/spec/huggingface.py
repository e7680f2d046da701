"""Hugging Face's `config.json`, read into the table of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import Table
from cuboid.spec.coding import show
from cuboid.spec.huggingface_parts import (
    DEEPSEEK_KEYS,
    DEEPSEEK_V2_ROUTING,
    DEEPSEEK_V3_ROUTING,
    GPT_OSS_KEYS,
    LATENT_KEYS,
    LOSS_KEYS,
    MIXTRAL_KEYS,
    QWEN_KEYS,
    SOFTCAPS,
    SOFTMAX_BALANCING,
    read_attention_bias,
    read_attention_bias_on,
    read_gemma_scales,
    read_gpt2_width,
    read_gpt_oss_rope,
    read_latent,
    read_layer_windows,
    read_mistral_window,
    read_mixture,
    read_rope,
    read_two_ropes,
    read_windows,
    refuse_quantized,
    take,
)

NO_MATHS = frozenset(
    """_name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label label2id
    model_type output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict
    task_specific_params torch_dtype transformers_version use_cache""".split()
)
"""Keys about tokens, files and formats."""

DROPOUT = frozenset("attention_dropout attn_pdrop embd_pdrop resid_pdrop".split())
"""Dropout belongs to a training, not to a model: `dropout_of`."""

ROUTING = frozenset("ep_size num_mtp_layers num_nextn_predict_layers output_router_logits quantization_config".split())
"""Keys of mixtures about storage, what a forward pass returns, and layers that predict further tokens, which only
DeepSeek-V3's checkpoints are known to have."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How to read the configs of one model type."""

    family: str
    defaults: Table
    """What Hugging Face assumes where the config says nothing, as `ModelSpec` fields."""
    fields: Mapping[str, str]
    """Their key -> our field."""
    only: Mapping[str, tuple[object, ...]]
    """Their key -> the values under which the model computes what Cuboid computes; the first is their default."""
    ignored: frozenset[str] = frozenset()
    finish: tuple[Callable[[Table, Table], None], ...] = field(default=())
    """Steps that move what is left of the config into the table."""


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that has a reader."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in READERS


def table_from_config(config: Mapping[str, Any], name: str) -> Table:
    """The table of a model, as `build_model` takes it, from the contents of a `config.json`."""
    model_type = config.get("model_type")
    if not is_known(config):
        near = nearest_names(str(model_type), READERS, count=len(READERS))
        raise UserError(f"model_type={show(model_type)} of {name} is unknown; use {either(near)}")
    _check_types(config, name)
    reader = READERS[model_type]
    table: Table = {"name": name, "family": reader.family, **reader.defaults}
    left = {key: value for key, value in config.items() if key not in NO_MATHS | DROPOUT | reader.ignored}
    table.update(take(left, reader.fields))
    for key, allowed in reader.only.items():
        value = left.pop(key, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{key}={show(value)} of {name} changes what the model computes; use {_values(key, allowed)}"
            )
    for step in reader.finish:
        step(left, table)
    for key, value in left.items():
        # A switch that is off and a value that is not there say nothing.
        if value is not None and value is not False:
            raise UserError(f"{key}={show(value)} of {name} is unknown and may change what it computes; remove the key")
    return table


def dropout_of(config: Mapping[str, Any]) -> tuple[float, list[str]]:
    """What `training.dropout` is to a config, and what of its dropout is not computed, in sentences."""
    asked = {key: rate for key in sorted(DROPOUT) if isinstance(rate := config.get(key), float) and 0 < rate < 1}
    dropout = asked.get("resid_pdrop", 0.0)
    notes = [
        f"{key}={rate:g} of its config.json is not used: attention probabilities are not dropped"
        for key, rate in asked.items()
        if key in ("attention_dropout", "attn_pdrop")
    ]
    embedded = asked.get("embd_pdrop", 0.0)
    if "embd_pdrop" in config and embedded != dropout:
        notes.append(f"embd_pdrop={embedded:g} of its config.json is not used: training.dropout={dropout:g} is for all")
    return dropout, notes


def _check_types(config: Mapping[str, Any], name: str) -> None:
    """Before anything is computed with what the config says."""
    for key, value in config.items():
        if value is None:
            continue
        if key in ("rope_scaling", "rope_parameters") and not isinstance(value, dict):
            raise UserError(f"{key}={show(value)} of {name} is not a table; write it as {{...}} or null")
        if key == "layer_types" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise UserError(f"{key}={show(value)} of {name} is no list of strings; use full_attention in all layers")
        if key in WINDOWS and (type(value) is not int or value < 1):
            raise UserError(f"{key}={show(value)} of {name} is no number of tokens; use null for no window")
        if key in NUMBERS and not isinstance(value, int | float):
            raise UserError(f"{key}={show(value)} of {name} is no number; copy the config.json again")


def _values(key: str, allowed: tuple[object, ...]) -> str:
    return either(f"{key}={'null' if value is None else show(value)}" for value in allowed)


WINDOWS = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern")

COMMON = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "initial_std",
}
SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu", "swish")}
GEMMA: dict[str, tuple[object, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None),
}
OLMO_DEFAULTS: Table = {
    "norms": "after",
    "qk_norm": True,
    "qk_norm_whole": True,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_positions": 2048,
}
LLAMA_DEFAULTS = {"norm_epsilon": 1e-6, "rope_theta": 10000.0, "max_positions": 2048}
QWEN_DEFAULTS = {"norm_epsilon": 1e-6, "rope_theta": 10000.0, "max_positions": 32768}
WITHOUT_HEAD_DIM = {key: ours for key, ours in COMMON.items() if key != "head_dim"}

READERS: dict[Any, Reader] = {
    "llama": Reader(
        family="llama",
        defaults=LLAMA_DEFAULTS,
        fields={**COMMON, "mlp_bias": "mlp_bias"},
        only=SILU,
        finish=(read_attention_bias, read_rope),
    ),
    # A Llama whose attention may be cut short.
    "mistral": Reader(
        family="mistral",
        defaults={"norm_epsilon": 1e-6, "rope_theta": 10000.0, "max_positions": 131072, "kv_heads": 8},
        fields=COMMON,
        only=SILU,
        finish=(read_mistral_window, read_rope),
    ),
    "gemma2": Reader(
        family="gemma2",
        defaults={
            "norms": "both",
            "unit_norms": True,
            "activation": "geglu",
            "norm_epsilon": 1e-6,
            "rope_theta": 10000.0,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "max_positions": 8192,
            "tie_embeddings": True,
            "hidden": 2304,
            "layers": 26,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 256,
            "ffn": 9216,
            "vocab": 256000,
        },
        fields=COMMON,
        only=GEMMA,
        ignored=frozenset(("hidden_act", "cache_implementation")),
        finish=(read_layer_windows(4096, 2), read_gemma_scales, read_attention_bias, read_rope),
    ),
    "gemma3_text": Reader(
        family="gemma3_text",
        defaults={
            "norms": "both",
            "unit_norms": True,
            "qk_norm": True,
            "activation": "geglu",
            "norm_epsilon": 1e-6,
            "rope_theta": 1000000.0,
            "window_rope_theta": 10000.0,
            "max_positions": 131072,
            "tie_embeddings": True,
            "hidden": 2304,
            "layers": 26,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 256,
            "ffn": 9216,
            "vocab": 262208,
        },
        fields=COMMON,
        only={**GEMMA, "attn_logit_softcapping": (None,)},  # their module has no such cap, whatever is said
        ignored=frozenset(("hidden_act",)),
        finish=(read_layer_windows(4096, 6), read_gemma_scales, read_attention_bias, read_two_ropes),
    ),
    "olmo2": Reader(
        family="olmo2",
        defaults=OLMO_DEFAULTS,
        fields=COMMON,
        only=SILU,
        finish=(read_attention_bias, read_rope),
    ),
    "olmo3": Reader(
        family="olmo3",
        defaults={**OLMO_DEFAULTS, "window_rope_theta": 0.0, "rope_theta": 500000.0},
        fields=COMMON,
        only=SILU,
        finish=(read_layer_windows(4096, 4), read_attention_bias, read_two_ropes),
    ),
    "gpt_oss": Reader(
        family="gpt_oss",
        defaults={
            "sinks": True,
            "activation": "clamped_swiglu",
            "norm_epsilon": 1e-5,
            "rope_theta": 150000.0,
            "head_dim": 64,
            "max_positions": 131072,
        },
        fields=COMMON,
        only={**SILU, "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        ignored=frozenset(("output_router_logits", "experts_per_token", "initial_context_length")),
        finish=(
            refuse_quantized,
            read_layer_windows(128, 2),
            read_attention_bias_on,
            read_mixture(GPT_OSS_KEYS, {"biases": True, **SOFTMAX_BALANCING}),
            read_gpt_oss_rope,
        ),
    ),
    "qwen2": Reader(family="qwen2", defaults=QWEN_DEFAULTS, fields=COMMON, only=SILU, finish=(read_windows, read_rope)),
    "qwen3": Reader(
        family="qwen3",
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        fields=COMMON,
        only=SILU,
        finish=(read_windows, read_attention_bias, read_rope),
    ),
    "gpt2": Reader(
        family="gpt2",
        defaults={},
        fields={
            "n_embd": "hidden",
            "n_layer": "layers",
            "n_head": "heads",
            "n_positions": "max_positions",
            "vocab_size": "vocab",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "initial_std",
            "tie_word_embeddings": "tie_embeddings",
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        # The summary head is no part of the language model; the upcast changes rounding only.
        ignored=frozenset(
            """n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels
            summary_type summary_use_proj""".split()
        ),
        finish=(read_gpt2_width,),
    ),
    "mixtral": Reader(
        family="mixtral",
        defaults={"norm_epsilon": 1e-5, "rope_theta": 1000000.0},
        fields=COMMON,
        only={**SILU, "router_jitter_noise": (0.0,)},
        ignored=ROUTING,
        finish=(
            read_windows,
            read_mixture(MIXTRAL_KEYS, SOFTMAX_BALANCING),
            read_rope,
        ),
    ),
    "qwen3_moe": Reader(
        family="qwen3_moe",
        defaults=QWEN_DEFAULTS,
        fields=COMMON,
        only={**SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        ignored=ROUTING,
        finish=(
            read_windows,
            read_attention_bias,
            read_mixture(QWEN_KEYS, {"normalized": False, **SOFTMAX_BALANCING}),
            read_rope,
        ),
    ),
    "deepseek_v2": Reader(
        family="llama",
        defaults=LLAMA_DEFAULTS,
        fields=WITHOUT_HEAD_DIM,
        only={
            **SILU,
            "moe_layer_freq": (1,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "scoring_func": ("softmax",),
        },
        ignored=ROUTING,
        finish=(read_latent, read_mixture(DEEPSEEK_KEYS, DEEPSEEK_V2_ROUTING), read_rope),
    ),
    "deepseek_v3": Reader(
        family="deepseek_v3",
        defaults={**LLAMA_DEFAULTS, "max_positions": 4096},
        fields={**WITHOUT_HEAD_DIM, "num_nextn_predict_layers": "prediction_layers"},
        only={
            **SILU,
            "moe_layer_freq": (1,),
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        ignored=ROUTING - {"num_nextn_predict_layers"},
        finish=(read_latent, read_mixture(DEEPSEEK_KEYS, DEEPSEEK_V3_ROUTING), read_rope),
    ),
}


NUMBERS = frozenset(
    key
    for keys in (*(reader.fields for reader in READERS.values()), MIXTRAL_KEYS, QWEN_KEYS, DEEPSEEK_KEYS, LATENT_KEYS)
    for key in keys
) | {"n_inner", *LOSS_KEYS, *SOFTCAPS}
"""Keys whose values are numbers, or true or false."""
