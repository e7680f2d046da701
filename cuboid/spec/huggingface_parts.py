"""The parts of a Hugging Face `config.json` that take more than a change of name: positions, windows, biases, experts,
latents."""

from collections.abc import Callable, Mapping
from typing import Any

from cuboid.errors import UserError
from cuboid.spec.coding import show
from cuboid.spec.model import BIAS_RATE, ROUTER_NOISE

Table = dict[str, Any]

LATENT_KEYS = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_dim",
    "rope_interleave": "interleaved",
}
MIXTRAL_KEYS = {"num_local_experts": "experts", "num_experts_per_tok": "top_k"}
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
    elif kind != "default":
        raise UserError(
            f"rope_type={show(kind)} of {table['name']} is unknown; use rope_type=default, rope_type=llama3 or "
            "rope_type=yarn"
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
        raise UserError(f"sliding_window={window} of {table['name']} is unknown; use sliding_window=null")


def read_attention_bias(left: Table, table: Table) -> None:
    table["qkv_bias"] = table["output_bias"] = bool(left.pop("attention_bias", False))


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
