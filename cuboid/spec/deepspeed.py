"""Runs from a DeepSpeed-style JSON: each key is honoured, noted where it is about DeepSpeed alone, or refused by its
full name; none is dropped silently.

{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1},
 "pipeline": {"stages": 4}, "tensor_parallel": {"autotp_size": 2}}
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from cuboid.errors import UserError, either, nearest_names, nearest_numbers, use
from cuboid.readers import Table
from cuboid.spec.coding import convert, show
from cuboid.spec.layout import Layout, require_positive

NEVER = 10**9
"""Steps after which a loss scale that is given grows."""


@dataclass(frozen=True)
class Only:
    """A key Cuboid honours at these values, because it always works that way."""

    values: tuple[object, ...]


OFF, ON, EITHER = Only((False,)), Only((True,)), Only((True, False))

KEYS: dict[str, type | Only] = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "prescale_gradients": OFF,
    "sequence_parallel_size": int,
    "torch_autocast.enabled": OFF,
    "bf16.enabled": bool,
    "bf16.bf16_master_weights_and_grads": OFF,
    "bf16.bf16_optimizer_states": OFF,
    "fp16.enabled": bool,
    "fp16.initial_scale_power": int,
    "fp16.loss_scale_window": int,
    "fp16.loss_scale": float,
    "fp16.fp16_master_weights_and_grads": OFF,
    "scheduler.type": Only(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")),
    "scheduler.params.warmup_min_lr": Only((0, 0.0)),
    "scheduler.params.last_batch_iteration": Only((-1,)),
    "scheduler.params.warmup_max_lr": float,
    "scheduler.params.warmup_num_steps": int,
    "scheduler.params.warmup_type": Only(("linear",)),
    "scheduler.params.total_num_steps": int,
    "scheduler.params.cos_min_ratio": float,
    "optimizer.type": Only(("AdamW", "Adam")),
    "optimizer.params.lr": float,
    "optimizer.params.betas": list,
    "optimizer.params.eps": float,
    "optimizer.params.weight_decay": float,
    "optimizer.params.adam_w_mode": ON,
    "optimizer.params.amsgrad": OFF,
    "optimizer.params.max_grad_norm": float,
    "zero_optimization.stage": int,
    "zero_optimization.mics_shard_size": int,
    "zero_optimization.overlap_comm": ON,
    "zero_optimization.reduce_scatter": ON,
    "zero_optimization.offload_optimizer.device": Only(("none", "cpu")),
    "zero_optimization.offload_optimizer.pin_memory": EITHER,
    "zero_optimization.offload_optimizer.ratio": Only((1, 1.0)),
    "zero_optimization.offload_param.device": Only(("none",)),
    "zero_optimization.cpu_offload": EITHER,
    "zero_optimization.cpu_offload_param": OFF,
    "zero_optimization.cpu_offload_params": OFF,
    "zero_optimization.zero_hpz_partition_size": Only((1,)),
    "zero_optimization.zero_quantized_weights": OFF,
    "zero_optimization.zero_quantized_gradients": OFF,
    "pipeline.stages": int,
    "pipeline.pipe_degree": int,
    "pipeline.interleave_degree": int,
    "pipeline.partition": Only(("best",)),
    "pipeline.seed_layers": OFF,
    "pipeline.activation_checkpoint_interval": Only((0, 1)),
    "pipeline.pipe_partitioned": ON,
    "pipeline.grad_partitioned": ON,
    "tensor_parallel.autotp_size": int,
    "tensor_parallel.tp_size": int,
    "tensor_parallel.tp_degree": int,
    "activation_checkpointing.partition_activations": EITHER,
    "activation_checkpointing.cpu_checkpointing": OFF,
    "activation_checkpointing.contiguous_memory_optimization": OFF,
    "activation_checkpointing.number_checkpoints": Only((None,)),
    "activation_checkpointing.synchronize_checkpoint_boundary": OFF,
    "activation_checkpointing.profile": OFF,
}
"""Every key that can be honoured -> its type, or the values at which Cuboid does what it asks."""

NOTED = (
    "fp16.(hysteresis|min_loss_scale|auto_cast|consecutive_hysteresis|(fp16_)?opt_level|fp16_scale_tolerance)",
    "bf16.(auto_cast|immediate_grad_update|check_grad_overflow)",
    "zero_optimization.(contiguous_gradients|(reduce|allgather|stage3_prefetch)_bucket_size|allgather_partitions)",
    "zero_optimization.(round_robin_gradients|sub_group_size|ignore_unused_parameters|stage3_.*|load_from_fp32_weights)",
    "zero_optimization.(max_live_parameters|max_reuse_distance|gather_16bit_weights_on_model_save|prefetch_bucket_size)",
    "zero_optimization.((param|model)_persistence_threshold|legacy_stage1|leaf_module.*|module_granularity_threshold)",
    "zero_optimization.(compute_grad_norm|use_all_reduce_for_fetch_params|allgather_sequential|parameter_alignment)",
    "zero_optimization.(zero_quantized_nontrainable_weights|pipeline_loading_checkpoint|override_module_apply)",
    "zero_optimization.(enable_sanity_checks|save_muon_momentum_buffer_in_memory|zenflow(\\..*)?)",
    "zero_optimization.(cpu_offload_use_pin_memory|log_trace_cache_warnings|mics_hierarchical_params_gather)",
    "zero_optimization.(memory_efficient_linear|elastic_checkpoint|use_multi_rank_bucket_allreduce)",
    "zero_optimization.offload_(optimizer|param).(buffer_count|buffer_size|fast_init|pipeline_.*|max_in_cpu|pin_memory)",
    "zero_optimization.offload_(optimizer|param).(nvme_path|super_offload|cpuadam_cores_perc)",
    "tensor_parallel.(dtype|tp_overlap_comm|vocab_parallel_.*|partition_config.*|preset_model|injection_policy.*)",
    "tensor_parallel.(keep_module_on_host|replace_with_kernel_inject)|torch_autocast.(dtype|lower_precision_.*)",
    "optimizer.params.(torch_adam|fused|bias_correction)",
    "(flops_profiler|comms_logger|tensorboard|wandb|csv_monitor|aio|monitor_config)\\..*",
    "zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|memory_breakdown|dump_state|gradient_predivide_factor",
    "compile\\..*|data_types\\..*|nebula\\..*|autotuning\\..*|timers\\..*|hybrid_engine\\..*|checkpoint\\..*",
    "graph_harvesting|use_data_before_expert_parallel_|sparse_gradients|fp32_allreduce|dataloader_drop_last",
    "disable_python_gc|vocabulary_size|managed_gradient_accumulation|use_data_before_expert_parallelism",
    "(amp|curriculum_learning|data_efficiency|progressive_layer_drop|compression_training|elasticity)\\..*",
    "(eigenvalue|quantize_training|sparse_attention|weight_quantization)\\..*",
    "checkpoint.use_node_local_storage|checkpoint.load_universal|disable_allgather|communication_data_type|seq_parallel.*",
)
"""Patterns of keys about DeepSpeed's own buffers, checks and logs, and how fast its loss scale falls: of no meaning
here."""

OTHERWISE = {
    "prescale_gradients": "gradients are divided after they are summed",
    "zero_optimization.overlap_comm": "communication overlaps with computing all the same",
    "zero_optimization.reduce_scatter": "gradients are reduced and scattered all the same",
    "zero_optimization.zero_hpz_partition_size": "there are no second copies of parameters in a node",
    "zero_optimization.zero_quantized_weights": "weights are sent as they are",
    "zero_optimization.zero_quantized_gradients": "gradients are sent as they are",
    "zero_optimization.offload_optimizer.device": "the optimizer's state goes to CPU memory",
    "zero_optimization.offload_optimizer.ratio": "all of the optimizer's state goes to CPU memory",
    "zero_optimization.offload_param.device": "parameters stay on the accelerator; use zero_optimization.stage=3 and "
    "enough of them",
    "zero_optimization.cpu_offload_param": "parameters stay on the accelerator",
    "zero_optimization.cpu_offload_params": "parameters stay on the accelerator",
    "scheduler.params.warmup_min_lr": "the learning rate rises from 0",
    "scheduler.params.warmup_type": "the learning rate rises linearly",
    "scheduler.params.last_batch_iteration": "a run begins at its first step, or where its checkpoint ended",
    "pipeline.partition": "stages are cut where they take the same time",
    "pipeline.seed_layers": "layers are drawn from the run's seed",
    "pipeline.activation_checkpoint_interval": "every layer is recomputed",
    "pipeline.pipe_partitioned": "tensor-parallel ranks send their part where sequences are split",
    "pipeline.grad_partitioned": "tensor-parallel ranks send their part where sequences are split",
    "activation_checkpointing.cpu_checkpointing": "what recomputation starts from stays on the accelerator",
    "activation_checkpointing.contiguous_memory_optimization": "the allocator decides",
    "activation_checkpointing.number_checkpoints": "every layer is recomputed from its input",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing waits there",
    "activation_checkpointing.profile": "see cuboid report for times",
}
"""Keys whose other values say how DeepSpeed computes the same, or nearly -> how it is done here, which is noted."""

CHANGED = {
    "amp": "use fp16.enabled=true",
    "curriculum_learning": "sequences have one length",
    "data_efficiency": "every token of every layer is trained",
    "progressive_layer_drop": "every layer is trained",
    "compression_training": "nothing is pruned or quantized",
    "elasticity": "give train_batch_size and train_micro_batch_size_per_gpu",
    "eigenvalue": "nothing is quantized",
    "quantize_training": "nothing is quantized",
    "sparse_attention": "attention is dense",
    "weight_quantization": "nothing is quantized",
}
"""Sections that change what is trained, where they are on -> what there is instead."""

ALIASES = {"bfloat16": "bf16"}
"""Old names of sections."""


def run_table_from_deepspeed(config: Mapping[str, Any], world_size: int | None = None) -> Table:
    """What a DeepSpeed config says of a run, as `build_run` takes it; the model is not in such a config."""
    found, _ = _read(config)
    layout = _layout(found, world_size)
    table: Table = {
        "layout": str(layout),
        "training": {
            "global_batch": layout.dp * layout.micro_batch * _accumulation(found, layout),
            **_precision(found),
            # What DeepSpeed does where the config says nothing.
            "gradient_clip": found.get("gradient_clipping", found.get("optimizer.params.max_grad_norm", 0.0)),
        },
    }
    if any(key.startswith(("optimizer.", "scheduler.")) for key in found):
        table |= _optimizer(found)
    if steps := found.get("scheduler.params.total_num_steps"):
        table["training"]["steps"] = steps
    output = {"log_every": found.get("steps_per_print"), "keep_timing": found.get("wall_clock_breakdown")}
    if kept := {key: value for key, value in output.items() if value is not None}:
        table["output"] = kept
    return table


def notes_from_deepspeed(config: Mapping[str, Any]) -> list[str]:
    """What of a config the run does not follow, one sentence each."""
    return _read(config)[1]


def _precision(found: Table) -> Table:
    if found.get("bf16.enabled"):
        if found.get("fp16.enabled"):
            raise UserError("bf16.enabled=true and fp16.enabled=true are two precisions; use one of them")
        return {"precision": "bf16"}
    if not found.get("fp16.enabled"):
        return {"precision": "float32"}
    first, window = found.get("fp16.initial_scale_power", 16), found.get("fp16.loss_scale_window", 1000)
    if fixed := found.get("fp16.loss_scale"):
        return {"precision": "fp16", "loss_scale": fixed, "loss_scale_steps": NEVER}
    return {"precision": "fp16", "loss_scale": 2.0**first, "loss_scale_steps": window}


MOST_KEYS = 5000
"""Each unknown one is compared with all that are known."""


def _read(config: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """Dotted key -> value, for the keys that can be honoured, and notes; one sentence names all that cannot."""
    found: Table = {}
    refused, ignored, open_keys, strange, otherwise = _sections(config), [], [], [], []
    empty = []
    pairs = list(islice(_flatten(_spelled(config)), MOST_KEYS + 1))
    if len(pairs) > MOST_KEYS:
        raise UserError(f"a config of more than {MOST_KEYS:,} keys is none of DeepSpeed's, which has some hundreds")
    for key, value in pairs:
        kind = KEYS.get(key)
        if value is None and kind != Only((None,)):
            empty.append(key)
        elif key not in KEYS and any(re.fullmatch(pattern, key) for pattern in NOTED):
            ignored.append(key)
        elif value == "auto" and kind is not None:
            open_keys.append(key)
        elif kind is None and not _known_section(key):
            strange.append(key)
        elif kind is None:
            near = either(nearest_names(key, KEYS, count=1))
            refused.append(f"{key}={show(value)} (unknown; {near} is known)")
        elif isinstance(kind, Only):
            # 1 == True in Python, and they are not the same in JSON.
            works = any(value == allowed and type(value) is type(allowed) for allowed in kind.values)
            if works:
                found[key] = value
            elif key in OTHERWISE and type(value) in (str, bool, int, float):
                otherwise.append(f"{key}={show(value)}: {OTHERWISE[key]}")
                found |= {key: "cpu"} if key == "zero_optimization.offload_optimizer.device" else {}
            else:
                instead = either(f"{key}={show(allowed)}" for allowed in kind.values)
                refused.append(f"{key}={show(value)} (use {instead})")
        else:
            found[key] = value if kind is list else convert(_meant(value, kind), kind, key)
    refused = _of_the_optimizer(refused)
    if refused:
        raise UserError(f"DeepSpeed keys that cannot be honoured: {', '.join(refused)}; change or remove them")
    notes = [f"{', '.join(ignored)}: about DeepSpeed's own buffers, checks and logs; not used here"] if ignored else []
    notes += [f"{', '.join(strange)}: no keys of DeepSpeed; not used"] if strange else []
    notes += [f"{', '.join(empty)}: null, as if not there"] if empty else []
    if open_keys:
        found |= _opened(found, open_keys)
        taken = (f"{key}={show(found[key])}" if key in found else f"{key} as by default" for key in open_keys)
        notes.append(f'"auto" has no trainer to fill it in; taken: {", ".join(taken)}; change it with --set')
    return found, notes + otherwise + _silent(found)


def _spelled(config: Mapping[str, Any]) -> Table:
    """The config in the spelling of today."""
    table = {ALIASES.get(key, key): value for key, value in config.items()}
    zero = table.get("zero_optimization")
    if isinstance(zero, bool):
        table["zero_optimization"] = {"stage": int(zero)}
    return table


def _meant(value: object, kind: type | Only) -> object:
    """What is meant by a value: in JSON 1e5 is no integer, and some write "8" and "true"."""
    if kind in (int, float) and isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", value):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _sections(config: Mapping[str, Any]) -> list[str]:
    """Sections that change what is trained and are on."""

    def on(value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        own = value.get("enabled")
        return own is True or (own is None and any(on(each) for each in value.values()))

    def whole(key: str) -> bool:
        return key in ("sparse_attention", "elasticity") and "enabled" not in config[key]

    found = [f"{key} ({words})" for key, words in CHANGED.items() if key in config and (on(config[key]) or whole(key))]
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("zenflow"):
        found.append("zero_optimization.zenflow (every gradient is used in its own step)")
    return found


def _known_section(key: str) -> bool:
    """Whether the first word of a key is one of DeepSpeed's, or so near to one that it was meant."""
    sections = {known.split(".")[0] for known in KEYS} | set(CHANGED)
    return bool(get_close_matches(key.split(".")[0], sections, n=1, cutoff=0.75))


def _of_the_optimizer(refused: list[str]) -> list[str]:
    """Of an optimizer or a scheduler that there is not, its own parameters need no words."""
    for section in ("optimizer", "scheduler"):
        if any(each.startswith(f"{section}.type=") for each in refused):
            refused = [each for each in refused if not each.startswith(f"{section}.params.")]
    return refused


def _silent(found: Table) -> list[str]:
    """What DeepSpeed would do by default, and Cuboid does not."""
    notes = []
    if "scheduler.type" in found and "scheduler.params.warmup_type" not in found:
        notes.append(
            f"scheduler.params.warmup_type: {OTHERWISE['scheduler.params.warmup_type']}; DeepSpeed's default is log"
        )
    if found.get("fp16.enabled") and found.get("fp16.loss_scale"):
        notes.append(f"fp16.loss_scale={found['fp16.loss_scale']:g}: it begins so, and falls where gradients overflow")
    return notes


def _opened(found: Table, keys: list[str]) -> Table:
    """What stands for "auto" where nothing else in the config tells it."""
    values: Table = {}
    if "train_micro_batch_size_per_gpu" in keys and "train_batch_size" not in found:
        values["train_micro_batch_size_per_gpu"] = 1
    if "bf16.enabled" in keys and not found.get("fp16.enabled"):
        values["bf16.enabled"] = True
    elif "fp16.enabled" in keys and not found.get("bf16.enabled"):
        values["fp16.enabled"] = True
    return values


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        # An empty section says nothing, but its name must still be known.
        empty = value == {} and any(known.startswith(f"{prefix}{key}.") for known in KEYS)
        if isinstance(value, Mapping) and (value or empty):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _layout(found: Table, world_size: int | None) -> Layout:
    tp = _one_of(found, "tensor_parallel.autotp_size", "tensor_parallel.tp_size", "tensor_parallel.tp_degree")
    pp = _one_of(found, "pipeline.stages", "pipeline.pipe_degree")
    vpp = found.get("pipeline.interleave_degree", 1)
    require_positive("pipeline.interleave_degree", vpp)
    cp = found.get("sequence_parallel_size", 1)
    require_positive("sequence_parallel_size", cp)
    checkpointed = any(key.startswith("activation_checkpointing.") for key in found)
    dp = _replicas(found, tp * pp * cp, world_size)
    stage = found.get("zero_optimization.stage", 0)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_method="ulysses" if cp > 1 else "ring",
        zero=stage,
        shard=max(found.get("zero_optimization.mics_shard_size", 0), 0),
        recompute="full" if checkpointed or found.get("pipeline.activation_checkpoint_interval") else "none",
        micro_batch=_micro_batch(found, dp),
        offload=found.get("zero_optimization.offload_optimizer.device") == "cpu"
        or found.get("zero_optimization.cpu_offload", False),
        **({"schedule": "interleaved", "vpp": vpp} if vpp > 1 else {}),
    )


def _one_of(found: Table, *keys: str) -> int:
    """The value of the one key of several spellings that is there; 1 where none is."""
    given = {key: found[key] for key in keys if key in found}
    if len(given) > 1:
        raise UserError(
            f"{' and '.join(f'{key}={value}' for key, value in given.items())} say the same thing; keep one"
        )
    for key, value in given.items():
        require_positive(key, value)
    return next(iter(given.values()), 1)


def _replicas(found: Table, model_ranks: int, world_size: int | None) -> int:
    """dp, from the number of ranks, or from the three batch sizes when all are there."""
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if key in found:
            require_positive(key, found[key])
    if world_size is not None:
        require_positive("world_size", world_size)
        if world_size % model_ranks:
            near = [world_size // model_ranks * model_ranks, (world_size // model_ranks + 1) * model_ranks]
            raise UserError(
                f"world_size={world_size} does not divide by tensor × pipeline × sequence = {model_ranks}; "
                f"{use('world_size', [number for number in near if number])}"
            )
        return world_size // model_ranks
    batch, micro = found.get("train_batch_size"), found.get("train_micro_batch_size_per_gpu")
    if batch is None or micro is None or "gradient_accumulation_steps" not in found:
        raise UserError(
            "world_size is missing and the three batch sizes are not all there to tell it; "
            f"give world_size as a multiple of tensor × pipeline × sequence = {model_ranks}"
        )
    _require_product(batch, micro, found["gradient_accumulation_steps"])
    return int(batch // (micro * found["gradient_accumulation_steps"]))


def _require_product(batch: int, micro: int, accumulation: int) -> None:
    unit = micro * accumulation
    if batch % unit:
        near = nearest_numbers(batch, lambda number: number % unit == 0, unit, batch + unit)
        raise UserError(
            f"train_batch_size={batch} does not divide by train_micro_batch_size_per_gpu={micro} × "
            f"gradient_accumulation_steps={accumulation}; {use('train_batch_size', near)}"
        )


def _micro_batch(found: Table, dp: int) -> int:
    """DeepSpeed's rule: what two of the three batch sizes say of the third, and no accumulation where that is open."""
    if "train_micro_batch_size_per_gpu" in found:
        return int(found["train_micro_batch_size_per_gpu"])
    if "train_batch_size" not in found:
        raise UserError("train_micro_batch_size_per_gpu is missing and train_batch_size too; give one of them")
    _require_divides(found, dp * found.get("gradient_accumulation_steps", 1))
    return int(found["train_batch_size"] // (dp * found.get("gradient_accumulation_steps", 1)))


def _accumulation(found: Table, layout: Layout) -> int:
    if "train_batch_size" not in found:
        return int(found.get("gradient_accumulation_steps", 1))
    unit = layout.dp * layout.micro_batch
    _require_divides(found, unit)
    derived = int(found["train_batch_size"] // unit)
    given = found.get("gradient_accumulation_steps", derived)
    if given != derived:
        raise UserError(
            f"train_batch_size={found['train_batch_size']} is not "
            f"train_micro_batch_size_per_gpu={layout.micro_batch} × "
            f"gradient_accumulation_steps={given} × dp={layout.dp}; {use('train_batch_size', [unit * given])}"
        )
    return derived


def _require_divides(found: Table, unit: int) -> None:
    batch = found["train_batch_size"]
    if batch % unit:
        near = nearest_numbers(batch, lambda number: number % unit == 0, unit, batch + unit)
        raise UserError(f"train_batch_size={batch} does not divide by {unit}; {use('train_batch_size', near)}")


def _optimizer(found: Table) -> Table:
    """AdamW, with the defaults of DeepSpeed's own where the config is silent."""
    betas = found.get("optimizer.params.betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise UserError(f"optimizer.params.betas={show(betas)} is not a pair; use betas=[0.9, 0.95]")
    return {
        "optimizer": {
            "beta1": convert(betas[0], float, "optimizer.params.betas[0]"),
            "beta2": convert(betas[1], float, "optimizer.params.betas[1]"),
            "epsilon": found.get("optimizer.params.eps", 1e-8),
            "weight_decay": found.get("optimizer.params.weight_decay", 0.0),
        },
        "learning_rate": {"peak": found.get("optimizer.params.lr", 1e-3), **_schedule(found)},
    }


def _schedule(found: Table) -> Table:
    """Of the learning rate; without a scheduler DeepSpeed keeps it. A decay ends with training.steps."""
    kind = found.get("scheduler.type")
    if kind is None:
        return {"schedule": "constant"}
    warmup = found.get("scheduler.params.warmup_num_steps", 1000)
    table: Table = {"warmup_steps": warmup}
    if "scheduler.params.warmup_max_lr" in found:
        table["peak"] = found["scheduler.params.warmup_max_lr"]
    if kind == "WarmupLR":
        return {**table, "schedule": "constant"}
    if kind == "WarmupCosineLR":
        return {**table, "schedule": "cosine", "minimum_ratio": found.get("scheduler.params.cos_min_ratio", 0.0001)}
    total = found.get("scheduler.params.total_num_steps", 0)
    return {**table, "schedule": "wsd", "minimum_ratio": 0.0, "decay_steps": max(total - warmup, 0)}
