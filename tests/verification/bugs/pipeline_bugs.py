"""Bugs of pipelines and their schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuboid.parallel import grad_norm
from cuboid.parallel.pipeline import Pipeline
from cuboid.training import step
from tests.verification.bugs.bug import Patches, bug


@bug(
    "tied-embedding-not-summed",
    "https://github.com/uw-syfi/piper/issues/13",
    "pp=2",
    "embedding",
    "reduction",
    "missing over pp",
    model="tiny-qwen3",
)
def _(patches: Patches) -> None:
    """First and last stage share a matrix, and each updates it by its own gradient."""
    plain = grad_norm.all_reduce
    patches.put(grad_norm, "all_reduce", lambda x, group: x if group.dimension == "embedding" else plain(x, group))


@bug(
    "weight-gradients-lost",
    "https://github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
    "pp=2,schedule=zb1p",
    "head",
    "weight gradient",
    "it is zero",
)
def _(patches: Patches) -> None:
    """Weight gradients that were put off are not computed for one micro-batch."""
    plain = Pipeline._weight_backward

    def backward(self: Any, stage: int, index: int) -> None:
        if index == 1:
            self._postponed[stage, index] = {}
        plain(self, stage, index)

    patches.put(Pipeline, "_weight_backward", backward)


@bug(
    "loss-not-divided",
    "https://github.com/pytorch/torchtitan/issues/2972",
    "pp=2",
    "head",
    "input gradient",
    "not divided by the number of tokens",
)
def _(patches: Patches) -> None:
    """In a pipeline the gradient is that of the sum of token losses."""
    plain = Pipeline.run
    patches.put(Pipeline, "run", lambda self, batches, scale: plain(self, batches, torch.ones_like(scale)))


@bug(
    "divided-by-micro-batches-once-more",
    "https://github.com/pytorch/torchtitan/pull/1732",
    "pp=2",
    "head",
    "input gradient",
    "1/micro-batches",
)
def _(patches: Patches) -> None:
    """Gradients of a pipeline are divided by the number of micro-batches though the loss was already."""
    plain = Pipeline.run
    patches.put(Pipeline, "run", lambda self, batches, scale: plain(self, batches, scale / len(batches)))


@bug(
    "mean-of-micro-batches",
    "https://github.com/ml-explore/mlx-lm/pull/1413",
    "pp=2",
    "head",
    "input gradient",
    "mean of means",
)
def _(patches: Patches) -> None:
    """Each micro-batch is divided by its own tokens, and their mean is taken."""
    plain = Pipeline._backward

    def backward(self: Any, stage: int, index: int) -> None:
        scale = self._scale
        counts = [int(batch.counted) for batch in self._micro_batches]
        self._scale = scale * sum(counts) / (len(counts) * max(counts[index], 1))
        plain(self, stage, index)
        self._scale = scale

    patches.put(Pipeline, "_backward", backward)


@bug(
    "gradient-of-another-micro-batch",
    "https://github.com/pytorch/pytorch/pull/127946",
    "pp=2,schedule=gpipe",
    r"layers\.1",
    "input gradient",
    r"that of micro-batch",
)
def _(patches: Patches) -> None:
    """A stage takes the gradient that came for another micro-batch."""
    plain = Pipeline._receive
    kept: list[Tensor] = []

    def receive(self: Any, message: Any) -> Tensor:
        x = plain(self, message)
        if message.target_stage > message.source_stage:
            return x
        kept.append(x.clone())
        return kept[0].clone()

    patches.put(Pipeline, "_receive", receive)
    run = Pipeline.run

    def begin(self: Any, *arguments: Any) -> Tensor:
        kept.clear()
        return run(self, *arguments)

    patches.put(Pipeline, "run", begin)


@bug(
    "norm-of-one-stage",
    "https://github.com/pytorch/torchtitan/issues/596",
    "pp=2",
    "gradient norm",
    "norm",
    "missing over pp",
)
def _(patches: Patches) -> None:
    """Each stage clips by the norm of its own gradients."""
    plain = step.all_reduce

    def sums(x: Tensor, group: Any) -> Tensor:
        own = x.clone()
        result = plain(x, group)
        if x.ndim == 1 and len(x) >= 4:
            result[1] = own[1]
        return result

    patches.put(step, "all_reduce", sums)
