"""One job over groups of different accelerators: data parallelism across them, tensor parallelism inside nodes, and
each replica a part of the batch by its speed (`batch_weights`).

Ranks fill the groups in the order of the file, so with pp=1 the first replicas are those of the first group. A replica
takes a + b · n for n micro-batches, by the costs of its own kind; gradients and parameters cross the links between
sites once, which nothing is taken to hide. No such job was measured beside this sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from cuboid.errors import UserError
from cuboid.planning.question import Question
from cuboid.planning.score import score
from cuboid.planning.space import Space
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import Group, Groups
from cuboid.spec.layout import RECOMPUTE, Layout

LARGEST_WEIGHT = 8
"""The most times as much that one replica takes as another."""
MICRO_BATCHES = (1, 2, 4, 8)
SENT = 4.0 + 2.0
"""Bytes of each parameter over a link: its gradient one way, the parameter the other."""
SOME, MORE = 8, 16
"""Sequences of each accelerator, in micro-batches, from whose times a and b are taken."""
Kind = tuple[int, int, str]
"""Tensor ranks, sequences of a micro-batch, recomputation."""
Line = tuple[float, float]
"""a and b."""


@dataclass(frozen=True)
class MixedJob:
    layout: Layout
    step_seconds: float
    tokens_per_second: float
    waiting: float
    """The fraction of a step for which the replicas that are done first wait."""


def mixed_job(groups: Groups, questions: Sequence[Question], global_batch: int) -> MixedJob | None:
    """The fastest; None where none fits. `questions`: about each group, in order."""
    best: MixedJob | None = None
    crossing = _crossing(groups, questions[0])
    known: dict[ClusterSpec, dict[Kind, Line]] = {}
    for question in questions:
        like = replace(question.cluster, name="")
        if like not in known:
            known[like] = _lines(question, _tensor(groups.groups))
    of_groups = [known[replace(question.cluster, name="")] for question in questions]
    for kind in of_groups[0]:
        tp, micro_batch, _ = kind
        if global_batch % micro_batch or any(kind not in lines for lines in of_groups):
            continue
        replicas = [group.cluster.accelerators // tp for group in groups.groups]
        for weights, times in _shares([lines[kind] for lines in of_groups], replicas, global_batch // micro_batch):
            seconds = max(times) + crossing
            if best is not None and seconds >= best.step_seconds:
                continue
            each = tuple(weight for weight, count in zip(weights, replicas, strict=True) for _ in range(count))
            layout = _layout(kind, sum(replicas), each)
            rate = global_batch * questions[0].sequence / seconds
            best = MixedJob(layout, seconds, rate, 1 - min(times) / max(times))
    return best


def _layout(kind: Kind, replicas: int, weights: tuple[int, ...] = ()) -> Layout:
    tp, micro_batch, recompute = kind
    fixed: dict[str, Any] = {"tp": tp, "micro_batch": micro_batch, "recompute": recompute}
    return Layout(dp=replicas, zero=1, batch_weights=weights, **fixed)


def _tensor(groups: Sequence[Group]) -> list[int]:
    """Degrees that stay inside the nodes of all groups."""
    return [tp for tp in (1, 2, 4, 8) if all(group.cluster.accelerators_per_node % tp == 0 for group in groups)]


def _lines(question: Question, tensor: Sequence[int]) -> dict[Kind, Line]:
    """Of those that fit one kind of accelerators and can be trained."""
    found: dict[Kind, Line] = {}
    for micro_batch in MICRO_BATCHES:
        kinds = []
        for tp, recompute in product(tensor, RECOMPUTE):
            kind = (tp, micro_batch, recompute)
            try:
                layout = _layout(kind, question.cluster.accelerators // tp)
            except UserError:
                continue
            decided = all(getattr(layout, name) == value for name, value in question.fixed.items())
            if decided and not question.untrainable(layout):
                kinds.append((kind, layout))
        if not kinds:
            continue
        times, fits = [], np.ones(len(kinds), dtype=bool)
        for count in (SOME, MORE):
            asked = replace(question, global_batch=question.cluster.accelerators * micro_batch * count)
            scores = score(asked, Space.of([layout for _, layout in kinds], asked))
            times.append(scores.seconds)
            fits &= scores.fits
        for place, ((tp, *_), _) in enumerate(kinds):
            slope = float(times[1][place] - times[0][place]) / ((MORE - SOME) * tp)
            if fits[place]:
                found[kinds[place][0]] = (max(float(times[0][place]) - SOME * tp * slope, 0.0), slope)
    return found


def _shares(
    lines: Sequence[Line], replicas: Sequence[int], micro_batches: int
) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Weights that divide the batch, and seconds of each kind with them. The fastest kind has a weight that others are
    parts of: so few are tried."""
    wanted = [1 / slope if slope else 1.0 for _, slope in lines]
    for most in range(1, LARGEST_WEIGHT + 1):
        weights = tuple(max(1, round(most * each / max(wanted))) for each in wanted)
        parts = sum(weight * count for weight, count in zip(weights, replicas, strict=True))
        if micro_batches % parts:
            continue
        times = [
            start + slope * weight * (micro_batches // parts)
            for (start, slope), weight in zip(lines, weights, strict=True)
        ]
        yield weights, times


def _crossing(groups: Groups, question: Question) -> float:
    """Seconds in which gradients and parameters cross the slowest link."""
    rates = [link.rate for link in groups.links]
    rates += [rate for group in groups.groups if (rate := groups.uplink(group)) is not None]
    return SENT * question.model.parameters / min(rates) + 2 * max(link.latency for link in groups.links)
