"""The layouts a planner had to choose from: time against memory, and what each loses."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuboid.cost.step import PARTS
from cuboid.planning.reasons import WORDS
from cuboid.planning.score import Scores, score
from cuboid.planning.space import Space, bases, scheduled
from cuboid.report.source import Source, short

POINTS = 900
FAR, SLOW = 3, 30
"""Times the accelerator's memory, and times the chosen layout's step, beyond which a layout is only counted."""
CANDIDATES = 40_000
"""Layouts scored: what takes a second or two."""


def considered(source: Source) -> dict[str, Any] | None:
    """Best layouts first: of the fastest all, of the rest a sample that reaches to the slowest."""
    plan = source.plan
    if plan is None:
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
