"""One step of torchtitan's own trainer, written for `cuboid verify --against`: on any layout, also on CPUs over gloo.

    pip install "torchtitan==0.2.2"       # 0.2.0 to 0.2.2 are known to work
    torchrun --nproc-per-node 4 examples/step_of_torchtitan.py step --parallelism.tensor_parallel_degree 2
    cuboid verify --against step          # equal: two shards of FSDP, each over two tensor ranks

    torchrun --nproc-per-node 2 examples/step_of_torchtitan.py step --parallelism.pipeline_parallel_degree 2
    cuboid verify --against step          # with 0.2.2: pytorch/torchtitan#2972, and with 0.2.1: #1842

What follows the folder are torchtitan's own options. For a model and data of your own, take over `Written`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes none for CUDA

import torch.distributed as dist
import torchtitan.train
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components import metrics
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec

SAMPLES, LENGTH = 24, 16
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256, "multiple_of": 32}
RATE, CLIP = 1e-3, 1.0
# torchtitan lets norms decay as matrices do, and `verify` would say so
OPTIONS = f"""--model.name of_cuboid --model.flavor tiny --training.seq_len {LENGTH} --training.steps 1
 --training.global_batch_size {SAMPLES} --training.local_batch_size 2 --training.max_norm {CLIP}
 --training.mixed_precision_param float32 --optimizer.lr {RATE} --optimizer.weight_decay 0 --optimizer.beta2 0.95
 --optimizer.implementation for-loop --lr_scheduler.warmup_steps 0 --activation_checkpoint.mode none
 --metrics.log_freq 1 --comm.trace_buf_size 0"""


def batch() -> tuple[Tensor, Tensor]:
    """Samples with different numbers of labels that count."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SIZES["vocab_size"], (SAMPLES, LENGTH + 1), generator=random)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for sample in range(SAMPLES):
        labels[sample, : LENGTH * sample // SAMPLES] = -100
    return inputs, labels


class Loader:
    """The samples of one rank in order."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self._parts = [x.chunk(ranks)[rank].split(size) for x in batch()]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens, labels in zip(*self._parts, strict=True):
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoMonitor:
    """Of a device whose memory torchtitan cannot read."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class Written(torchtitan.train.Trainer):
    """A trainer that keeps what `verify --against` reads."""

    def whole(self, name: str) -> dict[str, Tensor]:
        """Parameters or their gradients from all ranks, by their Hugging Face names."""
        held: dict[str, Tensor] = {}
        for part in self.model_parts:
            for key, parameter in part.named_parameters():
                values = parameter.grad if name == "gradients" else parameter.detach()
                whole = values.full_tensor() if isinstance(values, DTensor) else values
                held[key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")] = whole.cpu().clone()
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, held)
        every = {key: values for stage in stages for key, values in stage.items()}
        adapter = self.train_spec.state_dict_adapter(self.model_args, None)
        return {key: values.contiguous() for key, values in adapter.to_hf(every).items()}

    def write(self, folder: Path) -> None:
        kept: dict[str, Any] = {}
        clip = torchtitan.train.dist_utils.clip_grad_norm_

        def clipped(*arguments: Any, **named: Any) -> Tensor:
            kept["gradients"] = self.whole("gradients")
            return clip(*arguments, **named)

        def log(step: int, loss: float, most: float, norm: float, extra: Any = None, **_: Any) -> None:
            kept["told"] = (float(loss), float(norm))

        before = self.whole("parameters")
        torchtitan.train.dist_utils.clip_grad_norm_ = clipped
        self.metrics_processor.log = log
        self.step = 1
        self.train_step(self.batch_generator(self.dataloader))
        after = self.whole("parameters")
        # the stage that computes the loss knows it; torchtitan puts -1 in its place on others
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, kept["told"])
        loss, norm = max(told)
        dims, training = self.parallel_dims, self.job_config.training
        dealt = dims.dp_replicate * dims.dp_shard
        size = self.job_config.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else None
        step = {"loss": loss, "gradient_norm": norm, "learning_rate": RATE, "gradient_clip": CLIP}
        step |= {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.0, "precision": "float32"}
        step |= {"dp": dealt, "micro_batches": SAMPLES // dealt // (size or training.local_batch_size)}
        if dist.get_rank() == 0:
            (folder / "model").mkdir(parents=True, exist_ok=True)
            tokens, labels = batch()
            save_file(before, folder / "model" / "model.safetensors")
            save_file(kept["gradients"], folder / "gradients.safetensors")
            save_file(after, folder / "parameters.safetensors")
            save_file({"tokens": tokens, "labels": labels}, folder / "batch.safetensors")
            (folder / "model" / "config.json").write_text(json.dumps(self.config(before)))
            (folder / "step.json").write_text(json.dumps(step))

    def config(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """As Hugging Face names it."""
        sizes = self.model_args
        scaling = sizes.rope_scaling_args
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": sizes.dim,
            "intermediate_size": len(weights["model.layers.0.mlp.gate_proj.weight"]),
            "num_hidden_layers": sizes.n_layers,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.n_kv_heads,
            "vocab_size": sizes.vocab_size,
            "max_position_embeddings": LENGTH,
            "rms_norm_eps": sizes.norm_eps,
            "rope_theta": sizes.rope_theta,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": scaling.scaling_factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            },
            "tie_word_embeddings": False,
        }


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)

    def loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Loader:
        return Loader(dp_rank, dp_world_size, job_config.training.local_batch_size)

    plain = llama3.get_train_spec()
    sizes = {"tiny": llama3.TransformerModelArgs(**SIZES)}
    parts = {"model_args": sizes, "build_tokenizer_fn": None, "build_dataloader_fn": loader}
    register_train_spec("of_cuboid", replace(plain, **parts))
    if not torch.cuda.is_available():
        metrics.build_device_memory_monitor = NoMonitor
    options = [*OPTIONS.split(), "--job.dump_folder", mkdtemp(), *sys.argv[2:]]
    trainer = Written(ConfigManager().parse_args(options))
    if dist.get_backend() == "gloo":  # which cannot multiply while it sums
        for module in [each for part in trainer.model_parts for each in part.modules()]:
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    trainer.write(Path(sys.argv[1]))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
