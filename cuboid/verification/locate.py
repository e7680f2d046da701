"""Where a layout first differs from one process: a second pass over the step that failed, recorded on both sides.

In execution order: the weights that the step begins with, activations, the loss, gradients of activations, weight
gradients before any sum over ranks, these sums, the gradient norm, the update. The first tensor of these that is
further off than it may be is told, with its module, rank and micro-batch, and a likely cause."""

from __future__ import annotations

from dataclasses import replace

from cuboid.data.source import Source, make_source
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.checks.located import Located
from cuboid.verification.activations import first_activation, first_gradient
from cuboid.verification.evidence import Evidence
from cuboid.verification.record import RankRecord, SampleRecorder
from cuboid.verification.reference import Tensors, Trace, reference_trace
from cuboid.verification.rounding import ROUNDED
from cuboid.verification.sums import (
    first_loss,
    first_norm,
    first_prediction_loss,
    first_reduction,
    first_statistics,
    first_weight_gradient,
    first_whole_loss,
)
from cuboid.verification.updates import first_update, first_weight


def locate(run: Run, step: int, observed: Trace, records: list[RankRecord]) -> Located | None:
    """`step`: the first that differs, counted from 0; `observed`: its trace, and `records` of it by all ranks."""
    traces, samples = recorded_references(run, step)
    ordered = sorted(records, key=lambda record: record.rank)
    evidence = Evidence(run, step, observed, traces, samples, ordered, make_source(run))
    # What is not found so is close to its bound: it is looked for by the bounds with which it was found to differ.
    found = first_difference(evidence)
    return first_difference(replace(evidence, wider=1.0)) if found is None and evidence.is_rounded else found


def first_difference(evidence: Evidence) -> Located | None:
    for look in (
        first_weight,
        first_activation,
        first_loss,
        first_prediction_loss,
        first_gradient,
        first_weight_gradient,
        first_reduction,
        first_whole_loss,
        first_norm,
        first_statistics,
        first_update,
    ):
        found = look(evidence)
        if found is not None:
            return found
    return None


def recorded_references(
    run: Run, step: int, source: Source | None = None, weights: Tensors | None = None
) -> tuple[list[Trace], list[SampleRecorder]]:
    """One process in the run's precision; in 16 bits also with sums that round as between ranks, and in float32."""
    alone = replace(run, layout=Layout())
    ways = [(run.training.precision, 1)]
    if run.training.precision in ROUNDED:
        ways += [(run.training.precision, run.layout.tp)] if run.layout.tp > 1 else []
        ways.append(("float32", 1))
    traces, samples = [], []
    for precision, hops in ways:
        recorder = SampleRecorder(step)
        more = {"precision": precision, "hops": hops, "watch": recorder, "source": source, "weights": weights}
        traces.append(reference_trace(alone, **more))  # type: ignore[arg-type]
        samples.append(recorder)
    return traces, samples
