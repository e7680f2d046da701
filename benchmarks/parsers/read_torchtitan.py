"""What torchtitan makes of exported files: `python read_torchtitan.py FILE@WORLD…` prints {file: fields or error}.

Its `ConfigManager` reads each file, `ParallelDims` checks the ranks, the flavor says what the model is, and torch's own
schedule is built with stages that hold nothing.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}


class Stage:
    """As much of a pipeline stage as a schedule asks for when it is built."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_size, self.num_stages = index, ranks, stages
        self.group_rank, self.has_backward, self.device, self.group = 0, True, "cpu", None
        self.is_first, self.is_last, self.submod = index == 0, index == stages - 1, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def read(file: Path, world: int) -> dict[str, Any]:
    """The fields of one file."""
    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    register(file, config.experimental.custom_import)
    parallel, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree,
        dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree,
        etp=parallel.expert_tensor_parallel_degree,
        world_size=world,
    )
    spec = get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    dp = dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % (training.local_batch_size * dp) == 0
    accumulated = training.global_batch_size // (training.local_batch_size * dp)
    micro_batch = parallel.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    assert dims.pp == 1 or (accumulated == 1 and spec.pipelining_fn is not None), "no pipeline of this model"
    sharded = dims.dp_shard > 1 or dims.cp > 1
    kept = {"always": 3, "never": 2}[parallel.fsdp_reshard_after_forward]
    assert not (parallel.disable_loss_parallel or parallel.enable_async_tensor_parallel)
    checkpoint = config.activation_checkpoint
    assert checkpoint.mode != "selective" or checkpoint.selective_ac_option == "op"
    return {
        "world": world,
        "dp": dp,
        "tp": dims.tp,
        "pp": dims.pp,
        "cp": dims.cp,
        "ep": dims.ep,
        "sequence_parallel": dims.tp > 1,
        "zero": kept if sharded else 0,
        "shard": dims.dp_shard if sharded else 1,
        "offload": training.enable_cpu_offload,
        "micro_batch": micro_batch,
        "global_batch": training.global_batch_size,
        "micro_batches": training.global_batch_size // (micro_batch * dp),
        "sequence": training.seq_len,
        "recompute": checkpoint.mode,
        "cp_method": parallel.context_parallel_rotate_method if dims.cp > 1 else None,
        "precision": "fp8" if config.model.converters else precision(training),
        **pipeline(config, dims.pp, training.local_batch_size // micro_batch),
        **model(config.model.name, arguments),
        "steps": training.steps,
        "learning_rate": config.optimizer.lr,
        "least_learning_rate": config.optimizer.lr * config.lr_scheduler.min_lr_factor,
        "decay": config.lr_scheduler.decay_type,
        "warmup_steps": config.lr_scheduler.warmup_steps,
        "weight_decay": config.optimizer.weight_decay,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "epsilon": config.optimizer.eps,
        "gradient_clip": training.max_norm,
    }


def register(file: Path, module: str) -> None:
    """Runs what the head of the file says belongs into the module that its training imports."""
    lines = [line[4:] for line in file.read_text().splitlines() if line.startswith("#   ")]
    assert bool(lines) == bool(module)
    exec("\n".join(lines), {})


def precision(training: Any) -> str:
    assert training.mixed_precision_reduce == "float32"
    return {"bfloat16": "bf16", "float32": "float32"}[training.mixed_precision_param]


def pipeline(config: Any, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Schedule and stages."""
    if ranks == 1:
        return {"schedule": None, "stages": None}
    name = config.parallelism.pipeline_parallel_schedule
    parts = config.parallelism.module_fqns_per_model_part
    kind = get_schedule_class(name)
    own = [Stage(index, ranks, len(parts)) for index in range(0, len(parts), ranks)]
    several = issubclass(kind, PipelineScheduleMulti)
    if SCHEDULES[name.lower()] in ("zbv", "dualpipev"):
        own = [Stage(0, ranks, len(parts)), Stage(len(parts) - 1, ranks, len(parts))]
    kind(own if several else own[0], n_microbatches=micro_batches, loss_fn=None, scale_grads=False)
    assert parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "output"]
    layers = [[name for name in part if name.startswith("layers.")] for part in parts]
    flat = [name for part in layers for name in part]
    assert flat == [f"layers.{index}" for index in range(len(flat))]
    return {"schedule": SCHEDULES[name.lower()], "stages": [len(part) for part in layers]}


def model(name: str, arguments: Any) -> dict[str, Any]:
    """What the flavor computes."""
    found = {
        "model.layers": arguments.n_layers,
        "model.hidden": arguments.dim,
        "model.heads": arguments.n_heads,
        "model.vocab": arguments.vocab_size,
        "model.norm_epsilon": arguments.norm_eps,
        "model.rope_theta": float(arguments.rope_theta),
    }
    if name == "deepseek_v3":
        found |= {
            "model.ffn": arguments.inter_dim,
            "latent.q_rank": arguments.q_lora_rank,
            "latent.kv_rank": arguments.kv_lora_rank,
            "latent.qk_nope_dim": arguments.qk_nope_head_dim,
            "latent.qk_rope_dim": arguments.qk_rope_head_dim,
            "latent.v_dim": arguments.v_head_dim,
            "mixture.expert_ffn": arguments.moe_inter_dim,
            "mixture.shared_ffn": arguments.moe_inter_dim * arguments.moe_args.num_shared_experts,
            "mixture.first_dense_layers": arguments.n_dense_layers,
            "yarn.factor": float(arguments.rope_factor),
            "yarn.mscale_all_dim": arguments.mscale,
            "yarn.beta_fast": float(arguments.beta_fast),
            "yarn.beta_slow": float(arguments.beta_slow),
            "yarn.original_positions": arguments.original_seq_len,
        }
        return found | mixture(arguments.moe_args)
    found["model.kv_heads"] = arguments.n_kv_heads or arguments.n_heads
    if name == "qwen3":
        found |= {"model.head_dim": arguments.head_dim, "model.qk_norm": arguments.qk_norm}
        found |= {"model.ffn": arguments.hidden_dim, "model.tie_embeddings": arguments.enable_weight_tying}
        if arguments.moe_enabled:
            found |= {"mixture.expert_ffn": arguments.moe_inter_dim, "mixture.first_dense_layers": 0}
            found |= mixture(arguments.moe_args)
        return found
    width = int(2 * 4 * arguments.dim / 3)  # as its FeedForward counts
    width = int(arguments.ffn_dim_multiplier * width)
    found["model.ffn"] = arguments.multiple_of * ((width + arguments.multiple_of - 1) // arguments.multiple_of)
    stretch = arguments.rope_scaling_args.scaling_factor
    found["model.rope_scaling"] = None if stretch == 1.0 else stretch
    return found


def mixture(arguments: Any) -> dict[str, Any]:
    """Experts and their router."""
    return {
        "mixture.experts": arguments.num_experts,
        "mixture.top_k": arguments.top_k,
        "mixture.scoring": arguments.score_func,
        "mixture.normalized": arguments.route_norm,
        "mixture.scaling": arguments.route_scale,
        "mixture.groups": arguments.num_expert_groups or 1,
        "mixture.top_groups": arguments.num_limited_groups or 1,
        "mixture.bias_rate": arguments.load_balance_coeff or 0.0,
        "mixture.balance_coefficient": 0.0,  # it has no balancing loss
    }


def main() -> None:
    found: dict[str, Any] = {}
    for word in sys.argv[1:]:
        name, world = word.rsplit("@", 1)
        try:
            found[Path(name).name] = read(Path(name), int(world))
        except (Exception, SystemExit) as error:
            found[Path(name).name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
