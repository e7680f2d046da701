"""One step of a run again, from the newest checkpoint before it and on the same data: is what it gave the fault of the
data, or of the machine?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from cuboid.checkpoint.save import load
from cuboid.checkpoint.weights import start
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.collectives import start_all_gather
from cuboid.parallel.device import joined_device
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, apply_update, compute_gradients

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2, "fp16": 1e-2, "fp8": 1e-1}
"""Relative, between layouts and between kernels of different order."""

Cause = Literal["data", "hardware", "passing", "none"]


@dataclass(frozen=True)
class Seen:
    """What a step gave, on all ranks together."""

    loss: float
    gradient_norm: float
    squared_norms: tuple[float, ...] = ()
    """Each rank's part of the gradient norm; empty where nobody kept it."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class Logged:
    """What the run's folder tells of a step."""

    seen: Seen | None
    """None if the step was not finite and no more is known, or nothing is."""
    reason: str
    """Why it was bad; empty if it was not."""
    skipped: tuple[int, ...]
    """Batches the run had skipped when it took the step."""
    left_out: tuple[int, ...]
    """Steps before it, counted from 0, whose updates were skipped."""
    layout: str


@dataclass(frozen=True)
class Replayed:
    """What one rank found, the same on all of them."""

    attempts: list[Seen]
    batch: int
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    sentence: str
    repeatable: bool
    """Whether all attempts gave the same bits."""
    matches: bool | None
    """Whether they gave what the run did, to the tolerance; None if the run did not say."""
    identical: bool | None
    """Whether bit for bit."""
    deviating_ranks: list[int] = field(default_factory=list)
    """Whose part of the gradient is not what the run logged, on the same layout."""


def replay_rank(rank: int, run: Run, checkpoint: str, first: int, step: int, times: int, logged: Logged) -> Replayed:
    """Each time from the checkpoint after `first` steps, or from the beginning if there is none, to `step`, counted
    from 0. Every rank calls this."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this when it starts
    torch.use_deterministic_algorithms(True)
    device = joined_device(run.training.device)
    source = make_source(run)
    attempts = []
    for _ in range(times):
        HEARTBEAT.enter("set-up")
        engine = build_engine(run, rank, device)
        optimizer = Optimizer(engine, run.optimizer)
        if checkpoint:
            load(engine, optimizer, checkpoint)
        elif run.training.start_from:
            start(engine, run.training.start_from)
        engine.course.skipped = list(logged.skipped)
        for number in range(first, step + 1):
            HEARTBEAT.enter("step", number + 1)
            batches = micro_batches(source, run, engine.course.batch(number), engine.groups.coordinates.dp, device)
            pending = compute_gradients(engine, batches)
            if number < step:
                pending.left_out = "as in the run" if number in logged.left_out else ""
                apply_update(engine, optimizer, pending, learning_rate(run.learning_rate, number, run.training.steps))
        attempts.append(_seen(engine, pending))
    HEARTBEAT.enter("finish")
    batch = engine.course.batch(step)
    assert isinstance(batch, int)  # of a process that is no island
    origins = [(position, source.origin(position)) for position in run.training.places(batch)]
    samples = [{"position": position, **(asdict(origin) if origin else {})} for position, origin in origins]
    return Replayed(attempts, batch, samples)


def _seen(engine: Engine, pending: PendingStep) -> Seen:
    squares = start_all_gather(pending.own_square.reshape(1), engine.groups.world).wait().tolist()
    result = pending.result()
    return Seen(result.loss, result.gradient_norm, tuple(squares))


def judge(attempts: Sequence[Seen], logged: Logged, run: Run) -> Verdict:
    first = attempts[0]
    repeatable = all(_same(first, other) for other in attempts)
    if not repeatable:
        return Verdict(
            "hardware",
            f"{len(attempts)} replays of the same step on the same data differ: this hardware, or an operation without "
            "a fixed order, is at fault",
            False,
            None,
            None,
        )
    known = logged.seen
    if known is None and not logged.reason:
        return Verdict("none", "the run did not log this step; all replays give the same", True, None, None)
    same_layout = str(run.layout) == logged.layout
    identical = known is not None and same_layout and _same(first, known)
    tolerance = TOLERANCE[run.training.precision]
    matches = not first.is_finite if known is None or not known.is_finite else _close(first, known, tolerance)
    deviating = []
    if known is not None and same_layout and known.squared_norms and not matches:
        pairs = enumerate(zip(first.squared_norms, known.squared_norms, strict=True))
        deviating = [rank for rank, (ours, theirs) in pairs if not _near(ours, theirs, tolerance)]
    if not matches:
        named = f" (rank {', '.join(map(str, deviating))})" if deviating else ""
        sentence = (
            f"every replay gives the same, and not what the run saw: the hardware of that time{named} was at fault"
        )
        return Verdict("passing", sentence, True, False, False, deviating)
    if logged.reason or not first.is_finite:
        sentence = "every replay gives the same bad value as the run: the data, or the code, is at fault"
        return Verdict("data", sentence, True, True, identical)
    return Verdict("none", "every replay gives what the run saw, and nothing is bad about it", True, True, identical)


def _same(one: Seen, other: Seen) -> bool:
    """Bit for bit; what is not a number equals itself here."""
    return repr((one.loss, one.gradient_norm)) == repr((other.loss, other.gradient_norm))


def _close(one: Seen, other: Seen, tolerance: float) -> bool:
    return _near(one.loss, other.loss, tolerance) and _near(one.gradient_norm, other.gradient_norm, tolerance)


def _near(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return repr(one) == repr(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-30)
