"""A plan as a torchtitan 0.2.2 TOML (the last version that reads TOML).

https://github.com/pytorch/torchtitan
"""

from typing import Any

from cuboid.planning.export.lost import Lost, Note, noted, router_notes
from cuboid.planning.plan import Plan
from cuboid.spec.coding import dumps

TARGET = "torchtitan 0.2.2"
FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
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
    "deepseek-v3": ("deepseek_v3", "671B"),
}
"""Cuboid's name of a model -> torchtitan's name and flavor; its TOML cannot describe other shapes."""
PIPELINED = ("llama3", "deepseek_v3")
"""Its models that it can cut into stages."""
CONTEXT = ("llama3", "qwen3")
"""Its models whose attention takes context parallelism; DeepSeek's flavors use FlexAttention, which does not."""
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
    name, flavor = FLAVORS[plan.question.model.name]
    model: dict[str, Any] = {"name": name, "flavor": flavor}
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
    head = f"# For {TARGET} on {layout.world_size} ranks; predicted: {plan.seconds:.4g} s a step, "
    return head + f"{plan.share:.0%} of memory.\n" + noted(notes(plan)) + dumps(table)


def notes(plan: Plan) -> list[Note]:
    """Where the flavor is not quite the model."""
    model = plan.question.model
    name, _ = FLAVORS[model.name]
    found = router_notes(model)
    if name == "llama3" and model.rope_scaling is None:
        found.append(Note("model.rope_scaling", None, 8.0))
    if name == "deepseek_v3" and model.norm_epsilon != 1e-5:
        found.append(Note("model.norm_epsilon", model.norm_epsilon, 1e-5))
    if model.mixture is not None:
        if model.mixture.bias_rate != BIAS_RATE:
            found.append(Note("mixture.bias_rate", model.mixture.bias_rate, BIAS_RATE))
        if model.mixture.balance_coefficient:
            found.append(Note("mixture.balance_coefficient", model.mixture.balance_coefficient, 0.0))
    return found


def _check(plan: Plan) -> None:
    layout, model = plan.layout, plan.question.model
    lost = Lost(TARGET)
    lost.unless(model.name in FLAVORS, "model", model.name, "its flavors are fixed; use llama3-8b, qwen3-8b or alike")
    name, _ = FLAVORS.get(model.name, ("", ""))
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
