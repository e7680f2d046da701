"""Bugs of tensor and sequence parallelism."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from cuboid.model.linear import RowLinear
from cuboid.parallel import cross_entropy, grad_norm, parallelize
from cuboid.parallel.collectives import Pending
from cuboid.parallel.grad_norm import _sum_together
from cuboid.parallel.tensor_region import Region
from tests.verification.bugs.bug import Patches, bug, leave_out

MEGATRON = "https://github.com/NVIDIA/Megatron-LM/issues/"
FINDINGS = f"{MEGATRON}7452"
PLAIN = "sequence_parallel=false"


@bug("norms-not-summed-sp", f"{MEGATRON}1446", "tp=2", r"norm", "reduction", "missing over tp")
def _(patches: Patches) -> None:
    """Gradients of norms under sequence parallelism stay those of a rank's own tokens."""

    def sums(tensors: list[Tensor], group: Any) -> None:
        if group.dimension not in ("tp", "kv"):
            _sum_together(tensors, group)

    patches.put(grad_norm, "_sum_together", lambda tensors, group: None)


@bug(
    "kv-not-summed",
    "https://github.com/bigcode-project/Megatron-LM/issues/11",
    "tp=4",
    r"attention\.(key|value)",
    "reduction",
    "missing over tp",
    model="tiny-qwen3",
    set=("model.kv_heads=2",),
)
def _(patches: Patches) -> None:
    """Key-value heads that several tensor ranks hold: each keeps the gradient of its own query heads."""
    plain, calls = _sum_together, [0]

    def sums(tensors: list[Tensor], group: Any) -> None:
        calls[0] += 1
        if calls[0] % 2:
            plain(tensors, group)

    patches.put(grad_norm, "_sum_together", sums)


@bug(
    "row-bias-twice",
    "https://github.com/GeeeekExplorer/nano-vllm/issues/99",
    f"tp=2,{PLAIN}",
    r"attention",
    "forward",
    r"bias|every token",
    model="tiny-gpt2",
)
def _(patches: Patches) -> None:
    """The bias of a row-parallel linear is added by every rank before the sum."""

    def forward(self: RowLinear, x: Tensor) -> Tensor:
        if self.region is None:
            return self.matmul(x, self.weight, self.bias)
        # Biases begin at zero: a constant shows from the first step on.
        constant = None if self.bias is None else self.bias + 0.01
        return self.region.leave(self.matmul(x, self.weight, constant))

    patches.put(RowLinear, "forward", forward)


@bug("loss-log-tp", FINDINGS, "tp=2", r"head|loss", "loss|forward", r"log\(tp\)")
def _(patches: Patches) -> None:
    """Logits that are whole enter the cross-entropy of split ones: log(tp) is added."""
    plain = cross_entropy._split_loss

    def wrong(logits: Tensor, labels: Tensor, vocabulary: int, group: Any, *more: Any) -> Tensor:
        loss = plain(logits, labels, vocabulary, group, *more)
        counted = int((labels >= 0).sum())
        return loss + counted * math.log(group.size)

    patches.put(cross_entropy, "_split_loss", wrong)


@bug(
    "input-gradient-not-summed",
    "https://github.com/NovaSky-AI/SkyRL/pull/1886",
    f"tp=2,{PLAIN}",
    r"head",
    "input gradient",
    "missing over tp",
)
def _(patches: Patches) -> None:
    """The gradient that leaves a column-parallel region backward is a rank's own."""

    patches.put(Region, "start_sum", lambda self, gradient: Pending(None, gradient))


@bug(
    "output-not-summed", "https://arxiv.org/abs/2506.10426", f"tp=2,{PLAIN}", r"embedding", "forward", "missing over tp"
)
def _(patches: Patches) -> None:
    """What leaves a region is a rank's own part."""
    patches.put(Region, "leave", lambda self, x: x)


@bug(
    "gradient-summed-twice",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5411",
    "tp=2",
    r"head",
    "input gradient",
    r"factor 2|tp",
)
def _(patches: Patches) -> None:
    """The gradient of a column-parallel input is summed over tensor ranks twice."""
    plain = Region.start_sum
    patches.put(Region, "start_sum", lambda self, gradient: plain(self, gradient * self.group.size))


@bug(
    "qk-norms-not-summed",
    "https://github.com/NVIDIA-NeMo/RL/issues/3716",
    "tp=2",
    r"attention\.(query|key)_norm",
    "reduction",
    "missing over tp",
    model="tiny-qwen3",
)
def _(patches: Patches) -> None:
    """Norms of queries and keys see the heads of one rank each; their gradients are not added."""
    leave_out(patches, "attention.query_norm")


@bug(
    "qk-norm-over-own-heads",
    f"{MEGATRON}816",
    "tp=2",
    r"attention",
    "forward",
    "factor of its own|norm over a part",
    model="tiny-olmo3",
)
def _(patches: Patches) -> None:
    """A norm over all heads is computed over those of the rank."""
    patches.put(Region, "mean", lambda self, x: x)


@bug(
    "vocabulary-padding-counts",
    "https://github.com/unslothai/unsloth/pull/10616",
    "tp=2",
    "head",
    "loss|input gradient",
    "labels|padding",
    set=("model.vocab=37",),
)
def _(patches: Patches) -> None:
    """Columns that only pad the vocabulary have a share in the softmax."""
    patches.put(cross_entropy, "_without_padding", lambda logits, rows: cross_entropy._exact(logits))


@bug(
    "sinks-left-out-of-the-norm",
    f"{FINDINGS}#finding-08",
    "tp=2",
    "gradient norm",
    "norm",
    "not counted|only a part",
    model="tiny-gpt-oss",
)
def _(patches: Patches) -> None:
    """Sinks, which tensor ranks split, are left out of the gradient norm on all ranks but the first."""
    from cuboid.training import step

    plain = step.squared_norm

    def square(engine: Any) -> Tensor:
        total = plain(engine)
        for unit in engine.units:
            for shard in unit.optimizer_shards():
                if shard.part.name.endswith("sinks") and engine.groups.tensor.index:
                    total = total - shard.gradient.square().sum()
        return total

    patches.put(step, "squared_norm", square)


@bug(
    "key-of-another-rank",
    "https://github.com/alibaba/ChatLearn/pull/277",
    "tp=2",
    r"attention\.key",
    "weights",
    r"slice of rank",
)
def _(patches: Patches) -> None:
    """A converter gives each tensor rank the key heads of another."""
    plain = parallelize.initial_tensor

    def drawn(model: Any, name: str, shape: Any, seed: int, part: Any = None, *more: Any) -> Tensor:
        if part is not None and name.endswith("attention.key.weight"):
            dimension, held = part
            start = (held.start + len(held)) % shape[dimension]
            part = (dimension, range(start, start + len(held)))
        return plain(model, name, shape, seed, part, *more)

    patches.put(parallelize, "initial_tensor", drawn)


@bug(
    "norm-counts-replicated",
    "https://github.com/NVIDIA-NeMo/RL/pull/3788",
    "tp=2",
    "gradient norm",
    "norm",
    r"all tp ranks hold are counted 2",
)
def _(patches: Patches) -> None:
    """Parameters that all tensor ranks hold are counted by each in the gradient norm."""
    plain = grad_norm.answers_for

    def answers(engine: Any, unit: Any, part: Any) -> bool:
        return plain(engine, unit, part) or part.slice.sharing == "tensor"

    def square(engine: Any) -> Tensor:
        patches.put(grad_norm, "answers_for", answers)
        try:
            return squared(engine)
        finally:
            patches.put(grad_norm, "answers_for", plain)

    squared = grad_norm.squared_norm
    from cuboid.training import step

    patches.put(step, "squared_norm", square)
