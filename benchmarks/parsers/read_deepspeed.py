"""What DeepSpeed makes of exported files: `python read_deepspeed.py FILE@WORLD…` prints {file: fields or error}.

`DeepSpeedConfig` reads each file on one rank of a fake group of that many. `start FILE` on two ranks of gloo (under
torchrun) also calls `deepspeed.initialize` with a small model and runs a step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
WORDS = sys.argv[1:]
sys.argv = sys.argv[:1]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


class Grid:
    """As PipelineModule's: it says how many replicas there are."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def read(file: Path, world: int) -> dict[str, Any]:
    """The fields of one file."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake", verbose=False)
    table = json.loads(file.read_text())
    stages = table.get("pipeline", {}).get("stages", 1)
    tp = table.get("tensor_parallel", {}).get("autotp_size", 1)
    try:
        # A pipeline brings its own count of replicas; else DeepSpeed counts all ranks, those of tensor parallelism too.
        config = DeepSpeedConfig(str(file), mpu=Grid(world // (stages * tp)) if stages > 1 else None)
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
    counted = config.train_batch_size // (tp if stages == 1 else 1)
    experts, parameters = config.expert_parallel_config, config.optimizer_params
    assert tp == config.tensor_parallel_config.autotp_size or tp == 1
    pipeline = config.pipeline
    assert not config.zero_enabled or config.zero_config.overlap_comm
    recompute = "full" if "activation_checkpointing" in table else "none"
    assert stages == 1 or pipeline["activation_checkpoint_interval"] == (recompute == "full")
    offload = config.zero_config.offload_optimizer
    precision = "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "float32"
    return {
        "world": world,
        "dp": world // (stages * tp),
        "tp": tp,
        "pp": pipeline["stages"] if stages > 1 else 1,
        "ep": experts.autoep_size if experts is not None and experts.enabled else 1,
        "zero": config.zero_optimization_stage,
        "offload": offload is not None and offload.device == "cpu",
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "micro_batches": config.gradient_accumulation_steps,
        "global_batch": counted,
        "recompute": recompute,
        "precision": precision,
        "learning_rate": parameters["lr"],
        "least_learning_rate": parameters["lr"] * config.scheduler_params["cos_min_ratio"],
        "decay": {"WarmupCosineLR": "cosine"}[config.scheduler_name],
        "steps": config.scheduler_params["total_num_steps"],
        "weight_decay": parameters["weight_decay"],
        "betas": list(parameters["betas"]),
        "epsilon": parameters["eps"],
        "gradient_clip": config.gradient_clipping,
    }


def small() -> nn.Module:
    """A Llama of two layers: DeepSpeed splits by tensor parallelism only what it knows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))


def start(file: Path) -> dict[str, Any]:
    """A step of a small model on the ranks of this group; what the engine says of itself."""
    import deepspeed

    table = json.loads(file.read_text())
    table["optimizer"]["params"]["torch_adam"] = True  # fused kernels are for GPUs
    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    stages = table.get("pipeline", {}).get("stages", 1)
    micro_batch = table["train_micro_batch_size_per_gpu"]
    width = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(next(iter(table.keys() & {"bf16", "fp16"}), ""))
    if stages > 1:
        from deepspeed.pipe import LayerSpec, PipelineModule

        interval = table["pipeline"]["activation_checkpoint_interval"]
        layers = [LayerSpec(nn.Linear, 32, 32) for _ in range(2 * stages)]
        model: nn.Module = PipelineModule(
            layers, num_stages=stages, loss_fn=nn.MSELoss(), activation_checkpoint_interval=interval
        )
    else:
        model = small()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=table)
    steps = engine.gradient_accumulation_steps()
    torch.manual_seed(0)  # tensor-parallel ranks must see the same tokens
    if stages > 1:
        values = torch.ones(micro_batch, 32, dtype=width or torch.float32)
        loss = engine.train_batch(iter([(values, values)] * steps))
    else:
        for _ in range(steps):
            tokens = torch.randint(256, (micro_batch, 16))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
    assert engine.global_steps == 1, engine.global_steps
    return {
        "loss": float(loss),
        "zero": engine.zero_optimization_stage(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "micro_batches": steps,
    }


def main() -> None:
    if WORDS[0] == "start":
        found = start(Path(WORDS[1]))
        if dist.get_rank() == 0:
            print("STARTED " + json.dumps(found), flush=True)
        dist.barrier()
        os._exit(0)
    answers: dict[str, Any] = {}
    for word in WORDS:
        name, world = word.rsplit("@", 1)
        try:
            answers[Path(name).name] = read(Path(name), int(world))
        except (Exception, SystemExit) as error:
            answers[Path(name).name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
