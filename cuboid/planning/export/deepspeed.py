"""A plan as a DeepSpeed 0.19 JSON; the number of stages is also an argument of `PipelineModule` in the user's code.

https://www.deepspeed.ai/docs/config-json
"""

import json
from typing import Any

from cuboid.planning.export.engines import Lost
from cuboid.planning.plan import Plan
from cuboid.spec.run import Run

TARGET = "DeepSpeed 0.19"


def export(plan: Plan) -> str:
    """The JSON text."""
    _check(plan)
    layout, run = plan.layout, plan.run
    config: dict[str, Any] = {
        "train_batch_size": plan.question.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": run.training.gradient_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": run.learning_rate.peak,
                "betas": [run.optimizer.beta1, run.optimizer.beta2],
                "eps": run.optimizer.epsilon,
                "weight_decay": run.optimizer.weight_decay,
            },
        },
        **_schedule(run),
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
    }
    if plan.question.precision in ("bf16", "fp16"):
        config[plan.question.precision] = {"enabled": True}
    if layout.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.tp > 1:
        # It checks this against all ranks, tensor-parallel ones too; omitted, it follows from the other two.
        del config["train_batch_size"]
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    if layout.pp > 1:
        config["pipeline"] = {
            "stages": layout.pp,
            "activation_checkpoint_interval": 1 if layout.recompute == "full" else 0,
            "pipe_partitioned": True,
            "grad_partitioned": True,
        }
    if layout.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": layout.tp > 1}
    return json.dumps(config, indent=2) + "\n"


def _schedule(run: Run) -> dict[str, Any]:
    """Of the learning rate; its warm-up takes two steps at least."""
    rate = run.learning_rate
    if rate.schedule == "constant" and not rate.warmup_steps:
        return {}
    params: dict[str, Any] = {"warmup_num_steps": max(rate.warmup_steps, 1), "warmup_type": "linear"}
    if rate.schedule == "constant":
        return {"scheduler": {"type": "WarmupLR", "params": {**params, "warmup_max_lr": rate.peak}}}
    params |= {"total_num_steps": run.training.steps, "cos_min_ratio": rate.minimum_ratio}
    return {"scheduler": {"type": "WarmupCosineLR", "params": params}}


def _check(plan: Plan) -> None:
    layout = plan.layout
    lost = Lost(TARGET)
    lost.unless_equal(layout)
    lost.unless_balanced(layout)
    lost.unless(layout.schedule == "1f1b" or layout.pp == 1, "schedule", layout.schedule, "use schedule=1f1b")
    lost.unless(not layout.sequence_parallel, "sequence_parallel", True, "use sequence_parallel=false or tp=1")
    lost.unless(layout.cp == 1, "cp", layout.cp, "its sequence_parallel_size is Ulysses, not a ring; use cp=1")
    lost.unless(layout.zero < 2 or layout.pp == 1, "zero", layout.zero, "with pp > 1 use zero=0 or zero=1")
    lost.unless(layout.zero < 3 or layout.tp == 1, "zero", layout.zero, "with tp > 1 use zero=2 or less")
    splits = layout.tp == 1 or layout.pp == 1
    lost.unless(splits, "tp", layout.tp, "its automatic tensor parallelism has no pipeline; with pp > 1 use tp=1")
    lost.unless(layout.recompute != "selective", "recompute", layout.recompute, "use recompute=none or recompute=full")
    hybrid = layout.zero > 0 and layout.shard_size < layout.dp
    lost.unless(not hybrid, "shard", layout.shard, "no shards over a part of the replicas since 0.19.7; use shard=0")
    lost.unless(layout.zero > 0 or not layout.offload, "offload", True, "with zero=0 use offload=false, or use zero=1")
    rate = plan.run.learning_rate
    lost.unless(rate.schedule != "wsd", "learning_rate.schedule", rate.schedule, "use schedule=cosine or constant")
    precision = plan.question.precision
    lost.unless(precision != "fp8", "precision", precision, "use precision=bf16")
    some = layout.recompute_layers
    lost.unless(not some, "recompute_layers", some, "use recompute_layers=0")
    lost.refuse()
