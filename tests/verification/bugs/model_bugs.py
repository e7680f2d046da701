"""Bugs of parts that few models and recipes have, on layouts of several dimensions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cuboid.model import rope
from cuboid.model.transformer import Block
from cuboid.parallel import grad_norm, qk_clip, rank_batch
from cuboid.spec.ranks import coordinates
from cuboid.training.optimizer import Optimizer
from tests.verification.bugs.bug import Patches, bug


@bug(
    "post-norms-with-another-epsilon",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5712",
    "tp=2,pp=2",
    r"layers\.0\.attention_post_norm",
    "forward",
    "epsilon is 1e-05 in place of 1e-06",
    model="tiny-gemma3",
    precisions=("float64",),
)
def _(patches: Patches) -> None:
    """Norms behind attention and feed-forward have a default of their own."""
    plain = Block.__init__

    def init(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        for norm in (self.attention_post_norm, self.feed_forward_post_norm):
            norm.epsilon *= 10

    patches.put(Block, "__init__", init)


@bug(
    "rope-in-bf16",
    "https://github.com/EleutherAI/gpt-neox/issues/1003",
    "tp=2,pp=2",
    r"layers\.0\.attention$",
    "forward",
    "as rounding to bf16",
    model="tiny-qwen3",
    precisions=("float64",),
)
def _(patches: Patches) -> None:
    """Cosine and sine are made in the precision of the model."""
    plain = rope.rotated

    def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return plain(x, cosine.bfloat16().to(x.dtype), sine.bfloat16().to(x.dtype))

    patches.put(rope, "rotated", rotated)


@bug(
    "windows-with-the-theta-of-other-layers",
    "https://github.com/vllm-project/vllm/pull/29111",
    "pp=2,schedule=zbv",
    r"layers\.0\.attention$",
    "forward",
    "another theta or scaling of RoPE",
    model="tiny-gemma3",
    set=("model.layers=4", "model.rope_theta=1000000.0"),
)
def _(patches: Patches) -> None:
    """Layers with a window rotate as those without."""
    patches.put(rope.Positions, "rotation", lambda self, windowed: (self.cosine, self.sine))


@bug(
    "predictions-with-the-labels-of-the-model",
    "https://github.com/radixark/miles/pull/2215",
    "pp=2,cp=2",
    r"layers\.2",
    "loss",
    "labels",
    model="tiny-deepseek-mtp",
)
def _(patches: Patches) -> None:
    """What layers that predict further tokens should predict is one token off."""
    plain = rank_batch.further
    patches.put(rank_batch, "further", lambda batch, depth: plain(batch, depth)._replace(labels=batch.labels))


@bug(
    "norms-summed-in-bf16",
    "https://github.com/pytorch/pytorch/issues/190626",
    "dp=2,tp=2,zero=3",
    r"head\.norm",
    "reduction",
    "as rounding to bf16",
    model="tiny-gpt2",
    precisions=("float64",),
)
def _(patches: Patches) -> None:
    """The sum over tensor ranks of what they all hold is not in the precision that gradients are summed in."""
    plain = grad_norm._sum_together

    def sums(tensors: list[Tensor], group: Any) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())
        plain(tensors, group)

    patches.put(grad_norm, "_sum_together", sums)


@bug(
    "step-count-of-one-rank",
    "https://github.com/NVIDIA/TransformerEngine/issues/1986",
    "dp=2,pp=2,zero=1",
    ".*",
    "update",
    "step count is off",
    model="tiny-qwen3",
)
def _(patches: Patches) -> None:
    """One rank has counted another number of updates, and corrects the bias of its moments by it."""
    plain = Optimizer.__init__

    def init(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        if patches.rank == 1:
            self._steps += 1

    patches.put(Optimizer, "__init__", init)


@bug(
    "qk-clip-by-own-tokens",
    "https://github.com/modelscope/ms-swift/pull/9901",
    "dp=2,tp=2",
    r"attention\.(query|key)",
    "update",
    "QK-clip|copies differ",
    set=("optimizer.kind=muon", "optimizer.qk_clip=0.05"),
)
def _(patches: Patches) -> None:
    """Heads are scaled by the queries and keys that one rank saw."""
    patches.put(qk_clip, "all_reduce_maximum", lambda x, group: x)


@bug(
    "average-on-one-replica",
    "https://github.com/lucidrains/ema-pytorch/issues/9",
    "dp=2,tp=2",
    ".*",
    "update",
    "copies differ|not moved",
    model="tiny-olmo3",
    set=("optimizer.average=0.9",),
)
def _(patches: Patches) -> None:
    """Only the first replica moves the average of its weights."""
    if coordinates(patches.rank, patches.run.layout).dp:
        patches.put(Optimizer, "move_average", lambda self, counts: None)
