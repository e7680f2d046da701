"""Recomputing to the memory there is: where a kind fits and one kind less does not, as few layers of each stage as it
takes.

What some layers save is at most what all of them would, so a layout that would be too slow with one kind less for all
is not looked at."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.inputs import Array, Shape
from cuboid.cost.memory import peak_memory
from cuboid.planning.question import Question
from cuboid.planning.refine import Refined, memory_table, refine
from cuboid.planning.score import Scores, memory_of, score, score_all
from cuboid.planning.space import Column, Space
from cuboid.planning.stages import held
from cuboid.spec.layout import RECOMPUTE
from cuboid.spec.partition import longest_stage

LEAST_LEFT = 0.6
"""Of a layout's seconds at least this share is left with one kind less recomputed: a layer's forward pass is a third of
it at most, with what it collectives."""
FULLER = 1.6
"""No schedule keeps so many times the micro-batches that 1F1B does, but GPipe, which is never tried."""
AT_ONCE = 512
"""Layouts whose number of layers is sought together."""
PLACES = 8
"""Mixes are sought for the first so many places of an answer: those further down are not worth their time."""


def may_mix(question: Question, objective: str) -> bool:
    """Whether some layers may be recomputed more than others: the user left it open, this engine computes it, and less
    memory is not all that is asked for."""
    decided = {"recompute", "recompute_layers"} & question.fixed.keys()
    return objective == "time" and question.engine == "cuboid" and not decided


def least_kind(question: Question) -> int:
    """The least kind that is worth sparing layers of. Where blocks are compiled, selective recomputation takes no time
    that could be measured (3B on an H200: 0.357 s a step with it, 0.359 s without), so nothing is won by less of it."""
    return RECOMPUTE.index("full" if question.profile.compiled else "selective")


def promising(question: Question, plain: Scores, reached: float) -> NDArray[np.bool_]:
    """Which layouts might be within `reached` seconds under some schedule if only some layers were recomputed so."""
    found = np.zeros(len(plain.space), dtype=bool)
    kinds = plain.space.columns["recompute"] >= least_kind(question)
    where = np.flatnonzero(kinds & (LEAST_LEFT * plain.even <= reached))
    memory = memory_of(question, lighter(plain.space.take(where)))
    too_full = np.where(plain.space.columns["pp"][where] > 1, FULLER, 1.0) * memory > question.limit
    where = where[too_full]
    more = plain.take(where)
    less = score_all(question, lighter(more.space), memory[too_full])
    even = less.even + _share(question, more, less) * (more.even - less.even)
    found[where[even <= reached]] = True
    return found


def mixable(question: Question, found: Scores, reached: float) -> Iterator[tuple[float, Space]]:
    """The layouts that fit and would not with one kind less, the fastest of these first, some at a time with the
    seconds that none of them undercuts."""
    kinds = found.space.columns["recompute"] >= least_kind(question)
    more = found.take(np.flatnonzero(found.fits & kinds & (LEAST_LEFT * found.seconds <= reached)))
    memory = memory_of(question, lighter(more.space))
    too_full = memory > min(question.limit, question.profile.usable * question.machine.chip.memory)
    more = more.take(np.flatnonzero(too_full))
    less = score_all(question, lighter(more.space), memory[too_full])
    seconds = less.seconds + _share(question, more, less) * (more.seconds - less.seconds)
    seconds = np.where(less.fits, np.inf, seconds)
    order = np.argsort(seconds, kind="stable")
    order = order[seconds[order] <= reached]
    for start in range(0, len(order), AT_ONCE):
        yield float(seconds[order[start]]), more.space.take(order[start : start + AT_ONCE])


def _share(question: Question, more: Scores, less: Scores) -> Array:
    """Share of the layers that must be recomputed more, by the memory of both ends: a layer less than it takes if the
    memory between them lies on a straight line."""
    most = _longest(question, more.space)
    missing = (less.memory - question.limit) / np.maximum(less.memory - more.memory, 1.0)
    return np.asarray(np.maximum(np.floor(most * np.clip(missing, 0.0, 1.0)) - 1, 0.0) / most)


def mixed(question: Question, space: Space) -> Scores:
    """The layouts with the fewest layers of each stage recomputed that fit; without those that need them all."""
    shape, most = Shape.of(question.model), _longest(question, space)
    low, high = np.zeros_like(most), most
    while np.any(high - low > 1):
        middle = (low + high + 1) // 2  # where nothing is left between them, what is known to fit
        fits = peak_memory(shape, _with_layers(space, middle).jobs, question.profile) <= question.limit
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return score_all(question, _with_layers(space, high).take(np.flatnonzero(high < most)))


def _with_layers(space: Space, layers: Column) -> Space:
    """The layouts with so many layers of each stage recomputed."""
    return Space({**space.columns, "recompute_layers": layers}, space.global_batch, space.sequence)


def lighter(space: Space) -> Space:
    """The layouts with one kind less recomputed."""
    return Space({**space.columns, "recompute": space.columns["recompute"] - 1}, space.global_batch, space.sequence)


def _longest(question: Question, space: Space) -> Column:
    """Layers of the longest stage of each layout."""
    stages = space.columns["pp"] * space.columns["vpp"]
    sizes = {count: longest_stage(question.model, count, question.sequence) for count in set(stages.tolist())}
    return np.array([sizes[count] for count in stages.tolist()], dtype=np.int64)


def fitted(question: Question, refined: Refined) -> Refined:
    """With as few layers recomputed as its own ranks, simulated, allow: more than the closed form said, or less."""
    layout = refined.layout
    if not layout.recompute_layers:
        more = RECOMPUTE.index(layout.recompute) + 1
        if refined.peak <= question.limit or not least_kind(question) <= more < len(RECOMPUTE):
            return refined
        layout = replace(layout, recompute=RECOMPUTE[more])
    part = held(question.model, layout.schedule, layout.pp, layout.vpp, question.sequence)
    micro_batches = question.global_batch // (layout.dp * layout.micro_batch)
    low, high = 0, max(part.counts)
    while high - low > 1:
        middle = (low + high) // 2
        table = memory_table(question, replace(layout, recompute_layers=middle), part, micro_batches)
        fits = max(sum(row.values()) for row in table) <= question.limit
        low, high = (low, middle) if fits else (middle, high)
    layout = replace(layout, recompute_layers=high if high < max(part.counts) else 0)
    return refined if layout == refined.layout else refine(question, score(question, Space.of([layout], question)), 0)
