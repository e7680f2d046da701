"""What Megatron-LM makes of exported scripts: `python read_megatron.py CHECKOUT FILE…` prints {file: fields or error}.

Bash runs each script, with a `torchrun` that prints its words; Megatron's own parser, its `validate_args` and its
model's configuration read them. Replaced is what a machine without GPUs lacks: the properties of an H100, and the
version of Transformer Engine, whose kernels never run here.
"""

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

METHODS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "hybrid"}
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
TRANSFORMER_ENGINE = "2.9.0"


def pretend() -> None:
    """An H100 with a recent Transformer Engine."""
    import torch
    import typing_extensions

    class Properties:
        major, minor, name, multi_processor_count, total_memory = 9, 0, "H100", 132, 80 * 2**30

    torch.cuda.get_device_properties = lambda *_: Properties()  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "H100"
    torch.cuda.current_device = lambda: 0
    from packaging.version import Version

    typing.override = typing_extensions.override  # type: ignore[attr-defined] # Python 3.11 has none
    import megatron.core.utils

    megatron.core.utils._te_version = Version(TRANSFORMER_ENGINE)


def words_of(script: Path) -> tuple[list[str], dict[str, str]]:
    """What the script passes to torchrun, and in which environment."""
    with tempfile.TemporaryDirectory() as folder:
        fake = Path(folder) / "torchrun"
        fake.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        )
        fake.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    words, environment = json.loads(done.stdout)
    return words, environment


def read(script: Path) -> dict[str, Any]:
    """The fields of one script."""
    words, environment = words_of(script)
    program = words.index("pretrain_gpt.py")
    launch = dict(zip(words[:program:2], words[1:program:2], strict=False))
    world = int(launch["--nproc-per-node"]) * int(launch["--nnodes"])
    os.environ.update({"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"})
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    from megatron.training import arguments

    # The fused rotation is a kernel of Transformer Engine, which is not here; what it computes is the same.
    sys.argv = ["pretrain_gpt.py", *words[program + 1 :], "--no-rope-fusion"]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    return {**layout(args, config), **model(args, config), **training(args)}


def layout(args: Any, config: Any) -> dict[str, Any]:
    """How work is divided."""
    dp = args.data_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size or 1
    zero = 1 if args.use_distributed_optimizer else 0
    if getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_custom_fsdp", False):
        zero = STRATEGIES[args.data_parallel_sharding_strategy]
    method = args.cp_comm_type[0] if args.context_parallel_size > 1 else None
    recompute = args.recompute_granularity or "none"
    if recompute == "full":
        assert (args.recompute_method, args.recompute_num_layers) == ("uniform", 1), "not every layer"
    elif recompute == "selective":
        assert config.recompute_modules == ["core_attn"], config.recompute_modules
    found = {
        "world": args.world_size,
        "dp": dp,
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": config.expert_model_parallel_size,
        "sequence_parallel": bool(config.sequence_parallel),
        "zero": zero,
        "shard": dp // args.num_distributed_optimizer_instances if zero else 1,
        "offload": bool(args.optimizer_cpu_offload) and args.optimizer_offload_fraction == 1.0,
        "micro_batch": args.micro_batch_size,
        "global_batch": args.global_batch_size,
        "micro_batches": args.global_batch_size // (args.micro_batch_size * dp),
        "sequence": args.seq_length,
        "recompute": recompute,
        "cp_method": METHODS[method] if method else None,
        "stages": stages(args, config, vpp),
        "schedule": None if args.pipeline_model_parallel_size == 1 else "interleaved" if vpp > 1 else "1f1b",
        "precision": "fp8" if config.fp8 else "bf16" if args.bf16 else "fp16" if args.fp16 else "float32",
    }
    if method == "a2a+p2p":
        found["cp_inner"] = args.hierarchical_context_parallel_sizes[0]
    if config.num_moe_experts:
        assert config.expert_tensor_parallel_size == 1
    return found


def stages(args: Any, config: Any, vpp: int) -> list[int]:
    """Layers of each stage, first to last."""
    ranks = args.pipeline_model_parallel_size
    given = getattr(config, "pipeline_model_parallel_layout", None)
    if given is None:
        assert config.num_layers % (ranks * vpp) == 0, "layers do not divide"
        return [config.num_layers // (ranks * vpp)] * (ranks * vpp)
    rows = given.layout  # rank -> chunk -> names of modules
    parts = [rows[rank][chunk] for chunk in range(vpp) for rank in range(ranks)]
    return [sum(module.name == "decoder" for module in part) for part in parts]


def model(args: Any, config: Any) -> dict[str, Any]:
    """What the model computes."""
    found = {
        "model.layers": config.num_layers,
        "model.hidden": config.hidden_size,
        "model.heads": config.num_attention_heads,
        "model.ffn": config.ffn_hidden_size,
        "model.vocab": args.vocab_size,
        "model.norm": config.normalization.lower(),
        "model.norm_epsilon": config.layernorm_epsilon,
        "model.activation": "swiglu" if config.gated_linear_unit else "gelu",
        "model.positions": {"rope": "rope", "learned_absolute": "learned"}[args.position_embedding_type],
        "model.tie_embeddings": not args.untie_embeddings_and_output_weights,
        "model.qkv_bias": bool(config.add_bias_linear or config.add_qkv_bias),
        "model.mlp_bias": bool(config.add_bias_linear),
        "model.initial_std": config.init_method_std,
        "model.dropout": max(config.attention_dropout, config.hidden_dropout),
    }
    assert args.max_position_embeddings >= args.seq_length
    if found["model.positions"] == "rope":
        found["model.rope_theta"] = float(args.rotary_base)
        found["model.rope_scaling"] = args.rope_scaling_factor if args.use_rope_scaling else None
    if args.multi_latent_attention:
        found |= {
            "latent.q_rank": config.q_lora_rank,
            "latent.kv_rank": config.kv_lora_rank,
            "latent.qk_nope_dim": config.qk_head_dim,
            "latent.qk_rope_dim": config.qk_pos_emb_head_dim,
            "latent.v_dim": config.v_head_dim,
            "latent.norms": bool(config.qk_layernorm),
            "yarn.factor": config.rotary_scaling_factor if config.rope_type == "yarn" else None,
        }
        if config.rope_type == "yarn":
            for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
                found[f"yarn.{name}"] = float(getattr(config, name))
            original = getattr(config, "original_max_position_embeddings", None)  # named otherwise in old versions
            found["yarn.original_positions"] = original or config.max_position_embeddings
        found["model.rope_theta"] = float(config.rotary_base)
    else:
        found["model.kv_heads"] = config.num_query_groups or config.num_attention_heads
        found["model.head_dim"] = config.kv_channels
        found["model.qk_norm"] = bool(config.qk_layernorm)
    return found | (mixture(args, config) if config.num_moe_experts else {})


def mixture(args: Any, config: Any) -> dict[str, Any]:
    """Experts and their router."""
    kinds = {"seq_aux_loss": "sequence", "global_aux_loss": "global_batch", "none": None}
    kind = config.moe_router_load_balancing_type
    kind = kind[0] if isinstance(kind, list) else kind
    coefficient = config.moe_aux_loss_coeff
    coefficient = coefficient[0] if isinstance(coefficient, list) else coefficient
    frequency = config.moe_layer_freq
    frequency = ast.literal_eval(frequency) if isinstance(frequency, str) else frequency
    dense = frequency.index(1) if isinstance(frequency, list) else 0
    assert isinstance(frequency, int) or frequency == [0] * dense + [1] * (config.num_layers - dense)
    sums_to_one = config.moe_router_score_function == "sigmoid" or not config.moe_router_pre_softmax
    return {
        "mixture.experts": config.num_moe_experts,
        "mixture.top_k": config.moe_router_topk,
        "mixture.expert_ffn": config.moe_ffn_hidden_size,
        "mixture.shared_ffn": config.moe_shared_expert_intermediate_size or 0,
        "mixture.first_dense_layers": dense,
        "mixture.scoring": config.moe_router_score_function,
        "mixture.normalized": sums_to_one,
        "mixture.scaling": config.moe_router_topk_scaling_factor or 1.0,
        "mixture.groups": config.moe_router_num_groups or 1,
        "mixture.top_groups": config.moe_router_group_topk or 1,
        "mixture.router_bias": bool(config.moe_router_enable_expert_bias),
        "mixture.bias_rate": config.moe_router_bias_update_rate if config.moe_router_enable_expert_bias else 0.0,
        "mixture.balance_over": kinds[kind],
        "mixture.balance_coefficient": coefficient if kinds[kind] else 0.0,
        "mixture.z_coefficient": config.moe_z_loss_coeff or 0.0,
        "mixture.capacity_factor": config.moe_expert_capacity_factor or 0.0,
    }


def training(args: Any) -> dict[str, Any]:
    """Optimizer and learning rate."""
    return {
        "steps": args.train_iters,
        "learning_rate": args.lr,
        "least_learning_rate": args.min_lr,
        "decay": {"WSD": "wsd"}.get(args.lr_decay_style, args.lr_decay_style),
        "warmup_steps": args.lr_warmup_iters,
        "weight_decay": args.weight_decay,
        "betas": [args.adam_beta1, args.adam_beta2],
        "epsilon": args.adam_eps,
        "gradient_clip": args.clip_grad,
    }


def main() -> None:
    checkout, files = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    sys.path.insert(0, checkout)
    pretend()
    found: dict[str, Any] = {}
    for file in files:
        with tempfile.TemporaryFile("w+") as said:
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    found[file.name] = read(file)
            except (Exception, SystemExit) as error:
                said.seek(0)
                last = said.read().strip()[-300:] if isinstance(error, SystemExit) else ""
                found[file.name] = {"error": f"{type(error).__name__}: {error} {last}".strip()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
