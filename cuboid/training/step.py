"""One optimizer step of one rank: count tokens, run the pipeline, finish the gradients, clip, update.

Nothing here waits for the device: losses and norms stay there until somebody asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuboid.data.assignment import Assignment
from cuboid.kernels.pinned_memory import HostCopy
from cuboid.kernels.precision import SMALLEST, LossScale
from cuboid.model.batch import MicroBatch
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.grad_norm import finish_gradients, squared_norm
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.predictions import counted as counted_labels
from cuboid.parallel.rank_batch import RankBatch
from cuboid.resilience.faults import strikes
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.cuda_graphs import Passes, RunPasses
from cuboid.training.layer_norms import LayerNorms, Norms, read_norms
from cuboid.training.optimizer import Optimizer
from cuboid.training.routers import rebalance, summed_statistics


@dataclass(frozen=True)
class StepResult:
    """The same on every rank, but for the seconds."""

    loss: float
    """Sum of token losses / tokens with labels, over the global batch."""
    gradient_norm: float
    tokens: int
    """Of the global batch, those with labels."""
    stops: bool = False
    """Whether some rank was asked to stop before this step."""
    left_out: str = ""
    """Why its update was skipped; empty if it was not."""
    loss_scale: float = 0.0
    """What the loss was multiplied by, in fp16; else 0."""
    overflows: int = 0
    """Steps so far whose gradients were too large for fp16, this one included."""
    routers: Tensor | None = None
    """A row per layer with experts: assignments of each expert and the sums of `balance.EXTRA`, over the global
    batch."""
    activation: float = math.nan
    """Root mean square of the residual stream as the head reads it, over the global batch."""
    z_loss: float | None = None
    """Mean over tokens with labels, without its coefficient and no part of `loss`; None where it takes no part in
    training."""
    prediction_losses: Sequence[float] = ()
    """Of each prediction layer, a mean over its labels, without the coefficient and no part of `loss`."""
    layers: Norms | None = None
    """By layer, where they were asked for."""
    islands: dict[str, Any] | None = None
    """What there is to tell of the rounds of islands since the step before."""
    sequences: int = 0
    """Of the global batch."""
    learning_rate: float = 0.0
    seconds: float = 0.0
    """From the end of the step before."""
    validation_loss: float | None = None
    """Where an evaluation followed."""
    assignment: Assignment | None = None
    """Of its sequences to replicas, where it is by their work."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def overflowed(self) -> bool:
        """Whether a smaller factor of the loss may be all that it takes: no fault, and the update is skipped."""
        return self.loss_scale > SMALLEST and math.isfinite(self.loss) and not math.isfinite(self.gradient_norm)


LeavesOut = Callable[[StepResult], str]
"""Why the update of a step must be skipped, the same on all ranks; empty if it need not."""


class PendingStep:
    """What a step computed, still on its way from the device."""

    def __init__(
        self,
        loss: Tensor,
        gradient_norm: Tensor,
        tokens: Tensor,
        sequences: int,
        asked: Tensor,
        own_square: Tensor,
        activation: Tensor,
        routers: Tensor | None = None,
        loss_scale: LossScale | None = None,
        z_loss: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> None:
        self.loss = loss
        self.gradient_norm = gradient_norm
        self.sequences = sequences
        self.own_square = own_square
        """This rank's share of the squared gradient norm."""
        self.routers = routers
        self.left_out = ""
        self.layers: HostCopy | None = None
        # All scalars (shape ()), on the device, equal on every rank; float64 holds token counts exactly too.
        told = [loss, gradient_norm, tokens, asked, activation]
        self.loss_scale: Tensor | None = None
        if loss_scale is not None:
            self.loss_scale = loss_scale.factor
            told += [loss_scale.factor, loss_scale.overflows]
        self._has_z_loss = z_loss is not None
        told += [] if z_loss is None else [z_loss]
        self._predicted = 0 if predicted is None else len(predicted)
        told += [] if predicted is None else predicted.unbind()
        values = torch.stack([value.double() for value in told])
        # To the host now: a copy that is asked for later would wait for the step that has been started since.
        self._copy = HostCopy(values, *(() if routers is None else (routers,)), timed=True)

    @property
    def counts(self) -> Tensor:
        """False skips the update."""
        if self.left_out:
            return torch.zeros((), dtype=torch.bool, device=self.loss.device)
        # A bool on the device: the update reads it there, so the host need not wait to know whether it counts.
        return self.loss.isfinite() & self.gradient_norm.isfinite()

    def seconds_after(self, before: PendingStep | None) -> float | None:
        """By the device's own clock, where it has one, between the ends of two steps it has computed: the host may
        learn of both at once."""
        return None if before is None else self._copy.seconds_after(before._copy)

    def result(self) -> StepResult:
        """Waits until the device has computed it."""
        values, *routers = self._copy.read()
        loss, norm, tokens, asked, activation, *scaling = values.tolist()
        predicted = [scaling.pop() for _ in range(self._predicted)][::-1]
        z_loss = scaling.pop() if self._has_z_loss else None
        scale, before = scaling or (0.0, 0)
        told = (int(tokens), asked > 0, self.left_out, scale, int(before), routers[0] if routers else None, activation)
        result = StepResult(loss, norm, *told, z_loss=z_loss, sequences=self.sequences, prediction_losses=predicted)
        # Of an update that was not skipped.
        layers = None if self.layers is None or self.left_out or not result.is_finite else read_norms(self.layers)
        return replace(result, overflows=result.overflows + result.overflowed, layers=layers)


def run_passes(engine: Engine, batches: list[RankBatch], factor: Tensor) -> Passes:
    """Forward and backward, kernel by kernel. `factor`: what the loss is multiplied by beside the mean over tokens."""
    # Tokens first: dividing each micro-batch's loss by the global count makes every later reduction a plain sum.
    # The data group is dp × cp: tensor and pipeline ranks see the same tokens and must not count them again.
    counts = all_reduce(counted_labels(batches), engine.groups.data)
    tokens = counts.flatten()[0]
    for unit in engine.units:
        unit.begin_step(len(batches))
    sequences = _sequences(engine, len(batches))
    engine.activations.begin_step(sequences)
    if engine.z_loss is not None:
        engine.z_loss.begin_step()
    if engine.predictions is not None:
        engine.predictions.begin_step(counts)
    if engine.peaks is not None:
        engine.peaks.begin_step()
    if engine.balance is not None:
        engine.balance.begin_step(sequences)
        engine.balance.factor = None if engine.loss_scale is None else factor
    # In float64, then in the dtype gradients are summed in. It stays on the device, as a CUDA graph needs it.
    scale = factor / tokens.clamp(min=1).double()
    summed_loss = engine.pipeline.run(batches, scale.to(engine.units[0].accumulate))
    if engine.balance is not None:
        engine.balance.end_passes()
    # Reductions started during the backward; what is left of them is waited for here, after the last action.
    HEARTBEAT.do("gradients")
    finish_gradients(engine)
    # Tensor ranks of the last stage all have the loss: one of them counts, so that the sum over the world is right.
    own_loss = summed_loss if engine.holds_loss else torch.zeros_like(summed_loss)
    return Passes(tokens, own_loss, squared_norm(engine))


def _sequences(engine: Engine, micro_batches: int) -> int:
    """Of the global batch of which this rank has so many micro-batches."""
    layout = engine.run.layout
    own = 1 if layout.has_unequal_sizes else layout.weight_of(engine.groups.coordinates.dp)
    return micro_batches // own * layout.batch_unit


def compute_gradients(
    engine: Engine, micro_batches: list[MicroBatch], asked: bool = False, passes: RunPasses | None = None
) -> PendingStep:
    """After this the optimizer shards hold the gradient of (sum of token losses / tokens with labels) over the global
    batch, plus that of z-loss and routers' auxiliary losses; in fp16 it is still multiplied by the loss scale.
    `asked`: this rank was asked to stop, which all ranks learn. `passes`: another way to run them, with the same
    results."""
    batches = [engine.batches.of(batch) for batch in micro_batches]
    scaling = engine.loss_scale
    factor = torch.ones((), dtype=torch.float64, device=engine.device) if scaling is None else scaling.factor
    own = (passes or partial(run_passes, engine))(batches, factor)
    # Gradients stay multiplied by the loss scale until the update; the norm that is clipped and told is without it.
    own_square = own.square if scaling is None else own.square / factor.square().to(own.square.dtype)
    if strikes(HEARTBEAT, "nan"):
        own_square = torch.full_like(own_square, math.nan)
    # One all-reduce of a few numbers over the world, in place of several: at this size a collective costs its latency.
    told = [own.loss, own_square, torch.full_like(own.loss, asked), engine.activations.read_by_head]
    apart = [*([] if engine.z_loss is None else [engine.z_loss.summed])]
    if engine.predictions is not None:
        apart += engine.predictions.summed.unbind()
    told += apart if engine.holds_loss else [torch.zeros_like(own.loss)] * len(apart)
    loss, square, ranks_asked, activation, *others = all_reduce(torch.stack(told), engine.groups.world).unbind()
    counted = own.tokens.clamp(min=1)
    loss, norm, statistics = loss / counted, square.sqrt(), summed_statistics(engine)
    z_loss = None if engine.z_loss is None else others.pop(0) / counted
    predicted = None
    if engine.predictions is not None:
        predicted = torch.stack(others).double() / engine.predictions.counts.clamp(min=1)
    numbers = (loss, norm, own.tokens, _sequences(engine, len(batches)), ranks_asked, own_square, activation.sqrt())
    return PendingStep(*numbers, statistics, scaling, z_loss, predicted)


def start_step(
    engine: Engine,
    optimizer: Optimizer,
    micro_batches: list[MicroBatch],
    learning_rate: float,
    before_update: Callable[[], None] | None = None,
    asked: bool = False,
    judge: LeavesOut | None = None,
    passes: RunPasses | None = None,
    norms: LayerNorms | None = None,
) -> PendingStep:
    """A step whose loss or gradient is not finite is skipped on every rank alike: all see the same numbers. `judge`:
    decides before the update, for which the host then waits. `norms`: measured by layer, of this step."""
    pending = compute_gradients(engine, micro_batches, asked, passes)
    # A judge reads the result, for which the host waits: only runs that look for spikes have one.
    if judge is not None:
        pending.left_out = judge(pending.result())
    # After the passes, so that a save that still copies the state had all of them to finish in.
    if before_update is not None:
        before_update()
    apply_update(engine, optimizer, pending, learning_rate, norms)
    return pending


def apply_update(
    engine: Engine,
    optimizer: Optimizer,
    pending: PendingStep,
    learning_rate: float,
    norms: LayerNorms | None = None,
) -> None:
    """Everything a step changes."""
    HEARTBEAT.do("update")
    clip, counts = engine.run.training.gradient_clip, pending.counts
    if norms is not None:
        norms.begin_step()
    optimizer.step(learning_rate, pending.gradient_norm, clip, counts, pending.loss_scale, norms)
    if norms is not None:
        pending.layers = norms.finish_step(pending.loss_scale)
    # After the update, which unscales with the old factor. The routers' biases move last: they belong to the next step.
    if engine.loss_scale is not None:
        engine.loss_scale.update(pending.loss, pending.gradient_norm, counts)
    if pending.routers is not None:
        rebalance(engine, pending.routers, counts)
    optimizer.move_average(counts)


def train_step(
    engine: Engine,
    optimizer: Optimizer,
    micro_batches: list[MicroBatch],
    learning_rate: float,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """`start_step`, waited for."""
    return start_step(engine, optimizer, micro_batches, learning_rate, before_update).result()


def evaluate(
    engine: Engine, batches: Iterable[list[MicroBatch]], stops: Callable[[], bool] = lambda: False
) -> float | None:
    """The loss on held-out data: every rank calls it, every rank gets the same number. Sum of token losses / tokens
    with labels, over all batches and replicas; no state changes. None if `stops`, asked after each batch and of one
    mind on all ranks, cut it short."""
    # Sums, not means: batches may differ in how many labels they have.
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    tokens = torch.zeros((), dtype=torch.float64, device=engine.device)
    for micro_batches in batches:
        own = [engine.batches.of(batch, trains=False) for batch in micro_batches]
        summed = engine.pipeline.evaluate(own)
        if engine.holds_loss:
            loss += summed
            tokens += sum(int(batch.counted) for batch in own)
        if stops():
            return None
    total, count = all_reduce(torch.stack((loss, tokens)), engine.groups.world).tolist()
    if engine.ledger is not None:
        engine.ledger.take()  # what it communicated is no part of a step
    return total / count if count else float("nan")
