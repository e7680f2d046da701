"""Other layouts of a plan: those the planner had to choose from, time against memory; and what every
neighbouring layout would cost, computed ahead, for the knobs of the page."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.step import PARTS
from cuboid.planning.plan import WORDS
from cuboid.planning.score import Scores, score
from cuboid.planning.space import Space, bases, scheduled
from cuboid.report.source import Source, short
from cuboid.spec.layout import RECOMPUTE, SCHEDULES, Layout
from cuboid.spec.plugin import PythonModelSpec

POINTS = 900
FAR, SLOW = 3, 30
"""Times the accelerator's memory, and times the chosen layout's step, beyond which a layout is only counted."""
CANDIDATES = 40_000
"""Layouts scored: what takes a second or two."""


def considered(source: Source) -> dict[str, Any] | None:
    """Best layouts first: of the fastest all, of the rest a sample that reaches to the slowest."""
    plan = source.plan
    if plan is None or isinstance(plan.question.model, PythonModelSpec):  # of which running it alone tells the costs
        return None
    question = plan.question
    space = bases(question, question.cluster.accelerators)
    space = scheduled(question, _sample(space, CANDIDATES // 8))
    if not len(space):
        return None
    scores = score(question, _sample(space, CANDIDATES))
    near = (scores.memory <= FAR * question.machine.chip.memory) & (scores.seconds <= SLOW * plan.seconds)
    chosen = _spread(scores.take(np.flatnonzero(near)))
    points = [
        {
            "layout": str(chosen.space.layout(index)),
            "seconds": short(float(chosen.seconds[index])),
            "memory": round(float(chosen.memory[index])),
            "fits": bool(chosen.fits[index]),
            "parts": [short(float(chosen.parts[name][index])) for name in PARTS],
        }
        for index in range(len(chosen.space))
    ]
    own = {
        "layout": str(plan.layout),
        "seconds": plan.seconds,
        "memory": round(plan.peak),
        "fits": plan.peak <= question.limit,
        "parts": [plan.parts[name] for name in PARTS],
    }
    return {
        "parts": {name: WORDS[name] for name in PARTS},
        "limit": question.limit,
        "capacity": question.machine.chip.memory,
        "looked_at": len(scores.space),
        "beyond": int((~near).sum()),
        "own": own,
        "points": points,
    }


def _sample(space: Space, count: int) -> Space:
    """Every n-th of them."""
    if len(space) <= count:
        return space
    return space.take(np.linspace(0, len(space) - 1, count).astype(np.intp))


def _spread(scores: Scores) -> Scores:
    """Half the fastest that fit, half spread evenly over all in order of time; each layout once."""
    order = np.argsort(scores.seconds, kind="stable")
    fitting = order[scores.fits[order]]
    spread = order[np.linspace(0, len(order) - 1, min(POINTS // 2, len(order))).astype(np.intp)]
    both = dict.fromkeys([*fitting[: POINTS // 2].tolist(), *spread.tolist()])
    return scores.take(np.array(list(both), dtype=np.intp))


AXES = ("tp", "pp", "micro_batch", "zero", "recompute", "schedule")
MOST_ROWS = 60_000
"""Rows told: about one megabyte."""


def explorer(source: Source) -> dict[str, Any] | None:
    """Context and expert parallelism stay as they are in the plan; everything else takes every value that the model,
    the batch and the cluster allow, stages per rank in powers of two."""
    plan = source.plan
    if plan is None or isinstance(plan.question.model, PythonModelSpec):  # of which running it alone tells the costs
        return None
    layout, world = plan.layout, plan.question.cluster.accelerators
    kept = {name: getattr(layout, name) for name in ("cp", "ep")}
    if layout.cp > 1:
        kept |= {"cp_method": layout.cp_method, "cp_inner": layout.cp_inner}
    question = replace(plan.question, fixed=kept)
    space = scheduled(question, bases(question, world))
    chunks = space.columns["vpp"]
    space = space.take(np.flatnonzero((chunks & (chunks - 1) == 0) | (chunks == layout.vpp)))
    if layout.recompute_layers:
        alike = space.take(np.flatnonzero(space.columns["recompute"] == RECOMPUTE.index(layout.recompute)))
        some = np.full_like(alike.columns["dp"], layout.recompute_layers)
        space = space.concatenated(replace(alike, columns={**alike.columns, "recompute_layers": some}))
    if len(space) > MOST_ROWS:  # micro-batches far from the plan's go first
        far = np.abs(np.log2(space.columns["micro_batch"] / layout.micro_batch))
        space = space.take(np.sort(np.argsort(far, kind="stable")[:MOST_ROWS]))
    if not len(space):
        return None
    scores = score(question, space)
    columns = _named(space)
    axes = {name: sorted(set(columns[name].tolist())) for name in AXES}
    key = np.zeros(len(space), dtype=np.uint32)
    for name in AXES:
        key = key * len(axes[name]) + np.searchsorted(np.array(axes[name]), columns[name]).astype(np.uint32)
    return {
        "axes": {**axes, "recompute": _recomputes(axes), "schedule": _schedules(axes)},
        "own": _own(layout),
        "world_size": world,
        "cp": layout.cp,
        "global_batch": question.global_batch,
        "limit": question.limit,
        "capacity": question.machine.chip.memory,
        "rows": len(space),
        "keys": _packed(key),
        "seconds": _packed(scores.seconds.astype(np.float32)),
        "memory": _packed(scores.memory.astype(np.float32)),
        "bubble": _packed((scores.parts["bubble"] / scores.seconds).astype(np.float32)),
    }


def _named(space: Space) -> dict[str, NDArray[np.int64]]:
    """The columns of the axes; schedule and stages per rank are one, and what is recomputed and of how many layers."""
    schedule = space.columns["schedule"] * 1000 + space.columns["vpp"]
    recompute = space.columns["recompute"] * 1000 + space.columns["recompute_layers"]
    return {**{name: space.columns[name] for name in AXES}, "schedule": schedule, "recompute": recompute}


def _recomputes(axes: dict[str, list[int]]) -> list[str]:
    return [_recompute(RECOMPUTE[number // 1000], number % 1000) for number in axes["recompute"]]


def _recompute(name: str, layers: int) -> str:
    return f"{name}, {layers} layers" if layers else name


def _schedules(axes: dict[str, list[int]]) -> list[str]:
    return [_schedule(SCHEDULES[number // 1000], number % 1000) for number in axes["schedule"]]


def _schedule(name: str, chunks: int) -> str:
    return f"{name}, vpp={chunks}" if name == "interleaved" else name


def _own(layout: Layout) -> dict[str, object]:
    found: dict[str, object] = {name: getattr(layout, name) for name in AXES}
    recompute = _recompute(layout.recompute, layout.recompute_layers)
    return {**found, "schedule": _schedule(layout.schedule, layout.vpp), "recompute": recompute}


def _packed(values: NDArray[Any]) -> str:
    """Four bytes each, the lowest first, as text."""
    return b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()
