"""The run under a layout, observed: every rank's optimizer shards consolidated into full tensors on rank 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.kernels.precision import wide
from cuboid.parallel.compiled import is_compiled
from cuboid.parallel.device import joined_device
from cuboid.parallel.grad_norm import counted_pieces
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.planning.collectives import unforeseen
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.spec.sharding import Part
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import apply_update, compute_gradients
from cuboid.verification.reference import Tensors, Trace

Contribution = list[tuple[Part, int, int, Tensor]]


def observed_trace(run: Run, rank: int) -> Trace | None:
    """The trace on rank 0, None elsewhere. Every rank calls this."""
    device = joined_device(run.training.device)
    # Counting takes collectives out of compiled graphs, which would then not be the graphs that train.
    # What modules of one's own communicate is not predicted.
    counted = not is_compiled(run, device) and not isinstance(run.model, PythonModelSpec)
    run = replace(run, output=replace(run.output, count_communication=counted))
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    trace = Trace()
    for step in range(run.training.steps):
        HEARTBEAT.enter("step", step + 1)
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
        pending = compute_gradients(engine, batches)
        result = pending.result()
        trace.losses.append(result.loss)
        trace.gradient_norms.append(result.gradient_norm)
        trace.gradients.append(_whole(engine, gradients=True, factor=result.loss_scale or 1.0))
        if result.routers is not None:
            trace.routers.append(result.routers)
        apply_update(engine, optimizer, pending, learning_rate(run.learning_rate, step, run.training.steps))
        if engine.ledger is not None:
            surprises = _gathered(engine, unforeseen(run, rank, engine.ledger.take()))
            trace.unforeseen += [f"rank {place} {line}" for place, lines in surprises for line in lines]
        trace.parameters.append(_whole(engine, gradients=False))
    HEARTBEAT.enter("finish")
    return trace if rank == 0 else None


def _whole(engine: Engine, gradients: bool, factor: float = 1.0) -> Tensors:
    """`factor`: what they are multiplied by."""
    own: Contribution = []
    for optimizer_shard in counted_pieces(engine):
        held = optimizer_shard.gradient if gradients else optimizer_shard.master
        own.append(
            (
                optimizer_shard.part,
                optimizer_shard.start,
                optimizer_shard.stop,
                held.to(wide(held.dtype)).cpu() / factor,
            )
        )
    gathered = _gathered(engine, own)
    return assemble([contribution for _, contribution in gathered]) if gathered else {}


def _gathered(engine: Engine, own: Any) -> list[tuple[int, Any]]:
    """(rank, what it has) of all ranks on rank 0, nothing elsewhere. Beside the engine, and so not counted."""
    world = engine.groups.world
    if world.handle is None:
        return [(0, own)]
    gathered: list[Any] | None = [None] * world.size if world.index == 0 else None
    with world.track.collective("all-gather"):
        dist.gather_object(own, gathered, dst=0)
    return list(enumerate(gathered or ()))


def assemble(contributions: list[Contribution]) -> Tensors:
    """Put shards in their places. An element that nobody holds, or two hold, or padding that is not zero, is an
    error."""
    local: dict[tuple[str, int], tuple[Part, Tensor, Tensor]] = {}
    for part, start, stop, values in (item for contribution in contributions for item in contribution):
        if part.slice.start == part.slice.stop:  # more tensor ranks than vocabulary rows: nothing but padding
            if bool(values.any()):
                raise AssertionError(f"{part.name}: padding is not zero")
            continue
        key = (part.name, part.slice.start)
        if key not in local:
            local[key] = (part, values.new_zeros(part.size), torch.zeros(part.size, dtype=torch.int8))
        local[key][1][start:stop] += values
        local[key][2][start:stop] += 1
    whole: Tensors = {}
    filled: dict[str, int] = {}
    for part, values, holders in local.values():
        if not bool((holders == 1).all()):
            raise AssertionError(f"{part.name}: elements held by no rank or by several")
        cut = part.slice
        real = cut.stop - cut.start
        shaped = values.view(part.shape)
        if bool(shaped.narrow(cut.dimension, real, cut.length - real).any()):
            raise AssertionError(f"{part.name}: padding is not zero")
        target = whole.setdefault(part.name, values.new_zeros(part.full_shape))
        target.narrow(cut.dimension, cut.start, real).copy_(shaped.narrow(cut.dimension, 0, real))
        filled[part.name] = filled.get(part.name, 0) + real * target.numel() // part.full_shape[cut.dimension]
    for name, count in filled.items():
        if count != whole[name].numel():
            raise AssertionError(f"{name}: {count} of {whole[name].numel()} elements are held")
    return whole
