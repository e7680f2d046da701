"""torchtitan's own trainer on given batches, for `benchmarks/learning.py`: its model, initialisation, optimizer,
clipping and train step; only batches and learning rates are ours. Wants torchtitan 0.2.2 and what it imports in one
folder."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FLAVORS = {
    "1B": ("llama3", "1B"),
    "8B-16L": ("llama3", "8B-16L"),
    "qwen3-30b-a3b-8L": ("qwen3", "30B-A3B-8L"),
}


def add_flavors() -> None:
    """The shapes that torchtitan does not name itself."""
    import torchtitan.models.llama3 as llama
    import torchtitan.models.qwen3 as qwen
    from torchtitan.models.llama3 import TransformerModelArgs

    of_all = {"n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000, "vocab_size": 128256}
    llama.llama3_args["1B"] = TransformerModelArgs(dim=2048, ffn_dim_multiplier=1.5, multiple_of=256, **of_all)
    llama.llama3_args["8B-16L"] = TransformerModelArgs(dim=4096, ffn_dim_multiplier=1.3, multiple_of=1024, **of_all)
    qwen.qwen3_args["30B-A3B-8L"] = dataclasses.replace(qwen.qwen3_args["30B-A3B"], n_layers=8)


def assets(folder: Path) -> None:
    """A tokenizer and a text: the trainer wants them, though nothing reads them here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (folder / "tokens").mkdir()
    (folder / "data").mkdir()
    tokenizer.save(str(folder / "tokens" / "tokenizer.json"))
    (folder / "tokens" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "data" / "data.json").write_text(json.dumps({"text": "nothing " * 9000}) + "\n")


def make_trainer(case: str, micro_batch: int, sequence: int, steps: int, even_loads: bool) -> Any:
    family, flavor = FLAVORS[case]
    folder = Path(tempfile.mkdtemp())
    assets(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:  # another peer may be training beside this one
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    add_flavors()
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    settings = {
        "job.dump_folder": folder,
        "model.name": family,
        "model.flavor": flavor,
        "model.hf_assets_path": folder / "tokens",
        "training.dataset": "c4_test",
        "training.dataset_path": folder / "data",
        "training.local_batch_size": micro_batch,
        "training.seq_len": sequence,
        "training.steps": steps,
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 1e-3,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"] + ["--debug.moe_force_load_balance"] * even_loads
    sys.argv = ["train", *words]
    init_logger()
    return Trainer(ConfigManager().parse_args(words))


def train(
    case: str,
    batches: Tensor,
    seeds: Sequence[int],
    rates: Sequence[float],
    sequence: int,
    settled: int,
    even_loads: bool,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """`batches`: (steps of all seeds, sequences, length + 1)."""
    steps = len(rates)
    trainer = make_trainer(case, batches.shape[1], sequence, steps, even_loads)
    trainer.metrics_processor.should_log = lambda step: False
    losses: list[Tensor] = []
    computed = trainer.forward_backward_step

    def recorded(**arguments: Any) -> Tensor:
        loss: Tensor = computed(**arguments)
        losses.append(loss.detach())
        return loss

    trainer.forward_backward_step = recorded
    from torchtitan.models.moe.moe import MoE

    layers = [module for part in trainer.model_parts for module in part.modules() if isinstance(module, MoE)]
    loads: list[Tensor] = []
    updated = trainer.optimizers.step

    def counted(*arguments: Any, **more: Any) -> Any:
        loads.append(
            torch.stack([layer.tokens_per_expert.clone() for layer in layers]) if layers else torch.zeros(1, 1)
        )
        return updated(*arguments, **more)

    trainer.optimizers.step = counted
    for seed in seeds:
        torch.manual_seed(seed)
        with torch.no_grad():
            for part in trainer.model_parts:
                part.init_weights(buffer_device=None)
        for optimizer in trainer.optimizers.optimizers:
            optimizer.state.clear()
        losses.clear()
        loads.clear()
        begin = 0.0
        for step, rate in enumerate(rates):
            if step == settled:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            for optimizer in trainer.optimizers.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            schedule = SimpleNamespace(get_last_lr=lambda rate=rate: [rate])
            trainer.lr_schedulers = SimpleNamespace(schedulers=[schedule], step=lambda: None)
            trainer.step = step + 1
            both = batches[seed * steps + step]
            trainer.train_step(iter([({"input": both[:, :-1]}, both[:, 1:].contiguous())]))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        tokens = batches.shape[1] * sequence * (steps - settled)
        asked = torch.stack(loads).float()
        report(
            {
                "seed": seed,
                "losses": torch.stack(losses).tolist(),
                "busiest": (asked.amax(-1) / asked.mean(-1)).tolist() if layers else [],
                "dead": int((asked[-50:].sum(0) == 0).sum()) if layers else 0,
                "tokens_per_second": tokens / seconds,
                "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            }
        )
