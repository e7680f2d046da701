"""Bugs of data parallelism, ZeRO and the optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuboid.parallel import grad_reduce, parallelize, zero
from cuboid.parallel.collectives import Pending
from cuboid.parallel.grad_reduce import GradientReducer
from cuboid.parallel.pipeline import Pipeline
from cuboid.parallel.zero import Unit
from cuboid.training import checkpointer, optimizer, step, trainer
from cuboid.verification import compare
from tests.verification.bugs.bug import Patches, bug

TRAINCHECK = (
    "https://github.com/OrderLab/TrainCheck-Evaluation-Workloads/tree/main/silent-issue-detection/bug-reprod-scripts/"
)


@bug(
    "gradients-not-summed-dp",
    "https://github.com/verl-project/verl/issues/7493",
    "dp=2",
    r"head",
    "reduction",
    "missing over dp",
)
def _(patches: Patches) -> None:
    """Gradients are not synchronised between replicas."""
    patches.put(grad_reduce, "start_all_reduce", lambda x, group: Pending(None, x))


@bug(
    "means-of-means",
    "https://github.com/huggingface/transformers/issues/34191",
    "dp=2",
    r"head",
    "input gradient|weight gradient|reduction",
    r"own tokens|tokens",
)
def _(patches: Patches) -> None:
    """Each replica divides by its own tokens."""
    patches.put(step, "all_reduce", _sum_but_for_counts(step.all_reduce))


def _sum_but_for_counts(plain: Any) -> Any:
    def sums(x: Tensor, group: Any) -> Tensor:
        if not x.is_floating_point() and not x.ndim:
            return x * group.size
        return plain(x, group)

    return sums


@bug(
    "clip-by-own-norm",
    f"{TRAINCHECK}deepspeed-1801",
    "tp=2",
    r".*",
    "norm|update",
    r"copies|norm|sum missing|only a part|factor",
)
def _(patches: Patches) -> None:
    """Each rank clips by a norm of its own (BLOOM's layer norms drifted apart)."""
    plain = optimizer.Optimizer.step

    def wrong(self: Any, rate: float, norm: Tensor, clip: float, *more: Any) -> None:
        plain(self, rate, norm * (1 + 0.5 * patches.rank), clip, *more)

    patches.put(optimizer.Optimizer, "step", wrong)


@bug(
    "stale-weights-zero1",
    "https://github.com/NVIDIA/Megatron-LM/issues/950",
    "dp=2,zero=1",
    r".*",
    "weights|update",
    r"stale by one step|copies differ",
)
def _(patches: Patches) -> None:
    """The all-gather after an update does not bring all weights before they are used."""

    def gather(part: Tensor, group: Any, into: Tensor | None = None, *_: Any) -> Pending:
        assert into is not None
        rows = into.view(group.size, -1)
        rows[group.index].copy_(part.flatten())
        return Pending(None, into)

    patches.put(zero, "start_all_gather", gather)


@bug(
    "zero3-gathers-the-step-before",
    "https://github.com/deepspeedai/DeepSpeed/issues/5059",
    "dp=2,zero=3",
    r"layers\.",
    "weights|update",
    "stale by one step",
)
def _(patches: Patches) -> None:
    """A block's shards are gathered as they were before the update."""
    plain = Unit.start_gather

    def wrong(self: Any) -> None:
        if self.name.startswith("layers.1"):
            own, old = self._own, getattr(self, "old_own", None)
            self._own = own if old is None else old
            try:
                plain(self)
            finally:
                self._own = own
        else:
            plain(self)

    publish = Unit.publish

    def published(self: Any, written: bool = False) -> None:
        self.old_own = getattr(self, "new_own", None)
        publish(self, written)
        self.new_own = self._own.clone()

    def begin(self: Any, count: int) -> None:
        if not hasattr(self, "new_own"):
            self.new_own = self._own.clone()
        begun(self, count)

    begun = Unit.begin_step
    patches.put(Unit, "begin_step", begin)
    patches.put(Unit, "start_gather", wrong)
    patches.put(Unit, "publish", published)


@bug(
    "gradients-not-cleared",
    "https://github.com/NVIDIA/Megatron-LM/pull/4609",
    "dp=2,zero=2",
    r"head",
    "weight gradient|reduction",
    r"step before|not cleared",
)
def _(patches: Patches) -> None:
    """The sum of gradients still holds what the step before left."""
    patches.put(GradientReducer, "clear", lambda self: None)


@bug(
    "micro-batch-dropped",
    "https://github.com/AMD-AGI/Primus/pull/1046",
    "dp=2,zero=2",
    r"head",
    "weight gradient|reduction",
    r"micro-batch \d is missing|only micro-batch|zero",
)
def _(patches: Patches) -> None:
    """Of a step's micro-batches one does not reach the sum."""
    plain = GradientReducer._take

    def take(self: Any, target: Tensor, first: bool) -> None:
        plain(self, target, first)
        if self._collected == 2:
            target.zero_()

    patches.put(GradientReducer, "_take", take)


@bug(
    "micro-batch-repeated",
    "https://github.com/pytorch/torchtitan/issues/1733",
    "pp=2",
    r".*",
    "forward|reduction|loss",
    r"micro-batch",
)
def _(patches: Patches) -> None:
    """A pipeline schedule gives one micro-batch twice and another not at all."""
    plain = Pipeline.run

    def run(self: Any, batches: list[Any], scale: Tensor) -> Tensor:
        return plain(self, [*batches[:-1], batches[0]], scale)

    patches.put(Pipeline, "run", run)


@bug(
    "initial-seed-by-rank",
    "https://github.com/allenai/OLMo-core/pull/319",
    "dp=2",
    r"embedding",
    "weights",
    r"initial value|seed",
)
def _(patches: Patches) -> None:
    """Each rank draws its weights from a seed of its own, and nobody makes them equal."""
    plain = parallelize.draw_weights

    def draw(engine: Any) -> None:
        training = replace(engine.run.training, seed=engine.run.training.seed + patches.rank)
        plain(replace(engine, run=replace(engine.run, training=training)))

    patches.put(parallelize, "draw_weights", draw)
    patches.put(checkpointer, "draw_weights", draw)


@bug(
    "all-ranks-see-the-same-data",
    "https://github.com/k2-fsa/icefall/issues/1616",
    "dp=2",
    r"embedding",
    "forward",
    r"rank|micro-batch",
)
def _(patches: Patches) -> None:
    """Every replica takes the samples of the first."""
    plain = compare.micro_batches

    def batches(source: Any, run: Any, number: int, replica: int, device: torch.device) -> Any:
        return plain(source, run, number, 0, device)

    patches.put(compare, "micro_batches", batches)
    patches.put(trainer, "micro_batches", batches)
