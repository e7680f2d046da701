"""A plan as a torchtitan 0.2.2 TOML (the last version that reads TOML).

https://github.com/pytorch/torchtitan
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cuboid.planning.export.engines import Lost, Note, noted, router_notes
from cuboid.planning.plan import Plan
from cuboid.spec.coding import dumps
from cuboid.spec.model import ModelSpec, load_model

# Models in torchtitan 0.2.2: its TOML names a flavor and describes none. Where it has a flavor that is the model, that
# one; else the lines of Python that register the model as one, where one of its models has all it takes.


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


TARGET = "torchtitan 0.2.2"
MODULE = "flavor"
"""The module that registers a model, where torchtitan has no flavor of it."""
BIAS_RATE = 1e-3
"""By which it moves the biases that balance experts, in every flavor; it has no balancing loss."""
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def export(plan: Plan) -> str:
    """The TOML text."""
    _check(plan)
    run, layout = plan.run, plan.layout
    flavor = _flavor(plan)
    model: dict[str, Any] = {"name": flavor.family, "flavor": flavor.name}
    if plan.question.precision == "fp8":
        model["converters"] = ["quantize.linear.float8"]
    rate = run.learning_rate
    scheduler: dict[str, Any] = {
        "warmup_steps": rate.warmup_steps,
        "decay_type": "cosine" if rate.schedule == "cosine" else "linear",
        "min_lr_factor": 1.0 if rate.schedule == "constant" else rate.minimum_ratio,
    }
    if rate.schedule == "wsd":
        scheduler["decay_ratio"] = (rate.decay_steps or run.training.steps // 5) / run.training.steps
    table: dict[str, Any] = {
        "job": {"description": f"{plan.question.model.name} on {plan.question.cluster.name}: {layout}"},
        "model": model,
        "optimizer": {
            "name": "AdamW",
            "lr": rate.peak,
            "beta1": run.optimizer.beta1,
            "beta2": run.optimizer.beta2,
            "eps": run.optimizer.epsilon,
            "weight_decay": run.optimizer.weight_decay,
        },
        "lr_scheduler": scheduler,
        "training": _training(plan),
        "parallelism": _parallelism(plan),
        "activation_checkpoint": _checkpoint(layout.recompute),
    }
    if plan.question.precision == "fp8" and plan.question.fp8_scaling == "row":
        table["quantize"] = {"linear": {"float8": {"recipe_name": "rowwise"}}}
    head = f"# For {TARGET} on {layout.world_size} ranks; predicted: {plan.seconds:.4g} s a step, "
    head += f"{plan.memory_fraction:.0%} of memory.\n"
    if flavor.register:
        table["experimental"] = {"custom_import": MODULE}
        head += (
            f"# It has no flavor of {plan.question.model.name}; these lines, as {MODULE}.py on PYTHONPATH, make one:\n"
        )
        head += "".join(f"#   {line}\n" for line in flavor.register)
    return head + noted(notes(plan)) + dumps(table)


def _flavor(plan: Plan) -> Flavor:
    found = flavor_of(plan.question.model)
    assert found is not None, "exports are checked first"
    return found


def notes(plan: Plan) -> list[Note]:
    """Where the flavor is not quite the model."""
    model, flavor = plan.question.model, _flavor(plan)
    found = router_notes(model)
    if model.yarn and plan.question.sequence <= model.yarn.original_positions:
        found.append(Note("yarn", "at any length", f"beyond {model.yarn.original_positions} tokens"))
    if model.mixture and model.mixture.balance_coefficient:
        found.append(Note("mixture.balance_coefficient", model.mixture.balance_coefficient, 0.0))
    if flavor.register:
        return found
    if flavor.family == "llama3" and model.rope_scaling is None:
        found.append(Note("model.rope_scaling", None, 8.0))
    if flavor.family == "deepseek_v3" and model.norm_epsilon != 1e-5:
        found.append(Note("model.norm_epsilon", model.norm_epsilon, 1e-5))
    if flavor.name == "235B-A22B":
        found.append(Note("model.rope_theta", model.rope_theta, 5e6))
    if flavor.name == "236B" and model.yarn:
        found.append(Note("yarn.mscale_all_dim", model.yarn.mscale_all_dim, 1.0))
    if model.mixture and model.mixture.bias_rate != BIAS_RATE:
        found.append(Note("mixture.bias_rate", model.mixture.bias_rate, BIAS_RATE))
    return found


def check_model(model: ModelSpec, lost: Lost) -> None:
    """Notes what its models lack."""
    if flavor_of(model) is None:
        lost.unless(False, "model", model.name, f"its models lack {lacking(model)}; use llama3-8b, qwen3-8b or alike")


def _check(plan: Plan) -> None:
    layout, model = plan.layout, plan.question.model
    lost = Lost(TARGET)
    lost.unless_equal(layout)
    check_model(model, lost)
    flavor = flavor_of(model)
    name = flavor.family if flavor else ""
    lost.unless(layout.pp == 1 or name in ("", *PIPELINED), "pp", layout.pp, f"it has no stages of {name}; use pp=1")
    lost.unless(layout.cp == 1 or name in ("", *CONTEXT), "cp", layout.cp, f"its {name} has none; use cp=1")
    known = layout.schedule in SCHEDULES or layout.pp == 1
    lost.unless(known, "schedule", layout.schedule, "use schedule=1f1b, interleaved, zbv or dualpipev")
    full = plan.micro_batches % layout.pp == 0 or layout.schedule != "interleaved"
    lost.unless(full, "micro_batches", plan.micro_batches, f"interleaved needs a multiple of pp={layout.pp}")
    enough = plan.micro_batches >= layout.stages or layout.schedule != "dualpipev"
    lost.unless(enough, "micro_batches", plan.micro_batches, f"dualpipev needs {layout.stages}, one for each stage")
    gathers = layout.cp == 1 or layout.cp_method == "allgather"
    lost.unless(gathers, "cp_method", layout.cp_method, "its attention gathers keys; use cp_method=allgather")
    lost.unless(layout.sequence_parallel or layout.tp == 1, "sequence_parallel", False, "tp > 1 always splits it")
    lost.unless(layout.zero != 1 or layout.dp == 1, "zero", 1, "use zero=2 or zero=3")
    sharded = layout.cp == 1 or layout.dp > 1 or layout.zero > 1
    lost.unless(sharded, "zero", layout.zero, "context-parallel ranks always share parameters; use zero=2 or zero=3")
    alone = layout.tp == layout.pp == layout.cp == 1
    lost.unless(layout.zero > 0 or layout.dp == 1 or alone, "zero", 0, "beside tp, pp or cp use zero=2 or zero=3")
    lost.unless(not layout.offload, "offload", True, "its enable_cpu_offload moves weights too; use offload=false")
    precision = plan.question.precision
    lost.unless(precision != "fp16", "precision", precision, "use precision=bf16")
    some = layout.recompute_layers
    lost.unless(not some, "recompute_layers", some, "use recompute_layers=0")
    lost.refuse()


def _training(plan: Plan) -> dict[str, Any]:
    layout, run = plan.layout, plan.run
    # With a pipeline the local batch is all micro-batches of a step; without, one of them, and the rest accumulates.
    local = layout.micro_batch * (plan.micro_batches if layout.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": plan.question.global_batch,
        "seq_len": plan.question.sequence,
        "max_norm": run.training.gradient_clip,
        "steps": run.training.steps,
        "mixed_precision_param": "float32" if plan.question.precision == "float32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp // layout.shard_size,
        "data_parallel_shard_degree": layout.shard_size,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.pp > 1:
        table["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        table["pipeline_parallel_microbatch_size"] = layout.micro_batch
        table["module_fqns_per_model_part"] = _parts(plan.layers)
    return table


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """The modules of every stage by name, so that torchtitan splits exactly as planned."""
    parts, start = [], 0
    for count in layers:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _checkpoint(recompute: str) -> dict[str, Any]:
    if recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": recompute}
