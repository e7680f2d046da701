"""Parts of Hugging Face's `config.json` that are more than one key: positions, windows, experts, latents.

A reader takes what it knows out of what is left of a config, and puts it into the table of a model."""

from collections.abc import Callable, Mapping

from cuboid.errors import UserError
from cuboid.readers import Table
from cuboid.spec.coding import show
from cuboid.spec.mixture import BIAS_RATE, ROUTER_NOISE
from cuboid.spec.model import ModelSpec

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
    first = {"original_positions": table.get("max_positions", ModelSpec.max_positions)}  # where nothing says it
    if kind == "llama3":
        table["rope_scaling"] = first | take(parameters, LLAMA3_SCALING)
    elif kind == "yarn":
        table["yarn"] = first | take(parameters, YARN_SCALING)
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


SOFTCAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}


def read_gemma_scales(left: Table, table: Table) -> None:
    for key, ours in SOFTCAPS.items():
        table[ours] = left.pop(key, table.get(ours, 0.0)) or 0.0  # null is none
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
    table["windows"] = [] if window is None else [window]


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
