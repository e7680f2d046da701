"""What rounding to fp8 costs at the same weights, by the scaling: the loss on the same batches, and the gradient.

    python benchmarks/fp8_gaps.py --shape 8B-16L --steps 100             # on a GPU
    python benchmarks/fp8_gaps.py --shape tiny --steps 60 --batches 2    # on a CPU
    python benchmarks/fp8_gaps.py --outliers 0,8,12,14,16,18,20

Trains in bf16 on real text (`fp8.py`), then reads batches that it has not trained on in bf16 and with every scaling.
Two trainings end apart by where they chanced to go; here nothing differs but the rounding, so that a ten-thousandth of
the loss is seen. `tensor, exact sums`: without fast accumulation.

--outliers: before that, one column of what goes into each layer's last matmul is made 2^n times as large and its
weights as much smaller, so that the model computes the same. Prints a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8 import SHAPES, make_run, real_text
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.model import fp8
from cuboid.model.batch import MicroBatch
from cuboid.model.feed_forward import FeedForward
from cuboid.model.fp8_experts import multiply_experts_in_fp8
from cuboid.model.linear import Linear
from cuboid.model.moe import Experts, grouped_matmul
from cuboid.model.split_backward import Deferral
from cuboid.model.transformer import Transformer
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import start_step

SCALINGS = ("tensor", "tensor, exact sums", "row", "block", "block, experts")
"""The last of a mixture alone."""


def trained(run: Run, device: torch.device) -> dict[str, Tensor]:
    engine = build_engine(run, 0, device)
    optimizer, source, steps = Optimizer(engine, run.optimizer), make_source(run), run.training.steps
    for step in range(steps):
        rate = learning_rate(run.learning_rate, step, steps)
        pending = start_step(engine, optimizer, micro_batches(source, run, step, 0, device), rate)
    print(json.dumps({"trained": steps, "loss": pending.result().loss}), flush=True)
    return {name: each.detach().cpu() for unit in engine.units for name, each in unit.parameters.items()}


class Measured:
    def __init__(self, run: Run, weights: dict[str, Tensor], device: torch.device) -> None:
        with device:
            self.model = Transformer(run.model).to(torch.bfloat16)
        self.model.load_state_dict(weights)
        self.linears = [child for child in self.model.layers.modules() if isinstance(child, Linear)]
        self.experts = [child for child in self.model.layers.modules() if isinstance(child, Experts)]
        self.plain = [linear.matmul for linear in self.linears]

    def use(self, scaling: str | None) -> None:
        for linear, plain in zip(self.linears, self.plain, strict=True):
            linear.matmul = plain if scaling is None else fp8.Fp8Matmul(scaling.partition(",")[0])  # type: ignore[arg-type]
        fp8.multiply = EXACT if scaling == "tensor, exact sums" else MULTIPLY
        for experts in self.experts:
            experts.whole, experts.matmul = None, grouped_matmul
            if scaling == "block, experts":
                multiply_experts_in_fp8(experts, Deferral())

    @torch.no_grad()
    def losses(self, batches: list[MicroBatch]) -> list[float]:
        return [float(self.model.loss(each.tokens, each.labels)) / each.labels.numel() for each in batches]

    def gradients(self, batch: MicroBatch) -> list[Tensor]:
        self.model.zero_grad()
        (self.model.loss(batch.tokens, batch.labels) / batch.labels.numel()).backward()
        return [each.grad for each in self.model.layers.parameters() if each.grad is not None]

    @torch.no_grad()
    def spread(self, batch: MicroBatch) -> float | None:
        """The largest over the layers of the largest number that goes into the last matmul beside the middle one."""
        found: list[float] = []

        def look(_: Any, arguments: tuple[Tensor, ...]) -> None:
            sizes = arguments[0].abs().float().flatten()
            found.append(float(sizes.max() / sizes[:: max(1, sizes.numel() // 1_000_000)].median()))

        hooks = [each.down.register_forward_pre_hook(look) for each in self.feed_forwards()]
        self.model.hidden_states(batch.tokens)
        for hook in hooks:
            hook.remove()
        return max(found, default=None)

    def feed_forwards(self) -> list[FeedForward]:
        return [child for child in self.model.layers.modules() if isinstance(child, FeedForward)]

    @torch.no_grad()
    def plant(self, power: int) -> None:
        for each in self.feed_forwards():
            each.up.weight[0] *= 2.0**power
            each.down.weight[:, 0] *= 2.0**-power


MULTIPLY = fp8.multiply
EXACT: Callable[..., Tensor] = lambda *factors, fast: MULTIPLY(*factors, fast=False)  # noqa: E731


def compare(model: Measured, batches: list[MicroBatch], with_gradients: bool) -> dict[str, Any]:
    model.use(None)
    base = model.losses(batches)
    exact = model.gradients(batches[0]) if with_gradients else []
    found: dict[str, Any] = {"bf16": round(statistics.mean(base), 4), "largest beside middle": model.spread(batches[0])}
    for scaling in SCALINGS if model.experts else SCALINGS[:-1]:
        model.use(scaling)
        apart = [one - other for one, other in zip(model.losses(batches), base, strict=True)]
        doubt = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        row = {"gap": round(statistics.mean(apart), 5), "error of its mean": round(doubt, 5)}
        if exact:
            rounded = model.gradients(batches[0])
            off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(rounded, exact, strict=True))
            row["gradient error"] = round((off / sum(float(b.float().square().sum()) for b in exact)) ** 0.5, 4)
        found[scaling] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--batches", type=int, default=8, help="to measure on")
    parser.add_argument("--outliers", default="0", help="powers of two, commas between them")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    options = parser.parse_args()
    options.seed, options.micro_batches = 0, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = real_text(Path(folder), options.megabytes, min(16384, SHAPES[options.shape]["vocab"]))
        run = make_run(options, "bf16", store)
        weights = trained(run, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        source, steps = make_source(run), run.training.steps
        read = partial(micro_batches, source, run, replica=0, device=device)
        batches = [read(batch=steps + number)[0] for number in range(options.batches)]
        for power in map(int, options.outliers.split(",")):
            model = Measured(run, weights, device)
            model.plant(power)
            row = compare(model, batches, power == 0)
            print(json.dumps({"shape": options.shape, "steps": steps, "outliers": power, **row}), flush=True)


if __name__ == "__main__":
    main()
