"""Bugs of saving and loading: two steps on one layout, two more on another, from the checkpoint between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cuboid.checkpoint import save
from cuboid.checkpoint.shards import ShardedTensor
from cuboid.checkpoint.storage import Reader
from cuboid.training.optimizer import Optimizer
from cuboid.verification import resume
from tests.verification.bugs.bug import Install, Patches, bug

FIRST = 2
"""Steps before the checkpoint."""
State = Mapping[str, ShardedTensor]


def loading(
    name: str, source: str, layout: str, onto: str, module: str, cause: str, **more: Any
) -> Callable[[Install], Install]:
    where = more.pop("where", "load")
    return bug(name, source, layout, module, where, cause, onto=onto, precisions=("float64",), **more)


def fill_only(patches: Patches, wanted: Callable[[str], bool]) -> None:
    """A load that leaves some tensors as they were."""
    plain = Reader.fill

    def fill(self: Reader, state: State) -> None:
        plain(self, {name: held for name, held in state.items() if wanted(name)})

    patches.put(save.Reader, "fill", fill)


@loading(
    "tensor-shard-of-rank-0-is-saved",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2252",
    "tp=2",
    "dp=2",
    r"layers\.0\.attention\.query",
    "another slice of it, that of rank 0",
    where="save",
)
def _(patches: Patches) -> None:
    """Of a matrix split over tensor ranks, only the first rank's part is saved."""
    plain = save.kept_state

    def kept(*arguments: Any) -> dict[str, ShardedTensor]:
        state = plain(*arguments)
        if patches.leg == 0:
            name = "parameter/layers.0.attention.query.weight"
            slices = []
            for part, values in state[name].slices:
                first = values.clone()
                dist.broadcast(first, 0)
                slices.append((part, first))
            state[name] = replace(state[name], slices=tuple(slices))
        return state

    patches.put(save, "kept_state", kept)


@loading(
    "chunks-joined-in-another-order",
    "https://github.com/ROCm/Megatron-LM/pull/63",
    "dp=2,zero=3",
    "tp=2",
    r"layers\.\d\.feed_forward",
    "another order",
)
def _(patches: Patches) -> None:
    """Chunks of the feed-forward matrix are put together in another order on another number of ranks."""
    plain = Reader.fill

    def fill(self: Reader, state: State) -> None:
        plain(self, state)
        for name, held in state.items():
            if name.endswith("feed_forward.up.weight"):
                for _, values in held.slices:
                    values.copy_(values.roll(len(values) // 2, 0))

    patches.put(save.Reader, "fill", fill)


@loading(
    "only-the-file-of-the-same-rank-is-read",
    "https://github.com/sgl-project/sglang/pull/36438",
    "tp=4",
    "tp=2",
    ".*",
    "the run begins, in .* elements",
)
def _(patches: Patches) -> None:
    """Written by four ranks and read by two: each reads the file of its own number alone."""
    plain = Reader.fill

    def fill(self: Reader, state: State) -> None:
        for entry in self.index.values():
            if len(entry["chunks"]) > 1:
                entry["chunks"] = [x for x in entry["chunks"] if x["file"] != "data-00003.bin"]
        plain(self, state)

    patches.put(save.Reader, "fill", fill)


@loading(
    "moments-not-restored",
    "https://github.com/KempnerInstitute/KempnerForge/pull/115",
    "tp=2",
    "dp=2,zero=1",
    ".*",
    "it is zero",
)
def _(patches: Patches) -> None:
    """Moments that the new optimizer does not have yet are dropped when a checkpoint is read."""
    fill_only(patches, lambda name: not name.startswith("exp_avg"))


@loading(
    "moments-come-back-with-another-parameter",
    "https://github.com/huggingface/transformers/pull/48569",
    "dp=2,zero=1",
    "tp=2",
    r"layers\.0\.attention\.(key|value)",
    r"exp_avg_sq of layers\.0\.attention\.(key|value)",
)
def _(patches: Patches) -> None:
    """Optimizer state is told by its place in a list: it comes back with a neighbour."""
    plain = Reader.fill

    def fill(self: Reader, state: State) -> None:
        plain(self, state)
        names = [f"exp_avg_sq/layers.0.attention.{each}.weight" for each in ("key", "value")]
        pairs = zip(*(state[name].slices for name in names), strict=True)
        for (_, one), (_, other) in pairs:
            kept: Tensor = one.clone()
            one.copy_(other)
            other.copy_(kept)

    patches.put(save.Reader, "fill", fill)


@loading(
    "updates-counted-anew",
    "https://github.com/deepspeedai/DeepSpeed/pull/5289",
    "dp=2,zero=2",
    "tp=2",
    "optimizer",
    "counts 0 updates",
)
def _(patches: Patches) -> None:
    """Moments come back and the number of updates does not: bias correction begins again."""
    plain = Optimizer.set_steps_taken
    patches.put(Optimizer, "set_steps_taken", lambda self, steps: plain(self, 0))


@loading(
    "master-weights-not-refreshed",
    "https://github.com/NVIDIA/Megatron-LM/pull/5071",
    "tp=2",
    "dp=2,zero=1",
    ".*",
    "with which the run begins",
)
def _(patches: Patches) -> None:
    """Weights are loaded, and the optimizer's copies of them are still those of the beginning."""
    fill_only(patches, lambda name: not name.startswith("parameter/"))


@loading(
    "average-not-restored",
    "https://github.com/m2lines/Samudra/issues/282",
    "tp=2",
    "dp=2,zero=1",
    ".*",
    "with which the run begins",
    set=("optimizer.average=0.9",),
)
def _(patches: Patches) -> None:
    """The moving average of weights begins anew."""
    fill_only(patches, lambda name: not name.startswith("average/"))


@loading(
    "data-begins-again",
    "https://github.com/KempnerInstitute/KempnerForge/issues/51",
    "dp=2",
    "tp=2",
    "loss",
    "samples of step 1: their position",
    where="loss",
)
def _(patches: Patches) -> None:
    """The loader's position is not saved: the samples of the first steps come once more."""
    _batches_of(patches, lambda step: step - FIRST)


@loading(
    "a-step-is-repeated",
    "https://github.com/AI-Hypercomputer/maxdiffusion/pull/484",
    "dp=2",
    "tp=2",
    "loss",
    "samples of step 2: their position",
    where="loss",
)
def _(patches: Patches) -> None:
    """A checkpoint is named by the last step, and the resumed run begins with that one."""
    _batches_of(patches, lambda step: step - 1)


def _batches_of(patches: Patches, other: Callable[[int], int]) -> None:
    plain = resume.micro_batches
    if patches.leg:
        patches.put(resume, "micro_batches", lambda source, run, step, *more: plain(source, run, other(step), *more))
