"""Bugs of expert parallelism and of routers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuboid.model import load_balancing
from cuboid.model.load_balancing import Balance
from cuboid.model.router import Permutation, Reorder
from cuboid.parallel import expert, parallelize
from cuboid.parallel.expert import AllToAllDispatch
from cuboid.training import step
from tests.verification.bugs.bug import Patches, bug, leave_out

MIXTURE = "tiny-qwen3-moe"


def _each_gradient(patches: Patches, wrong: Any) -> None:
    """`wrong(unit, shard)` after all sums over ranks."""
    plain = step.finish_gradients

    def finish(engine: Any) -> None:
        plain(engine)
        for unit in engine.units:
            for shard in unit.optimizer_shards():
                wrong(unit, shard)

    patches.put(step, "finish_gradients", finish)


@bug(
    "expert-gradients-times-ep",
    "https://github.com/pytorch/pytorch/issues/160285",
    "dp=2,ep=2",
    r"feed_forward\.experts",
    "reduction",
    r"factor 2",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """Gradients of experts are as many times too large as there are ranks that share them."""
    ep = patches.run.layout.ep
    _each_gradient(patches, lambda unit, shard: shard.gradient.mul_(ep) if unit.name.endswith(".experts") else None)


@bug(
    "experts-summed-with-other-experts",
    "https://github.com/radixark/Megatron-LM/pull/84",
    "dp=2,ep=2",
    r"feed_forward\.experts",
    "reduction",
    r"other experts|another slice|other slices|rank \d",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """Gradients of experts are summed over the data-parallel ranks of dense parameters, which hold other experts."""
    plain = parallelize.Unit

    def unit(name: str, parts: Any, zero: int, groups: Any, *more: Any) -> Any:
        made = plain(name, parts, zero, groups, *more)
        if name.endswith(".experts"):
            made._gradients._groups = built[0]
        else:
            built.append(groups)
        return made

    built: list[Any] = []
    patches.put(parallelize, "Unit", unit)


@bug(
    "router-detached",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    "dp=2,ep=2",
    r"feed_forward",
    "input gradient",
    "zero",
    model=MIXTURE,
    set=("model.mixture.balance_coefficient=0.0", "model.mixture.z_coefficient=0.0"),
)
def _(patches: Patches) -> None:
    """The weights of the router lose their gradient on the way through a gather."""
    plain = Permutation.unpermute
    patches.put(
        Permutation,
        "unpermute",
        lambda self, rows, weights, rounds: plain(self, rows, weights.detach(), rounds),
    )


@bug(
    "balance-loss-times-tp",
    "https://github.com/NVIDIA/Megatron-LM/pull/5047",
    "tp=2",
    r"feed_forward",
    "input gradient|weight gradient",
    "auxiliary",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """The gradient of auxiliary losses grows with tp."""
    plain = load_balancing._WithLoss.backward
    tp = patches.run.layout.tp

    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        same, one = plain(context, gradient)
        return same, one * tp

    patches.put(load_balancing._WithLoss, "backward", staticmethod(backward))


@bug(
    "balance-loss-dropped",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/1412",
    "dp=2,ep=2",
    r"feed_forward",
    "input gradient|weight gradient",
    "auxiliary",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """What carries the gradient of auxiliary losses is not used further on."""
    plain = Balance.attach

    def attach(self: Any, weights: Tensor, *more: Any) -> Tensor:
        plain(self, weights, *more)
        return weights

    patches.put(Balance, "attach", attach)


@bug(
    "balance-over-own-part-of-sequences",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452#finding-05",
    "tp=2",
    r"feed_forward|router",
    "input gradient|weight gradient|reduction",
    "auxiliary|statistics",
    model=MIXTURE,
    precisions=("float64",),
)
def _(patches: Patches) -> None:
    """Loads of experts in a sequence are counted over the wrong ranks: a rank's own part of it."""
    plain = expert.join_sequences

    def join(router: Any, balance: Any, groups: Any, run: Any) -> None:
        plain(router, balance, groups, run)
        balance.over_sequence = lambda x: x

    patches.put(parallelize, "join_sequences", join)


@bug(
    "router-bias-from-own-tokens",
    "https://github.com/pytorch/torchtitan/pull/1114",
    "dp=2,ep=2",
    r"router",
    "reduction|update",
    "statistics|loads",
    model="tiny-deepseek",
)
def _(patches: Patches) -> None:
    """Biases of experts move by the loads that one rank saw."""
    patches.put(
        step, "summed_statistics", lambda engine: None if engine.balance is None else engine.balance.statistics.clone()
    )


@bug(
    "recomputation-counts-tokens-twice",
    "https://github.com/pytorch/torchtitan/pull/1593",
    "dp=2,recompute=full",
    r"router",
    "reduction",
    "factor 2|counted 2 times",
    model="tiny-deepseek",
)
def _(patches: Patches) -> None:
    """Tokens of each expert are counted again when a block is computed again."""
    plain = parallelize.watched

    def watched(router: Any, balance: Any, layer: int, run: Any) -> Any:
        plain(router, balance, layer, run)
        balance.recording = True
        return run

    patches.put(parallelize, "watched", watched)


@bug(
    "rows-return-in-the-order-they-arrived",
    "https://github.com/vllm-project/vllm/pull/52639",
    "dp=2,ep=2",
    r"feed_forward",
    "forward",
    "dispatch|other rows",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """What experts made goes back as if it stood in the order of the rows that came."""

    def go_back(self: Any, rows: Tensor) -> Tensor:
        rows = self._back.run(Reorder.apply(rows, self._order, self._inverse))
        assert not self._stay
        return rows

    patches.put(AllToAllDispatch, "go_back", go_back)


@bug(
    "router-noise-by-rank",
    "https://github.com/InternLM/InternLM/pull/405",
    "dp=2",
    r"router",
    "forward",
    "noise|seed|router",
    model="tiny-mixtral",
)
def _(patches: Patches) -> None:
    """Each rank draws random numbers from a seed of its own where all should have one."""
    plain = parallelize.make_balance

    def make(run: Any, device: torch.device) -> Any:
        return plain(replace(run, training=replace(run.training, seed=run.training.seed + patches.rank)), device)

    patches.put(parallelize, "make_balance", make)


@bug(
    "router-gradient-not-summed",
    "https://github.com/NVIDIA-NeMo/RL/issues/3716#router",
    "tp=2",
    r"feed_forward\.router",
    "reduction",
    "missing over tp",
    model=MIXTURE,
)
def _(patches: Patches) -> None:
    """The router's weights are the same on all tensor ranks, which route other tokens; their gradients stay apart."""
    leave_out(patches, "router")
