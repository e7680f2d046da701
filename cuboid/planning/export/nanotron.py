"""A plan as a nanotron YAML (main, 2025); the data stages are the user's to add.

https://github.com/huggingface/nanotron
"""

import json
from typing import Any

from cuboid.planning.export.engines import Lost
from cuboid.planning.plan import Plan
from cuboid.spec.model import ModelSpec

TARGET = "nanotron"
ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}


def export(plan: Plan) -> str:
    """The YAML text."""
    _check(plan)
    head = (
        f"# {plan.question.model.name} on {plan.question.cluster.name}: {plan.layout}\n"
        f"# For {TARGET}; predicted: {plan.seconds:.4g} s a step, "
        f"{plan.memory_fraction:.0%} of memory. Add data_stages.\n"
    )
    return head + "\n".join(_yaml(_config(plan))) + "\n"


def _config(plan: Plan) -> dict[str, Any]:
    layout, run, question = plan.layout, plan.run, plan.question
    rate, optimizer = run.learning_rate, run.optimizer
    decay = rate.decay_steps or run.training.steps // 5 if rate.schedule == "wsd" else None
    steps = run.training.steps
    return {
        "general": {"project": "cuboid", "run": question.model.name, "seed": run.training.seed},
        "model": {
            "dtype": "float32" if question.precision == "float32" else "bfloat16",
            "ddp_bucket_cap_mb": 25,
            "init_method": {"std": question.model.initial_std},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(plan),
        },
        "optimizer": {
            "accumulate_grad_in_fp32": True,
            "clip_grad": run.training.gradient_clip,
            "learning_rate_scheduler": {
                "learning_rate": rate.peak,
                "lr_decay_starting_step": steps - decay if decay else None,
                "lr_decay_steps": decay or max(steps - rate.warmup_steps, 1),
                "lr_decay_style": "cosine" if rate.schedule == "cosine" else "linear",
                "lr_warmup_steps": rate.warmup_steps,
                "lr_warmup_style": "linear",
                "min_decay_lr": rate.peak * (1.0 if rate.schedule == "constant" else rate.minimum_ratio),
            },
            "optimizer_factory": {
                "adam_beta1": optimizer.beta1,
                "adam_beta2": optimizer.beta2,
                "adam_eps": optimizer.epsilon,
                "name": "adamW",
                "torch_adam_is_fused": True,
            },
            "weight_decay": optimizer.weight_decay,
            "zero_stage": layout.zero,
        },
        "parallelism": {
            "dp": layout.dp,
            "expert_parallel_size": 1,
            "context_parallel_size": layout.cp,
            "pp": layout.pp,
            "pp_engine": ENGINES.get(layout.schedule, "1f1b"),
            "recompute_layer": layout.recompute == "full",
            "tp": layout.tp,
            "tp_linear_async_communication": layout.sequence_parallel,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        },
        "tokens": {
            "batch_accumulation_per_replica": plan.micro_batches,
            "micro_batch_size": layout.micro_batch,
            "sequence_length": question.sequence,
            "train_steps": steps,
        },
    }


def _model(plan: Plan) -> dict[str, Any]:
    model = plan.question.model
    return {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": model.initial_std,
        "intermediate_size": model.ffn,
        "max_position_embeddings": max(model.max_positions, plan.question.sequence),
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": model.vocab,
    }


def check_model(model: ModelSpec, lost: Lost) -> None:
    """Notes what its llama lacks."""
    llama = model.family == "llama" and model.mixture is None and model.latent is None
    lost.unless(llama, "model", model.name, "it has but a dense llama; use llama2-7b, llama3-8b or alike")
    lost.unless(model.rope_scaling is None, "model.rope_scaling", model.name, "use a model without")


def _check(plan: Plan) -> None:
    layout, model = plan.layout, plan.question.model
    lost = Lost(TARGET)
    lost.unless_equal(layout)
    lost.unless_balanced(layout)
    check_model(model, lost)
    known = layout.schedule in ENGINES or layout.pp == 1
    lost.unless(known, "schedule", layout.schedule, "use schedule=1f1b or schedule=gpipe")
    lost.unless(layout.zero < 2, "zero", layout.zero, "use zero=0 or zero=1")
    hybrid = layout.zero == 1 and layout.shard_size < layout.dp
    lost.unless(not hybrid, "shard", layout.shard, "leave shard out")
    lost.unless(layout.recompute != "selective", "recompute", layout.recompute, "use recompute=none or recompute=full")
    lost.unless(layout.cp == 1, "cp", layout.cp, "its llama has no context parallelism; use cp=1")
    enough = model.kv_heads >= layout.tp
    lost.unless(enough, "tp", layout.tp, f"it copies no key and value heads; use tp={model.kv_heads} or less")
    lost.unless(layout.ep == 1, "ep", layout.ep, "use ep=1")
    lost.unless(not layout.offload, "offload", True, "use offload=false")
    precision = plan.question.precision
    lost.unless(precision in ("bf16", "float32"), "precision", precision, "use precision=bf16")
    some = layout.recompute_layers
    lost.unless(not some, "recompute_layers", some, "use recompute_layers=0")
    lost.refuse()


def _yaml(table: dict[str, Any], indent: str = "") -> list[str]:
    """Nested tables of plain values; JSON's spelling of a value is YAML too."""
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        else:
            text = json.dumps(value)
            if isinstance(value, float) and "." not in text:
                text = text.replace("e", ".0e")  # YAML takes 1e-08 for a string
            lines.append(f"{indent}{key}: {text}")
    return lines
