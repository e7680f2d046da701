"""Hugging Face's `config.json`: read into the table of a model, and written from a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import Table, read_json
from cuboid.spec.coding import show
from cuboid.spec.model import BIAS_RATE, ROUTER_NOISE, ModelSpec
from cuboid.spec.plugin import PythonModelSpec

LATENT_KEYS = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_dim",
    "rope_interleave": "interleaved",
}
MIXTRAL_KEYS = {"num_local_experts": "experts", "num_experts_per_tok": "top_k"}
GPT_OSS_KEYS = {"num_local_experts": "experts", "num_experts": "experts", "num_experts_per_tok": "top_k"}
QWEN_KEYS = {
    "num_experts": "experts",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "norm_topk_prob": "normalized",
}
DEEPSEEK_KEYS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "first_dense_layers",
    "norm_topk_prob": "normalized",
    "routed_scaling_factor": "scaling",
    "n_group": "groups",
    "topk_group": "top_groups",
}
DEEPSEEK_V3_ROUTING: Table = {
    "scoring": "sigmoid",
    "router_bias": True,
    "scaling": 2.5,
    "groups": 8,
    "top_groups": 4,
    "shared_experts": 1,
    "balance_coefficient": 0.0001,  # its paper's, as is the rate
    "balance_over": "sequence",
    "bias_rate": BIAS_RATE,
}
DEEPSEEK_V2_ROUTING: Table = {"normalized": False, "balance_coefficient": 0.001, "balance_over": "sequence"}
SOFTMAX_BALANCING: Table = {"balance_coefficient": 0.001, "balance_over": "global_batch"}
"""Of Mixtral and Qwen3-MoE where the config says nothing: the default of Hugging Face's classes."""
LOSS_KEYS = {
    "router_aux_loss_coef": "balance_coefficient",
    "aux_loss_alpha": "balance_coefficient",
    "router_z_loss_coef": "z_coefficient",
}
"""Coefficients are taken as they stand; `cuboid.model.load_balancing` says how they compare."""


def take(left: Table, keys: Mapping[str, str]) -> Table:
    """What the config says under their keys, under ours; a null is as good as nothing."""
    found = {ours: left.pop(key, None) for key, ours in keys.items() if key in left}
    return {ours: value for ours, value in found.items() if value is not None}


def read_rope(left: Table, table: Table) -> None:
    """Rotary positions, written as `rope_theta` and `rope_scaling` until version 4 and `rope_parameters` since."""
    parameters = {**(left.pop("rope_scaling", None) or {}), **(left.pop("rope_parameters", None) or {})}
    theta = parameters.pop("rope_theta", left.pop("rope_theta", None))
    if theta is not None:
        table["rope_theta"] = theta
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind == "llama3":
        table["rope_scaling"] = take(parameters, LLAMA3_SCALING)
    elif kind == "yarn":
        table["yarn"] = take(parameters, YARN_SCALING)
    elif kind == "linear":
        table["rope_factor"] = parameters.pop("factor", 1.0)
    elif kind != "default":
        raise UserError(
            f"rope_type={show(kind)} of {table['name']} is unknown; use rope_type=default, rope_type=linear, "
            "rope_type=llama3 or rope_type=yarn"
        )
    if parameters:
        key, value = next(iter(parameters.items()))
        raise UserError(f"rope_scaling.{key}={show(value)} of {table['name']} is unknown; remove the key")


LLAMA3_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}


YARN_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}


def read_two_ropes(left: Table, table: Table) -> None:
    """Of families whose layers with a window rotate otherwise: by a base of their own, and never stretched. Version 5
    has a table for each kind of layer."""
    both = left.pop("rope_parameters", None) or {}
    nested = "full_attention" in both or "sliding_attention" in both
    full = (both.get("full_attention") if nested else both) or {}
    sliding = (both.get("sliding_attention") if nested else None) or {}
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise UserError(f"rope_parameters of {table['name']} has no table for a kind of layer; write it as {{...}}")
    sliding = dict(sliding)
    stretch = left.pop("rope_scaling", None) or {}
    theta = full.get("rope_theta", left.pop("rope_theta", table["rope_theta"]))
    local = sliding.pop("rope_theta", left.pop("rope_local_base_freq", table["window_rope_theta"] or theta))
    left.pop("rope_theta", None)
    left.pop("rope_local_base_freq", None)
    if sliding.pop("rope_type", "default") != "default" or sliding:
        raise UserError(
            f"rope_parameters.sliding_attention of {table['name']} stretches positions; use rope_type=default there"
        )
    read_rope({"rope_theta": theta, "rope_scaling": {**stretch, **full}}, table)
    table["window_rope_theta"] = local if table["windows"] else 0.0


def read_gpt_oss_rope(left: Table, table: Table) -> None:
    """YaRN, unless the config says otherwise."""
    if not left.get("rope_parameters") and not left.get("rope_scaling"):
        left["rope_scaling"] = {**GPT_OSS_YARN, "rope_type": "yarn"}
    read_rope(left, table)


GPT_OSS_YARN: Table = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_layer_windows(usual: int | None, every: int) -> Callable[[Table, Table], None]:
    """`usual`: the window where the config says nothing; each layer whose number `every` divides has none."""

    def read(left: Table, table: Table) -> None:
        window = left.pop("sliding_window", usual)
        pattern = left.pop("sliding_window_pattern", left.pop("_sliding_window_pattern", every))
        left.pop("_sliding_window_pattern", None)
        layers = table.get("layers")
        if type(layers) is not int or layers < 1:  # which `ModelSpec` refuses
            table["windows"] = []
            return
        kinds = left.pop("layer_types", None)
        if kinds is None:
            kinds = ["sliding_attention" if number % pattern else "full_attention" for number in range(1, layers + 1)]
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown:
            raise UserError(
                f"layer_types of {table['name']} holds {show(unknown[0])}; use full_attention or sliding_attention"
            )
        table["windows"] = repeating([(window or 0) if kind == "sliding_attention" else 0 for kind in kinds[:layers]])

    return read


def repeating(windows: list[int]) -> list[int]:
    """The shortest list that says the same when it is repeated; of layers without windows an empty one."""
    if not any(windows):
        return []
    lengths = range(1, len(windows) + 1)
    fits = (length for length in lengths if all(each == windows[at % length] for at, each in enumerate(windows)))
    return windows[: next(fits)]


def read_gemma_scales(left: Table, table: Table) -> None:
    table["embedding_scale"] = max(table["hidden"], 1) ** 0.5
    scalar = left.pop("query_pre_attn_scalar", 256)
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise UserError(f"query_pre_attn_scalar={show(scalar)} of {table['name']} is no number above 0; use 256")
    table["query_scale"] = 0.0 if scalar == table.get("head_dim") else scalar**-0.5


def refuse_quantized(left: Table, table: Table) -> None:
    found = left.pop("quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise UserError(
            f"quantization_config of {table['name']} says that its experts are stored in {show(method)}, which is not "
            "read; save it in bf16 with transformers (Mxfp4Config(dequantize=True)) and use that folder"
        )


def read_windows(left: Table, table: Table) -> None:
    """Sliding windows: refused when on, whatever their other keys say."""
    on = left.pop("use_sliding_window", "sliding_window" in left and "max_window_layers" not in left)
    window = left.pop("sliding_window", None)
    left.pop("max_window_layers", None)
    if on and window is not None:
        raise UserError(f"sliding_window={window} of {table['name']} is unknown; use sliding_window=null")
    kinds = set(left.pop("layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        other = next(iter(sorted(kinds - {"full_attention"})))
        raise UserError(f"layer_types of {table['name']} holds {show(other)}; use full_attention in all layers")


def read_mistral_window(left: Table, table: Table) -> None:
    """On unless the config says otherwise."""
    window = left.pop("sliding_window", 4096)
    if window is not None:
        table |= {"family": "mistral", "windows": [window]}


def read_attention_bias(left: Table, table: Table) -> None:
    table["qkv_bias"] = table["output_bias"] = bool(left.pop("attention_bias", False))


def read_attention_bias_on(left: Table, table: Table) -> None:
    table["qkv_bias"] = table["output_bias"] = bool(left.pop("attention_bias", True))


def read_gpt2_width(left: Table, table: Table) -> None:
    table["ffn"] = left.pop("n_inner", None) or 4 * table.get("hidden", 0)


def read_mixture(keys: Mapping[str, str], defaults: Table) -> Callable[[Table, Table], None]:
    def read(left: Table, table: Table) -> None:
        mixture = {"router_noise": ROUTER_NOISE, **defaults, **take(left, keys), **take(left, LOSS_KEYS)}
        whole_sequences = left.pop("seq_aux", None)
        if whole_sequences is not None:
            mixture["balance_over"] = "sequence" if whole_sequences else "global_batch"
        if "experts" not in mixture or "top_k" not in mixture:
            raise UserError(
                f"{table['name']} does not say how many experts it has and uses; name both in its config.json"
            )
        # Mixtral has no other feed-forward width than that of its experts.
        mixture.setdefault("expert_ffn", table.get("ffn"))
        if mixture.get("shared_experts"):
            mixture["shared_ffn"] = mixture["shared_experts"] * mixture["expert_ffn"]
        if left.pop("topk_method", None) == "greedy":
            mixture |= {"groups": 1, "top_groups": 1}
        table["mixture"] = mixture

    return read


def read_latent(left: Table, table: Table) -> None:
    table["latent"] = {"q_rank": 0, **take(left, LATENT_KEYS)}
    for derived in ("head_dim", "qk_head_dim"):
        left.pop(derived, None)


NO_MATHS = frozenset(
    """_name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label label2id
    model_type output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict
    task_specific_params torch_dtype transformers_version use_cache""".split()
)
"""Keys about tokens, files and formats."""

DROPOUT = frozenset("attention_dropout attn_pdrop embd_pdrop resid_pdrop".split())
"""Dropout belongs to a training, not to a model, and Cuboid trains without it."""

ROUTING = frozenset("ep_size num_mtp_layers num_nextn_predict_layers output_router_logits quantization_config".split())
"""Keys of mixtures about storage, what a forward pass returns, and layers that predict further tokens, which are no
part of the language model."""


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
    # A Llama, unless its attention is cut short.
    "mistral": Reader(
        family="llama",
        defaults={"norm_epsilon": 1e-6, "rope_theta": 10000.0, "max_positions": 131072, "kv_heads": 8},
        fields=COMMON,
        only=SILU,
        finish=(read_mistral_window, read_rope),
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
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
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
        fields=WITHOUT_HEAD_DIM,
        only={
            **SILU,
            "moe_layer_freq": (1,),
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        ignored=ROUTING,
        finish=(read_latent, read_mixture(DEEPSEEK_KEYS, DEEPSEEK_V3_ROUTING), read_rope),
    ),
}


NUMBERS = frozenset(
    key
    for keys in (*(reader.fields for reader in READERS.values()), MIXTRAL_KEYS, QWEN_KEYS, DEEPSEEK_KEYS, LATENT_KEYS)
    for key in keys
) | {"n_inner", *LOSS_KEYS}
"""Keys whose values are numbers, or true or false."""

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
    if model.family == "gemma3_text":
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


WINDOWED = ("mistral", "gemma3_text", "olmo3", "gpt_oss")
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
        if 0 in windows:
            raise UserError(
                f"model.windows={list(model.windows)} cannot be written as family=mistral; use [{sizes[0]}]"
            )
        return {"sliding_window": sizes[0]}
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"sliding_window": sizes[0] if sizes else None, "layer_types": kinds}


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
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    scaling = {theirs: getattr(model.rope_scaling, ours) for theirs, ours in LLAMA3_SCALING.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": "llama3", **scaling}}


def _own_config(model: PythonModelSpec) -> Config:
    """Of a family that Cuboid has no reader for: as the folder has it that the model was read from."""
    folder = model.options.get("folder")
    path = Path(str(folder)) / "config.json"
    if folder is None or not path.is_file():
        raise UserError(f"model={model.name} is one's own: it has no config.json; read it with cuboid.load_checkpoint")
    return read_json(path)
