"""Bugs of context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuboid.parallel import context, grad_reduce
from cuboid.parallel.collectives import Pending, all_gather
from cuboid.parallel.context import ContextMix, Gathering, Ring
from cuboid.parallel.pipeline import Pipeline
from cuboid.parallel.rank_batch import BatchSharder
from tests.verification.bugs.bug import Patches, bug

ATTENTION = r"layers\.0\.attention$"


@bug(
    "window-ignored-by-ring",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/2828",
    "cp=2,cp_method=ring",
    ATTENTION,
    "forward",
    "window ignored",
    model="tiny-gemma3",
)
def _(patches: Patches) -> None:
    """Layers with a window attend to all tokens before under context parallelism."""
    plain = ContextMix.__init__

    def init(self: Any, groups: Any, gathers: bool, window: int = 0, cap: float = 0.0) -> None:
        plain(self, groups, gathers, 0, cap)

    patches.put(ContextMix, "__init__", init)


@bug(
    "documents-ignored-by-ring",
    "https://github.com/axolotl-ai-cloud/axolotl/issues/3608",
    "cp=2,cp_method=ring",
    ATTENTION,
    "forward",
    "documents ignored",
)
def _(patches: Patches) -> None:
    """The ring rotates keys across the whole sequence, whatever documents are packed in it."""
    plain = Ring.__init__
    patches.put(Ring, "__init__", lambda self, group, length, documents, *more: plain(self, group, length, None, *more))


@bug(
    "documents-ignored-when-gathered",
    "https://github.com/huggingface/trl/pull/6843",
    "cp=2,cp_method=allgather",
    ATTENTION,
    "forward",
    "documents ignored",
)
def _(patches: Patches) -> None:
    """Context parallelism replaces the mask of packed documents by a causal one."""
    plain = Gathering.__init__

    def init(self: Any, group: Any, length: int, documents: Any, *more: Any) -> None:
        plain(self, group, length, None, *more)

    patches.put(Gathering, "__init__", init)


@bug(
    "window-of-one-token-less",
    "https://github.com/open-lm-engine/lm-engine/pull/447",
    "cp=2,cp_method=allgather",
    ATTENTION,
    "forward",
    "window is 5 tokens in place of 6",
    model="tiny-olmo3",
)
def _(patches: Patches) -> None:
    """The window is off by one where sequences are split."""
    plain = Gathering.__init__

    def init(self: Any, group: Any, length: int, documents: Any, window: int = 0, *more: Any) -> None:
        plain(self, group, length, documents, window - 1 if window else 0, *more)

    patches.put(Gathering, "__init__", init)


@bug(
    "ring-backward-with-own-keys",
    "https://github.com/huggingface/diffusers/issues/14265",
    "cp=2,cp_method=ring",
    r"layers\.1\.attention$",
    "input gradient",
    "attention's own backward|do not add up",
)
def _(patches: Patches) -> None:
    """Backward, the ring computes with the keys and values of the first turn again and again."""
    plain, shift = Ring.backward, context.start_shift

    def backward(self: Any, *arguments: Any) -> Any:
        context.start_shift = lambda x, group, tag=0: shift(x, group, tag) if tag else Pending(None, x)
        try:
            return plain(self, *arguments)
        finally:
            context.start_shift = shift

    patches.put(Ring, "backward", backward)


@bug(
    "ring-gradients-stay",
    "https://github.com/NVIDIA/TransformerEngine/issues/2484",
    "cp=2,cp_method=ring",
    r"layers\.1\.attention$",
    "input gradient",
    "other cp ranks|do not add up|attention's own backward",
)
def _(patches: Patches) -> None:
    """Gradients of keys and values do not travel with them: each rank keeps those it computed."""
    plain, shift = Ring.backward, context.start_shift

    def backward(self: Any, *arguments: Any) -> Any:
        context.start_shift = lambda x, group, tag=0: Pending(None, torch.zeros_like(x)) if tag else shift(x, group)
        try:
            return plain(self, *arguments)
        finally:
            context.start_shift = shift

    patches.put(Ring, "backward", backward)


def _with_positions(patches: Patches, wrong: Any) -> None:
    plain = BatchSharder.of

    def of(self: Any, batch: Any) -> Any:
        return wrong(self, plain(self, batch))

    patches.put(BatchSharder, "of", of)


@bug(
    "positions-of-the-first-chunk",
    "https://github.com/verl-project/verl/pull/4250",
    "cp=2",
    ATTENTION,
    "forward",
    "positions of other tokens",
    set=("data.positions_within_documents=false",),
)
def _(patches: Patches) -> None:
    """Every rank counts positions from zero."""

    def wrong(self: Any, batch: Any) -> Any:
        here = self._table.at(torch.arange(batch.positions.length).unsqueeze(0), batch.positions.documents)
        return replace(batch, positions=here)

    _with_positions(patches, wrong)


@bug(
    "learned-positions-of-the-first-chunk",
    "https://github.com/pytorch/pytorch/issues/152261",
    "cp=2",
    "embedding",
    "forward",
    "positions of other tokens",
    model="tiny-gpt2",
    set=("data.positions_within_documents=false",),
)
def _(patches: Patches) -> None:
    """The same of positions that are learned."""

    def wrong(self: Any, batch: Any) -> Any:
        here = torch.arange(batch.positions.length).unsqueeze(0)
        return replace(batch, positions=replace(batch.positions, index=here))

    _with_positions(patches, wrong)


@bug(
    "labels-rolled-after-the-split",
    "https://github.com/verl-project/verl/pull/4250#labels",
    "cp=2",
    "head",
    "loss|input gradient",
    "labels",
)
def _(patches: Patches) -> None:
    """Labels are the next tokens of a rank's own: wrong where its chunks end."""

    def wrong(self: Any, batch: Any) -> Any:
        rolled = batch.tokens.roll(-1, 1)
        return replace(batch, labels=rolled.where(batch.labels >= 0, batch.labels))

    _with_positions(patches, wrong)


@bug(
    "loss-times-cp",
    "https://github.com/NVIDIA/Megatron-LM/issues/906",
    "cp=2",
    "head",
    "input gradient",
    r"factor 2 = cp",
)
def _(patches: Patches) -> None:
    """The loss is multiplied by cp before its gradient is taken, and nothing divides by it again."""
    plain = Pipeline.run
    patches.put(Pipeline, "run", lambda self, batches, scale: plain(self, batches, scale * patches.run.layout.cp))


@bug(
    "heads-repeated-in-the-wrong-order",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/3042",
    "cp=4,cp_method=ulysses",
    ATTENTION,
    "forward",
    "other key-value heads",
    model="tiny-qwen3",
)
def _(patches: Patches) -> None:
    """Key-value heads are repeated as a whole before the all-to-all, and not one by one."""
    plain = ContextMix.__call__

    def mix(self: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        copies = self._inner.size // key.shape[2]
        key, value = (x.repeat(1, 1, copies, 1) for x in (key, value))
        return plain(self, query, key, value, *more)

    patches.put(ContextMix, "__call__", mix)


@bug(
    "chunks-in-the-wrong-order",
    "https://github.com/pytorch/pytorch/issues/152261#zigzag",
    "cp=2,cp_method=allgather",
    ATTENTION,
    "forward",
    "chunks of the sequence in the wrong order",
    set=("data.attention_within_documents=false",),
)
def _(patches: Patches) -> None:
    """Gathered chunks are put one after another as ranks hold them, and not as the sequence goes."""

    def in_order(x: Tensor) -> Tensor:
        return torch.cat(x.chunk(2, dim=2)).movedim(0, 1).flatten(1, 2)

    patches.put(context, "in_order", in_order)


@bug(
    "gradients-not-summed-cp",
    "https://github.com/areal-project/AReaL/issues/313",
    "dp=2,cp=2",
    "head",
    "reduction",
    "missing over cp",
)
def _(patches: Patches) -> None:
    """Gradients are summed over data-parallel ranks, and not over those that hold other chunks."""

    def sums(x: Tensor, group: Any) -> Pending:
        cp = patches.run.layout.cp
        rows = all_gather(x.unsqueeze(0), group).view(group.size // cp, cp, -1)
        return Pending(None, x.copy_(rows[:, group.index % cp].sum(0).view_as(x)))

    patches.put(grad_reduce, "start_all_reduce", sums)


@bug(
    "sinks-ignored-by-ring",
    "https://github.com/NVIDIA/TransformerEngine/pull/3551",
    "cp=2,cp_method=ring",
    ATTENTION,
    "forward",
    "sinks ignored",
    model="tiny-gpt-oss",
    precisions=("float64", "bf16"),
)
def _(patches: Patches) -> None:
    """The ring's kernels never see the sinks."""
    patches.put(context, "add_sinks", lambda seen, sums, sinks: (seen, sums))
