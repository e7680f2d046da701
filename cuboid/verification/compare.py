"""Compare two traces: relative errors, the largest over all tensors and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.checkpoint.state import AVERAGE
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.kernels.precision import wide
from cuboid.model.load_balancing import EXTRA
from cuboid.parallel.compiled import is_compiled
from cuboid.parallel.device import joined_device
from cuboid.parallel.grad_norm import counted_shards
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.parallel.zero import OptimizerShard
from cuboid.planning.collectives import unforeseen
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.spec.sharding import Part
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations
from cuboid.training.step import apply_update, compute_gradients
from cuboid.verification.follows import average_bound, norm_of, update_bound
from cuboid.verification.record import RankRecord, RankRecorder
from cuboid.verification.reference import Tensors, Trace, known_trace
from cuboid.verification.rounding import (
    DECIDED,
    MULTIPLE,
    REROUTED,
    ROUNDED,
    ROUNDOFF,
    TENSOR_ROUNDOFF,
    Bound,
    decided,
    moved,
    number_bound,
    tensor_bound,
    walked,
)

# The run under a layout, observed: every rank's optimizer shards consolidated into full tensors on rank 0.


Contribution = list[tuple[Part, int, int, Tensor]]


def observed_trace(run: Run, rank: int) -> Trace | None:
    """The trace on rank 0, None elsewhere. Every rank calls this."""
    return _observe(run, rank)[0]


def recorded_trace(run: Run, rank: int, step: int) -> tuple[Trace | None, list[RankRecord]]:
    """The same up to a step, and what each rank recorded of this; nothing on other ranks than 0."""
    return _observe(run, rank, step)


def _observe(run: Run, rank: int, recorded: int | None = None) -> tuple[Trace | None, list[RankRecord]]:
    device = joined_device(run.training.device)
    # Counting takes collectives out of compiled graphs, which would then not be the graphs that train.
    # What tensor ranks of one's own modules sum is found by running these; it would take every rank seconds.
    slow = isinstance(run.model, PythonModelSpec) and run.layout.tp * run.layout.ep > 1
    counted = not is_compiled(run, device) and not slow
    run = replace(run, output=replace(run.output, count_communication=counted))
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    trace = Trace()
    recorder = None if recorded is None else RankRecorder(engine, rank)
    for step in range(run.training.steps if recorded is None else recorded + 1):
        HEARTBEAT.enter("step", step + 1)
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
        if recorder is not None and step == recorded:
            recorder.attach(len(batches))
        pending = compute_gradients(engine, batches)
        result = pending.result()
        trace.losses.append(result.loss)
        if result.z_loss is not None:
            trace.z_losses.append(result.z_loss)
        trace.prediction_losses += result.prediction_losses
        trace.gradient_norms.append(result.gradient_norm)
        padding: set[str] = set()
        trace.gradients.append(whole(engine, lambda shard: shard.gradient, result.loss_scale or 1.0, padding))
        if recorder is not None and step == recorded:
            recorder.detach()
            recorder.see_gradients(result.loss, result.gradient_norm, result.loss_scale or 1.0)
        if result.routers is not None:
            trace.routers.append(result.routers)
        apply_update(engine, optimizer, pending, learning_rate(run.learning_rate, step, run.training.steps))
        if engine.ledger is not None:
            surprises = gathered(engine, unforeseen(run.of_batch(step), rank, engine.ledger.take()))
            trace.unforeseen += [f"rank {place} {line}" for place, lines in surprises for line in lines]
        trace.parameters.append(whole(engine, lambda shard: shard.master, padding=padding))
        if run.optimizer.average:
            averages = whole(engine, lambda shard: optimizer.state_of(shard)[AVERAGE])
            trace.averages.append({f"{AVERAGE}/{name}": average for name, average in averages.items()})
        found = [f"rank {place} {line}" for place, lines in gathered(engine, _not_as_kept(engine)) for line in lines]
        trace.unequal.append(deviations(engine, optimizer))
        found += [str(deviation) for deviation in trace.unequal[-1]]
        found += [f"{name}: padding is not zero" for name in sorted(padding)]
        trace.deviations.append(found)
    records: list[tuple[int, RankRecord]] = []
    if recorder is not None:
        recorder.see_update()
        records = gathered(engine, recorder.record)
    HEARTBEAT.enter("finish")
    return trace if rank == 0 else None, [record for _, record in records]


def _not_as_kept(engine: Engine) -> list[str]:
    """Weights that matmuls use and that are not those this rank keeps, bit by bit. Fp8 rounds them once more."""
    found = []
    for unit in engine.units:
        if not unit.gathers_exactly:
            continue  # and would be counted, where it finds amaxes once after each update
        unit.gather()
        for shard in unit.optimizer_shards():
            kept = shard.kept if shard.weight is None else shard.weight
            if not torch.equal(unit.parameters[shard.part.name].detach().flatten()[shard.start : shard.stop], kept):
                found.append(f"computes with other weights of {shard.part.name} than it keeps")
        unit.release()
    return found


def whole(
    engine: Engine, of: Callable[[OptimizerShard], Tensor], factor: float = 1.0, padding: set[str] | None = None
) -> Tensors:
    """`of`: what is taken of each optimizer shard. `factor`: what it is multiplied by. `padding`: as `assemble` has
    it."""
    own: Contribution = []
    for optimizer_shard in counted_shards(engine):
        held = of(optimizer_shard)
        own.append(
            (
                optimizer_shard.part,
                optimizer_shard.start,
                optimizer_shard.stop,
                held.to(wide(held.dtype)).cpu() / factor,
            )
        )
    found = gathered(engine, own)
    return assemble([contribution for _, contribution in found], padding) if found else {}


def gathered(engine: Engine, own: Any) -> list[tuple[int, Any]]:
    """(rank, what it has) of all ranks on rank 0, nothing elsewhere. Beside the engine, and so not counted."""
    world = engine.groups.world
    if world.handle is None:
        return [(0, own)]
    gathered: list[Any] | None = [None] * world.size if world.index == 0 else None
    with world.track.collective("all-gather"):
        dist.gather_object(own, gathered, dst=0)
    return list(enumerate(gathered or ()))


def assemble(contributions: list[Contribution], padding: set[str] | None = None) -> Tensors:
    """Put shards in their places. An element that nobody holds, or two hold, or padding that is not zero, is an
    error. `padding`: gets the names of those whose padding is not zero, where that is no error."""
    padded: set[str] = set()
    local: dict[tuple[str, int], tuple[Part, Tensor, Tensor]] = {}
    for part, start, stop, values in (item for contribution in contributions for item in contribution):
        if part.slice.start == part.slice.stop:  # more tensor ranks than vocabulary rows: nothing but padding
            if bool(values.any()):
                padded.add(part.name)
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
            padded.add(part.name)
        target = whole.setdefault(part.name, values.new_zeros(part.full_shape))
        target.narrow(cut.dimension, cut.start, real).copy_(shaped.narrow(cut.dimension, 0, real))
        filled[part.name] = filled.get(part.name, 0) + real * target.numel() // part.full_shape[cut.dimension]
    for name, count in filled.items():
        if count != whole[name].numel():
            raise AssertionError(f"{name}: {count} of {whole[name].numel()} elements are held")
    if padded and padding is None:
        raise AssertionError(f"{', '.join(sorted(padded))}: padding is not zero")
    if padding is not None:
        padding |= padded
    return whole


TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""Float32 rounds differently in every layout, so its bound only catches gross errors; the proof is in float64. What
bf16 may differ by is measured: see `rounding`."""

FLOOR = 1e-6
"""A gradient a million times smaller than the largest one is compared on that scale, and a parameter smaller than one
update on the scale of the learning rate. A key bias under learned positions, say, has a gradient of exactly zero,
which one device and any layout alike compute as rounding noise."""


@dataclass(frozen=True)
class Verdict:
    layout: str
    model: str
    world_size: int
    steps: int
    dtype: str
    seed: int
    loss_error: float
    gradient_error: float
    gradient_norm_error: float
    parameter_error: float
    router_error: float | None
    """Of statistics and auxiliary losses; None without experts."""
    worst_gradient: str
    worst_parameter: str
    tolerance: float
    """In bf16 the largest of `tolerances`."""
    tolerances: dict[str, float]
    """What each kind of error may be; in bf16, of the tensor named."""
    passed: bool
    unforeseen: list[str]
    """Collectives between ranks that are not as the planner counts them, to the byte."""
    deviations: list[str]
    """Copies on several ranks that are not equal, bit by bit; `passed` is then false."""
    located: dict[str, Any] | None = None
    """Where it first differs, as `evidence.Located` has it; None where it does not."""


def relative_error(value: float, reference: float) -> float:
    error = abs(value - reference) / abs(reference) if reference else abs(value)
    return (
        error if error == error else float("inf")
    )  # what is not a number equals nothing, and no maximum would show it


def tensor_error(value: Tensor, reference: Tensor, floor: float) -> float:
    """Largest difference over the largest magnitude of the reference, but not less than `floor`."""
    if value.shape != reference.shape:
        return float("inf")
    difference = (value - reference).abs().max().item()
    scale = max(reference.abs().max().item(), floor)
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


def _largest(tensors: Tensors) -> float:
    return max(tensor.abs().max().item() for tensor in tensors.values())


def _worst(observed: list[Tensors], reference: list[Tensors], floors: list[float]) -> tuple[float, str]:
    errors = [(0.0, "")]
    for seen, expected, floor in zip(observed, reference, floors, strict=True):
        if seen.keys() != expected.keys():
            missing = sorted(seen.keys() ^ expected.keys())
            return float("inf"), f"{missing[0]} is held by one side only"
        errors += [(tensor_error(seen[name], expected[name], floor), name) for name in expected]
    return max(errors)


def _only_rounding(run: Run, reference: Trace) -> set[str]:
    """Parameters whose gradient is zero but for rounding, of which AdamW makes an update that can be large. In float32
    these are compared with what follows from the observed gradient alone."""
    if run.training.precision == "float64":
        return set()
    largest = [(step, FLOOR * _largest(step)) for step in reference.gradients]
    return {name for step, least in largest for name, x in step.items() if x.abs().max().item() <= least}


def _without(tensors: Tensors, names: set[str]) -> Tensors:
    return {name: x for name, x in tensors.items() if name not in names}


def _router_error(observed: Trace, reference: Trace) -> float | None:
    errors = []
    for seen, expected in zip(observed.routers, reference.routers, strict=True):
        blocks = (slice(None, -len(EXTRA)), *range(-len(EXTRA), 0))  # loads, and each of the sums on its own scale
        errors += [tensor_error(seen[:, block], expected[:, block], floor=0.0) for block in blocks]
    return max(errors, default=None)


def compare(run: Run, observed: Trace, reference: Trace) -> Verdict:
    pairs = list(zip(observed.all_losses, reference.all_losses, strict=True))
    norms = list(zip(observed.gradient_norms, reference.gradient_norms, strict=True))
    gradient_error, worst_gradient = _worst(
        observed.gradients, reference.gradients, [FLOOR * _largest(step) for step in reference.gradients]
    )
    noise = _only_rounding(run, reference)
    parameter_error, worst_parameter = _worst(
        [_without(step, noise) for step in observed.parameters] + observed.averages,
        [_without(step, noise) for step in reference.parameters] + reference.averages,
        [run.learning_rate.peak] * len(reference.parameters + reference.averages),
    )
    loss_error = max(relative_error(*pair) for pair in pairs)
    norm_error = max(relative_error(*pair) for pair in norms)
    router_error = _router_error(observed, reference)
    tolerance = TOLERANCE[run.training.precision]
    bounds = {
        "loss": Bound(loss_error, tolerance),
        "gradient": Bound(gradient_error, tolerance, worst_gradient),
        "gradient_norm": Bound(norm_error, tolerance),
        "parameter": Bound(parameter_error, tolerance, worst_parameter),
    }
    if router_error is not None:
        bounds["router"] = Bound(router_error, tolerance)
    if run.training.precision != "float64":
        _with_what_follows(run, observed, reference.start, bounds)
    return _verdict(run, observed, bounds)


def _with_what_follows(run: Run, observed: Trace, start: Tensors, bounds: dict[str, Bound]) -> None:
    """Numbers that need no reference: what follows from the observed gradients alone is exact but for float32."""
    bounds["gradient_norm"] = max(bounds["gradient_norm"], norm_of(observed), key=lambda bound: bound.ratio)
    for bound in (update_bound(run, observed, start), average_bound(run, observed, start)):
        if bound is not None:
            bounds["parameter"] = max(bounds["parameter"], bound, key=lambda bound: bound.ratio)


def compare_rounded(run: Run, observed: Trace, rounded: Sequence[Trace], exact: Trace) -> Verdict:
    """In bf16 and the like: `rounded` are equally good answers in it, and `exact` is one in float32, all by one
    process. The first of `rounded` is what is compared with."""
    among = decided([trace.gradients for trace in rounded], exact.gradients)
    seen, true = (moved(trace.parameters, exact.start, among) for trace in (observed, exact))
    expected = [moved(trace.parameters, exact.start, among) for trace in rounded]
    ways = walked(exact.parameters, exact.start, among)
    rounding = MULTIPLE * TENSOR_ROUNDOFF.get(run.training.precision, ROUNDOFF)
    least = max(rounding, REROUTED if run.model.mixture is not None else 0.0)
    norms, losses = [trace.gradient_norms for trace in rounded], [trace.all_losses for trace in rounded]
    gradients = [trace.gradients for trace in rounded]
    bounds = {
        "loss": number_bound(observed.all_losses, losses, exact.all_losses),
        "gradient": tensor_bound(observed.gradients, gradients, exact.gradients, least),
        "gradient_norm": number_bound(observed.gradient_norms, norms, exact.gradient_norms),
        "parameter": tensor_bound(seen, expected, true, max(least, 1 / DECIDED), beside=ways),
    }
    _with_what_follows(run, observed, exact.start, bounds)
    if exact.routers:
        routers = [[{"": statistics} for statistics in trace.routers] for trace in (observed, exact, *rounded)]
        bounds["router"] = tensor_bound(routers[0], routers[2:], routers[1], rounding)
    return _verdict(run, observed, bounds)


def _verdict(run: Run, observed: Trace, bounds: dict[str, Bound]) -> Verdict:
    return Verdict(
        layout=str(run.layout),
        model=run.model.name,
        world_size=run.layout.world_size,
        steps=run.training.steps,
        dtype=run.training.precision,
        seed=run.training.seed,
        loss_error=bounds["loss"].error,
        gradient_error=bounds["gradient"].error,
        gradient_norm_error=bounds["gradient_norm"].error,
        parameter_error=bounds["parameter"].error,
        router_error=bounds["router"].error if "router" in bounds else None,
        worst_gradient=bounds["gradient"].name,
        worst_parameter=bounds["parameter"].name,
        tolerance=max(bound.allowed for bound in bounds.values()),
        tolerances={name: bound.allowed for name, bound in bounds.items()},
        passed=all(bound.ratio <= 1 for bound in bounds.values()) and not any(observed.deviations),
        unforeseen=observed.unforeseen,
        deviations=[line for step in observed.deviations for line in step],
    )


def rounded_traces(run: Run) -> list[Trace]:
    """What one process computes in the run's 16 bits; where tensor ranks sum, also with sums as NCCL rounds them."""
    hops = [1, run.layout.tp] if run.layout.tp > 1 else [1]
    return [known_trace(run, hops=each) for each in hops]


def verify_rank(rank: int, run: Run) -> dict[str, Any] | None:
    """What each rank process does; the verdict comes from rank 0. Where it is bad, all ranks go through the step that
    failed once more, and record it."""
    observed = observed_trace(run, rank)
    verdict = None if observed is None else judge(run, observed)
    failed = None
    if verdict is not None and observed is not None and not verdict.passed:
        failed = first_failure(run, observed)
    failed = _told_by_rank_0(run, failed)
    if failed is not None:
        from cuboid.verification.locate import locate  # which a layout that is right never needs

        again, records = recorded_trace(run, rank, failed)
        if verdict is not None and again is not None:
            located = locate(run, failed, again, records)
            verdict = replace(verdict, located=None if located is None else asdict(located))
    return None if verdict is None else asdict(verdict)


def judge(run: Run, observed: Trace) -> Verdict:
    if run.training.precision in ROUNDED:
        return compare_rounded(run, observed, rounded_traces(run), known_trace(run, "float32"))
    return compare(run, observed, known_trace(run))


def first_failure(run: Run, observed: Trace) -> int:
    """The first step, counted from 0, up to which it differs."""
    steps = range(len(observed.losses))
    if run.training.precision in ROUNDED:
        rounded, exact = rounded_traces(run), known_trace(run, "float32")
        verdicts = (
            compare_rounded(run, observed.until(n), [each.until(n) for each in rounded], exact.until(n)) for n in steps
        )
    else:
        verdicts = (compare(run, observed.until(step), known_trace(run).until(step)) for step in steps)
    return next((step for step, verdict in enumerate(verdicts) if not verdict.passed), steps[-1])


def _told_by_rank_0(run: Run, what: int | None) -> int | None:
    if run.layout.world_size == 1:
        return what
    told = [what]
    dist.broadcast_object_list(told, src=0)
    return told[0]
