"""Models in torchtitan 0.2.2: its TOML names a flavor and describes none. Where it has a flavor that is the model, that
one; else the lines of Python that register the model as one, where one of its models has all it takes."""

from dataclasses import dataclass, replace
from functools import lru_cache

from cuboid.spec.model import ModelSpec, load_model

FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3.1-8b": ("llama3", "8B"),
    "llama3.1-70b": ("llama3", "70B"),
    "llama3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2": ("deepseek_v3", "236B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
"""A model of the catalog -> torchtitan's name of it and its flavor."""
PIPELINED = ("llama3", "deepseek_v3")
"""Its models that it can cut into stages."""
CONTEXT = ("llama3", "qwen3")
"""Its models whose attention takes context parallelism; DeepSeek's flavors use FlexAttention, which does not."""


@dataclass(frozen=True)
class Flavor:
    """What `model.name` and `model.flavor` say."""

    family: str
    name: str
    register: tuple[str, ...] = ()
    """Lines of Python that make it; none where torchtitan has it."""


@lru_cache(maxsize=64)
def flavor_of(model: ModelSpec) -> Flavor | None:
    """The flavor that is the model; nothing where none of torchtitan's models can be it."""
    for name, (family, flavor) in FLAVORS.items():
        if _function(model) == _function(load_model(name)):
            return Flavor(family, flavor)
    for family, lacks, made in (
        ("llama3", _llama3_lacks, _llama3),
        ("qwen3", _qwen3_lacks, _qwen3),
        ("deepseek_v3", _deepseek_lacks, _deepseek),
    ):
        if not lacks(model):
            return Flavor(family, model.name, made(model))
    return None


def lacking(model: ModelSpec) -> str:
    """Why no flavor can be the model: what the one nearest to it lacks."""
    found = [_deepseek_lacks(model)] if model.latent else [_llama3_lacks(model), _qwen3_lacks(model)]
    return ", ".join(sorted(found, key=len)[0])


def _function(model: ModelSpec) -> ModelSpec:
    """The model without what it is called, how it is initialized, and how its router is kept in balance."""
    usual = ModelSpec(hidden=2, layers=1, heads=1, ffn=1, vocab=1)
    names = ("name", "family", "max_positions", "initialization", "base_width", "initial_std")
    mixture = model.mixture and replace(
        model.mixture,
        balance_coefficient=0.0,
        balance_over="sequence",
        z_coefficient=0.0,
        router_noise=0.0,
        bias_rate=0.0,
        capacity_factor=0.0,
    )
    return replace(model, mixture=mixture, **{name: getattr(usual, name) for name in names})


def _all_lack(model: ModelSpec) -> list[str]:
    """Fields that none of its models has."""
    found = [] if model.positions == "rope" else [f"positions={model.positions}"]
    found += [] if model.norm == "rmsnorm" else [f"norm={model.norm}"]
    found += [] if model.activation == "swiglu" else [f"activation={model.activation}"]
    return found + [f"{name}=true" for name in ("qkv_bias", "output_bias", "mlp_bias") if getattr(model, name)]


def _llama3_lacks(model: ModelSpec) -> list[str]:
    found = _all_lack(model) + [f"{name}=true" for name in ("tie_embeddings", "qk_norm") if getattr(model, name)]
    found += [] if model.head_dim * model.heads == model.hidden else [f"head_dim={model.head_dim}"]
    return found + [name for name in ("mixture", "latent", "yarn") if getattr(model, name)]


def _qwen3_lacks(model: ModelSpec) -> list[str]:
    found = _all_lack(model) + [name for name in ("latent", "yarn", "rope_scaling") if getattr(model, name)]
    mixture = model.mixture
    if mixture is None:
        return found
    shown = {"shared_ffn": mixture.shared_ffn, "first_dense_layers": mixture.first_dense_layers}
    return found + [f"mixture.{name}={value}" for name, value in shown.items() if value] + _router_lacks(model)


def _deepseek_lacks(model: ModelSpec) -> list[str]:
    yarn, mixture = model.yarn, model.mixture
    found = _all_lack(model) + [f"{name}=true" for name in ("tie_embeddings", "qk_norm") if getattr(model, name)]
    plain = yarn is not None and yarn.truncate and not yarn.attention_factor and yarn.mscale == yarn.mscale_all_dim
    found += ([] if model.latent else ["no latent"]) + ([] if plain else ["its YaRN"])
    if mixture is None:
        return [*found, "no mixture"]
    found += [f"mixture.shared_ffn={mixture.shared_ffn}"] if mixture.shared_ffn % mixture.expert_ffn else []
    return found + _router_lacks(model)


def _router_lacks(model: ModelSpec) -> list[str]:
    """It has biases of experts where they move, and only there."""
    mixture = model.mixture
    still = mixture is not None and mixture.router_bias and not mixture.bias_rate
    return ["mixture.router_bias=true with bias_rate=0"] if still else []


def _llama3(model: ModelSpec) -> tuple[str, ...]:
    scaling = model.rope_scaling
    stretch = "scaling_factor=1.0"
    if scaling:
        stretch = f"scaling_factor={scaling.factor!r}, low_freq_factor={scaling.low_frequency_factor!r}, "
        stretch += f"high_freq_factor={scaling.high_frequency_factor!r}, "
        stretch += f"original_max_position_embeddings={scaling.original_positions}"
    # Its feed-forward width is counted from `dim`, and rounded up to a multiple: here of the width itself.
    half = model.ffn / (2 * int(8 * model.hidden / 3))
    return (
        "from torchtitan.models.llama3 import TransformerModelArgs, llama3_args",
        "from torchtitan.models.llama3.model.args import RoPEScalingArgs",
        f"llama3_args[{model.name!r}] = TransformerModelArgs(",
        f"    dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads},",
        f"    vocab_size={model.vocab}, multiple_of={model.ffn}, ffn_dim_multiplier={half!r},",
        f"    norm_eps={model.norm_epsilon!r}, rope_theta={model.rope_theta!r},",
        f"    rope_scaling_args=RoPEScalingArgs({stretch}),",
        ")",
    )


def _qwen3(model: ModelSpec) -> tuple[str, ...]:
    experts: tuple[str, ...] = ()
    if model.mixture:
        experts = (f"    moe_enabled=True, moe_inter_dim={model.mixture.expert_ffn},", *_experts(model))
    return (
        "from torchtitan.models.moe import MoEArgs",
        "from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args",
        f"qwen3_args[{model.name!r}] = Qwen3ModelArgs(",
        f"    dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads},",
        f"    head_dim={model.head_dim}, hidden_dim={model.ffn}, vocab_size={model.vocab}, qk_norm={model.qk_norm},",
        f"    norm_eps={model.norm_epsilon!r}, rope_theta={model.rope_theta!r}, "
        f"enable_weight_tying={model.tie_embeddings},",
        *experts,
        ")",
    )


def _deepseek(model: ModelSpec) -> tuple[str, ...]:
    latent, yarn, mixture = model.latent, model.yarn, model.mixture
    assert latent and yarn and mixture
    return (
        "from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args",
        "from torchtitan.models.moe import MoEArgs",
        f"deepseekv3_args[{model.name!r}] = DeepSeekV3ModelArgs(",
        f"    dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, vocab_size={model.vocab},",
        f"    inter_dim={model.ffn}, moe_inter_dim={mixture.expert_ffn}, n_dense_layers={mixture.first_dense_layers},",
        f"    q_lora_rank={latent.q_rank}, kv_lora_rank={latent.kv_rank}, qk_nope_head_dim={latent.qk_nope_dim},",
        f"    qk_rope_head_dim={latent.qk_rope_dim}, v_head_dim={latent.v_dim}, norm_eps={model.norm_epsilon!r},",
        f"    rope_theta={model.rope_theta!r}, rope_factor={yarn.factor!r}, mscale={yarn.mscale!r},",
        f"    original_seq_len={yarn.original_positions}, beta_fast={yarn.beta_fast!r}, beta_slow={yarn.beta_slow!r},",
        '    attn_type="flex", attn_mask_type="block_causal",',
        *_experts(model),
        ")",
    )


def _experts(model: ModelSpec) -> tuple[str, ...]:
    mixture = model.mixture
    assert mixture
    groups = (mixture.groups, mixture.top_groups) if mixture.groups > 1 else (None, None)
    return (
        "    moe_args=MoEArgs(",
        f"        num_experts={mixture.experts}, num_shared_experts={mixture.shared_ffn // mixture.expert_ffn}, "
        f"top_k={mixture.top_k},",
        f"        score_func={mixture.scoring!r}, route_norm={mixture.normalized}, route_scale={mixture.scaling!r},",
        f"        num_expert_groups={groups[0]}, num_limited_groups={groups[1]},",
        f"        score_before_experts=False, load_balance_coeff={mixture.bias_rate or None!r},",
        "    ),",
    )
