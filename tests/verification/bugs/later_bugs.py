"""Bugs of several parts of a trainer that were entered when the rules which look for causes stood: what these say of
bugs that nobody had in mind when they were written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.checkpoint import save
from cuboid.checkpoint.shards import ShardedTensor
from cuboid.model.dropout import _Drop, _dropped
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import VocabularyEmbedding
from cuboid.parallel import context, grad_norm, predictions
from cuboid.parallel.collectives import Pending
from cuboid.parallel.grad_reduce import GradientReducer
from cuboid.parallel.pipeline import Pipeline
from cuboid.parallel.predictions import PredictionLosses
from cuboid.parallel.rank_batch import BatchSharder
from cuboid.schedule.table import Message
from cuboid.training import step
from cuboid.training.optimizer import Optimizer
from tests.verification.bugs.bug import Patches, bug
from tests.verification.bugs.checkpoint_bugs import loading

DROPS = ("training.dropout=0.2",)


@bug(
    "dropout-of-the-first-tensor-rank",
    "https://github.com/PaddlePaddle/PaddleFleetX/pull/1005",
    "tp=2",
    r"embedding|layers\.0",
    "forward",
    "dropout|mask|other tokens",
    set=DROPS,
)
def _(patches: Patches) -> None:
    """Under sequence parallelism all tensor ranks drop what the first one does, though they hold other tokens."""
    plain = BatchSharder.__init__

    def init(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        self._part = (self._part[0], 0)

    patches.put(BatchSharder, "__init__", init)


@bug(
    "recomputation-draws-other-dropout",
    "https://github.com/allenai/OLMo-core/pull/828",
    "dp=2,recompute=full",
    r"layers\.\d|head",
    "input gradient",
    "dropout|mask",
    set=DROPS,
)
def _(patches: Patches) -> None:
    """The backward pass goes through other masks than the forward pass did."""

    def backward(given: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(gradient, given.keys.roll(1, 0), given.site, given.rate), None, None, None

    patches.put(_Drop, "backward", staticmethod(backward))


@bug(
    "schedule-steps-once-per-rank",
    "https://github.com/huggingface/transformers/pull/24088",
    "dp=2",
    ".*",
    "update",
    "learning rate",
)
def _(patches: Patches) -> None:
    """The schedule of the learning rate moves by as many steps as there are ranks: it falls twice as fast."""
    plain = Optimizer.step

    def update(self: Any, learning_rate: float, *arguments: Any) -> None:
        plain(self, learning_rate * (1 - 0.05 * int(self._steps)), *arguments)

    patches.put(Optimizer, "step", update)


@bug(
    "decay-twice",
    "https://github.com/dylanyunlon/Neuron_SP/issues/13",
    "dp=2,zero=1",
    ".*",
    "update",
    "decay",
    precisions=("float64",),
)
def _(patches: Patches) -> None:
    """A wrapper decays weights, and so does the optimizer inside."""
    plain = Optimizer.__init__

    def init(self: Any, engine: Any, spec: Any, *more: Any) -> None:
        plain(self, engine, replace(spec, weight_decay=2 * spec.weight_decay), *more)

    patches.put(Optimizer, "__init__", init)


@bug(
    "experts-not-in-the-norm",
    "https://github.com/deepspeedai/DeepSpeed/pull/8613",
    "dp=2,ep=2,zero=1",
    "gradient norm",
    "norm",
    "experts are not counted",
    model="tiny-qwen3-moe",
)
def _(patches: Patches) -> None:
    """Clipping takes the norm of shared parameters alone."""
    plain = grad_norm.answers_for

    def square(engine: Any) -> Tensor:
        patches.put(grad_norm, "answers_for", lambda *where: plain(*where) and ".experts." not in where[2].name)
        try:
            return squared(engine)
        finally:
            patches.put(grad_norm, "answers_for", plain)

    squared = grad_norm.squared_norm
    patches.put(step, "squared_norm", square)


@bug(
    "norms-averaged-over-experts",
    "https://github.com/deepspeedai/DeepSpeed/issues/8475",
    "dp=2,ep=2",
    "gradient norm",
    "norm",
    "experts",
    model="tiny-qwen3-moe",
)
def _(patches: Patches) -> None:
    """Squares of norms are averaged over data-parallel ranks, of which each has other experts."""
    plain = grad_norm.squared_norm

    def square(engine: Any) -> Tensor:
        experts = [
            shard.gradient.double().square().sum()
            for unit in engine.units
            for shard in unit.optimizer_shards()
            if ".experts." in shard.part.name
        ]
        own = torch.stack(experts).sum() if experts else torch.zeros(())
        whole = plain(engine)
        return whole - (own / 2).to(whole)

    patches.put(step, "squared_norm", square)


@bug(
    "heads-come-back-in-another-order",
    "https://github.com/deepspeedai/DeepSpeed/pull/8317",
    "cp=2,cp_method=ulysses",
    r"layers\.0\.attention",
    "forward",
    "heads|order",
)
def _(patches: Patches) -> None:
    """After Ulysses' second all-to-all, heads of the ranks lie in another order."""
    plain = context._all_to_all_heads

    def heads(tensors: list[Tensor], back: bool, call: int) -> list[Tensor]:
        found: list[Tensor] = plain(tensors, back, call)
        return [x.roll(x.shape[2] // 2, 2) for x in found] if back else found

    patches.put(context, "_all_to_all_heads", heads)


@bug(
    "first-row-of-each-rank-is-not-looked-up",
    "https://github.com/ibm-granite/dolomite-engine/pull/64",
    "tp=2",
    "embedding",
    "forward",
    "tokens",
    set=("model.vocab=30",),
)
def _(patches: Patches) -> None:
    """The rows of the embedding that a tensor rank holds begin one too late."""
    plain = torch.nn.functional.embedding

    def forward(self: Any, tokens: Tensor) -> Tensor:
        if self.region is None:
            return plain(tokens, self.weight)
        local = tokens - self.first_row
        held = (local > 0) & (local < self.weight.shape[0])
        found: Tensor = self.region.leave(plain(local.where(held, 0), self.weight) * held.unsqueeze(-1))
        return found

    patches.put(VocabularyEmbedding, "forward", forward)


@bug(
    "activation-of-another-micro-batch",
    "https://github.com/deepspeedai/DeepSpeed/issues/2800",
    "pp=2",
    r"layers\.\d",
    "forward",
    "micro-batch 1",
)
def _(patches: Patches) -> None:
    """A buffer for what comes from the stage before is used again before it was read."""
    plain, kept = Pipeline._receive, dict[int, Tensor]()

    def receive(self: Any, message: Message) -> Tensor:
        found = plain(self, message)
        if message.target_stage > message.source_stage and message.micro_batch < 2:
            kept[message.micro_batch] = found.clone()
            return kept[0].clone()
        return found

    patches.put(Pipeline, "_receive", receive)


@bug(
    "further-losses-by-the-tokens-of-one-rank",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "dp=2",
    "predict|head|layers",
    "input gradient",
    "tokens|mean of means",
    model="tiny-deepseek-mtp",
)
def _(patches: Patches) -> None:
    """Losses of layers that predict further tokens are divided by the labels of a rank, and not by those of all."""
    plain, plain_counts, own = PredictionLosses.begin_step, predictions.counted, list[Tensor]()

    def counts(batches: list[Any]) -> Tensor:
        found = plain_counts(batches)
        own[:] = [found.clone()]
        return found

    def begin(self: Any, given: Tensor) -> None:
        plain(self, given)
        ranks = dist.get_world_size()
        self._factors.copy_(self._coefficient * given[0].double() / (ranks * own[0][1:]).clamp(min=1))

    patches.put(step, "counted_labels", counts)
    patches.put(PredictionLosses, "begin_step", begin)


@bug(
    "shared-experts-not-summed",
    "https://github.com/vllm-project/tpu-inference/pull/3435",
    "tp=2,sequence_parallel=false",
    r"feed_forward",
    "forward",
    "missing over tp|add up",
    model="tiny-deepseek",
)
def _(patches: Patches) -> None:
    """What tensor ranks make of shared experts is not added up."""
    plain = FeedForward.forward

    def forward(self: Any, x: Tensor, *more: Any) -> Tensor:
        region = self.down.region
        if region is None or not getattr(self, "is_shared", False):
            return plain(self, x, *more)
        self.down.region = None
        try:
            return plain(self, x, *more)
        finally:
            self.down.region = region

    from cuboid.model import moe

    init = moe.MoE.__init__ if hasattr(moe, "MoE") else None
    assert init is not None

    def made(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        if self.shared is not None:
            self.shared.is_shared = True

    patches.put(moe.MoE, "__init__", made)
    patches.put(FeedForward, "forward", forward)


@bug(
    "last-micro-batch-alone-is-summed",
    "https://github.com/karpathy/build-nanogpt/pull/30",
    "dp=2",
    ".*",
    "reduction",
    r"missing over dp|micro-batch",
)
def _(patches: Patches) -> None:
    """Only the gradient of the last micro-batch is summed over replicas, that of the others stays a rank's own."""
    plain_collect, plain_finish = GradientReducer.collect, GradientReducer.finish

    def collect(self: Any, reduces: bool = True) -> None:
        if self._collected + 1 == self._expected and self.adds_in_place:
            # Autograd adds to the sum: what was there before this micro-batch is set aside.
            pass
        plain_collect(self, reduces)
        if self._collected + 1 == self._expected:
            self._aside = self._sum.clone()
            self._sum.zero_()

    def finish(self: Any) -> None:
        plain_finish(self)
        if getattr(self, "_aside", None) is not None:
            self._sum.add_(self._aside)
            self._aside = None

    patches.put(GradientReducer, "collect", collect)
    patches.put(GradientReducer, "finish", finish)


@bug(
    "summed-with-other-slices",
    "https://github.com/NVIDIA/Megatron-LM/pull/5916",
    "dp=2,tp=2",
    ".*",
    "reduction",
    "tp",
)
def _(patches: Patches) -> None:
    """Gradients are summed over a group that also has ranks with other slices of the same matrix."""

    def start(self: Any) -> None:
        if self.are_autograds:
            return
        dist.all_reduce(self._sum)
        self._reducing = Pending(None, self._sum)

    patches.put(GradientReducer, "start", start)


@loading(
    "experts-of-rank-0-are-saved",
    "https://github.com/KempnerInstitute/KempnerForge/issues/202",
    "dp=2,ep=2",
    "dp=2",
    r"experts",
    "another slice of it, that of rank 0",
    where="save",
    model="tiny-qwen3-moe",
)
def _(patches: Patches) -> None:
    """Experts of every rank are numbered from 0, and so those of one rank are written for all."""
    plain = save.kept_state

    def kept(*arguments: Any) -> dict[str, ShardedTensor]:
        state = plain(*arguments)
        if patches.leg == 0:
            for name in sorted(state):
                if name.startswith("parameter/") and ".experts." in name:
                    slices = []
                    for part, values in state[name].slices:
                        first = values.clone()
                        dist.broadcast(first, 0)
                        slices.append((part, first))
                    state[name] = replace(state[name], slices=tuple(slices))
        return state

    patches.put(save, "kept_state", kept)
