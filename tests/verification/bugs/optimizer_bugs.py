"""Bugs of optimizers, of averages of weights, and of what fp8 is scaled by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.newton_schulz import orthogonalize
from cuboid.parallel import fp8_all_gather, grad_norm, grad_reduce
from cuboid.parallel.collectives import Pending
from cuboid.training import adamw, average, muon, optimizer
from cuboid.training.optimizer import Optimizer
from tests.verification.bugs.bug import Patches, bug

TRAINCHECK = "https://github.com/OrderLab/TrainCheck-Evaluation-Workloads/tree/main/silent-issue-detection/"
MUON = ("optimizer.kind=muon",)
AVERAGE = ("optimizer.average=0.9",)


@bug(
    "replicas-of-shards-not-summed",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3135",
    "dp=4,zero=1,shard=2",
    "head",
    "reduction",
    "missing over dp|part",
)
def _(patches: Patches) -> None:
    """With hybrid sharding, gradients are summed inside a shard group and not over its replicas."""
    patches.put(grad_reduce, "start_all_reduce", lambda x, group: Pending(None, x))


@bug(
    "norm-counts-replicas-of-shards",
    "https://github.com/ByteDance-Seed/VeOmni/pull/862",
    "dp=4,zero=1,shard=2",
    "gradient norm",
    "norm",
    "factor|counted 2",
)
def _(patches: Patches) -> None:
    """With hybrid sharding, every replica of a shard is counted in the gradient norm."""
    from cuboid.training import step

    plain = grad_norm.squared_norm
    answers = grad_norm.answers_for

    def square(engine: Any) -> Tensor:
        grad_norm.answers_for = lambda *arguments: True
        try:
            return plain(engine)
        finally:
            grad_norm.answers_for = answers

    patches.put(step, "squared_norm", square)


@bug(
    "norms-decay",
    "https://github.com/ServiceNow/Fast-LLM/pull/545",
    "dp=2",
    "norm",
    "update",
    "weight decay on a parameter that has none",
)
def _(patches: Patches) -> None:
    """Weight decay holds back norms too."""
    plain = adamw.kind_of
    patches.put(adamw, "kind_of", lambda part: (True, plain(part)[1]))


@bug(
    "no-bias-correction",
    "https://arxiv.org/abs/2006.05987",
    "dp=2",
    ".*",
    "update",
    "no bias correction",
)
def _(patches: Patches) -> None:
    """Moments that begin at zero are used as they are (BERTAdam)."""
    plain = optimizer.update_eagerly

    def update(lot: Any, spec: Any, rate: float, steps: Tensor, scale: float) -> None:
        plain(lot, spec, rate, torch.full_like(steps, 1e7), scale)

    patches.put(optimizer, "update_eagerly", update)


@bug(
    "moments-lost",
    "https://github.com/areal-project/AReaL/pull/1468",
    "dp=2,zero=1",
    ".*",
    "update",
    "moments|factor|clipped",
)
def _(patches: Patches) -> None:
    """Optimizer state is dropped on the way: every step begins with empty moments."""
    plain = Optimizer._step_on_host

    def step(self: Any, *arguments: Any) -> None:
        for first, second in self._state._moments.values():
            first.zero_()
            second.zero_()
        plain(self, *arguments)

    patches.put(Optimizer, "_step_on_host", step)


@bug(
    "moments-of-another-parameter",
    "https://github.com/huggingface/transformers/pull/48569",
    "dp=2,zero=1",
    ".*",
    "update",
    "moments",
)
def _(patches: Patches) -> None:
    """Optimizer state comes back with the wrong parameter: second moments of another shard."""
    plain = Optimizer._step_on_host

    def step(self: Any, *arguments: Any) -> None:
        if int(self._steps) == 1:
            moments = self._state._moments
            one, other = [second for _, second in moments.values() if len(second) > 1000][:2]
            few = min(len(one), len(other))
            kept = one[:few].clone()
            one[:few] = other[:few]
            other[:few] = kept
        plain(self, *arguments)

    patches.put(Optimizer, "_step_on_host", step)


@bug(
    "parameters-not-in-the-optimizer",
    f"{TRAINCHECK}bug-reprod-scripts/pytorch-104336",
    "dp=2,zero=1",
    "head",
    "update",
    "not updated",
)
def _(patches: Patches) -> None:
    """The optimizer has other tensors than the model: some parameters never move."""
    plain = Optimizer._step_on_host

    def step(self: Any, *arguments: Any) -> None:
        held = [(shard, shard.master.clone()) for shard in self.optimizer_shards if shard.part.name.startswith("head")]
        plain(self, *arguments)
        for shard, before in held:
            shard.set_master(before)

    patches.put(Optimizer, "_step_on_host", step)


@bug(
    "update-of-one-rank-missing",
    f"{TRAINCHECK}bug-reprod-scripts/x-jxmnop-ddp-out-of-sync",
    "dp=2",
    ".*",
    "update",
    "not updated|copies",
)
def _(patches: Patches) -> None:
    """Replicas drift apart: one of them leaves a step out."""
    plain = Optimizer._step_on_host

    def step(self: Any, *arguments: Any) -> None:
        if patches.rank == 0 or int(self._steps):
            plain(self, *arguments)
        else:
            self._steps += 1

    patches.put(Optimizer, "_step_on_host", step)


@bug(
    "average-moves-away",
    "https://github.com/ostris/ai-toolkit/issues/1034",
    "dp=2,zero=1",
    ".*",
    "update",
    "away from the weights",
    set=AVERAGE,
)
def _(patches: Patches) -> None:
    """The moving average of weights moves away from them."""
    plain = average._move
    patches.put(average, "_pass", lambda compiled: lambda kept, new, weight, rate: plain(kept, new, weight, -rate))


@bug(
    "average-of-stale-weights",
    "https://github.com/meta-pytorch/tnt/pull/962",
    "dp=2,zero=1",
    ".*",
    "update",
    "before the update|stale|not moved",
    set=AVERAGE,
)
def _(patches: Patches) -> None:
    """The average takes in the weights as they were before the update."""
    plain, move = Optimizer.step, Optimizer.move_average

    def step(self: Any, *arguments: Any) -> None:
        move(self, torch.ones((), dtype=torch.bool))
        plain(self, *arguments)

    patches.put(Optimizer, "step", step)
    patches.put(Optimizer, "move_average", lambda self, counts: None)


@bug(
    "muon-orthogonalises-shards",
    "https://github.com/deepspeedai/DeepSpeed/issues/8437",
    "tp=2",
    r"layers\.",
    "update",
    "another matrix was orthogonalised",
    set=MUON,
)
def _(patches: Patches) -> None:
    """Each tensor rank orthogonalises its own rows."""
    plain = muon.MuonState.__init__

    def init(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        whole = self._orthogonal
        self._orthogonal = lambda batch: torch.cat([whole(part.contiguous()) for part in batch.chunk(2, 1)], 1)

    patches.put(muon.MuonState, "__init__", init)
    assert orthogonalize


@bug(
    "muon-scale-of-shards",
    "https://github.com/NVIDIA/Megatron-LM/pull/7117",
    "tp=2",
    r"layers\.",
    "update",
    "factor",
    set=MUON,
)
def _(patches: Patches) -> None:
    """An update is scaled by the shape of a shard."""
    plain = muon.update_factor
    patches.put(muon, "update_factor", lambda spec, rows, columns: plain(spec, rows // 2, columns // 2))


@bug(
    "amax-of-own-shard",
    "https://github.com/NVIDIA/TransformerEngine/pull/74",
    "dp=2,zero=3",
    r"layers\.",
    "weights|forward|update",
    "copies differ|slice|factor",
    model="tiny-gpt2",
    precisions=("fp8",),
)
def _(patches: Patches) -> None:
    """Scales of gathered fp8 weights come from the largest number of a rank's own shard."""
    plain, rounded = fp8_all_gather.all_reduce_maximum, fp8_all_gather.Fp8Shard._round

    def round_shard(self: Any, weights: Tensor) -> Tensor:
        peaks = len(self._quantised)

        def maximum(x: Tensor, group: Any) -> Tensor:
            own = x[:peaks].clone()
            plain(x, group)
            x[:peaks] = own  # norms and biases travel in the same message
            return x

        fp8_all_gather.all_reduce_maximum = maximum
        try:
            return rounded(self, weights)
        finally:
            fp8_all_gather.all_reduce_maximum = plain

    patches.put(fp8_all_gather.Fp8Shard, "_round", round_shard)
