"""The best layouts of a space: every layout is looked at, or proved to be worse than those returned.

First all layouts with the schedule that needs the least memory. What does not fit even so is out, whatever its
schedule; what would be too slow even without any bubble and with perfectly even stages is out too. The rest is tried
with every schedule, and with no more layers recomputed than its memory asks for.
"""

import numpy as np

from cuboid.cost.inputs import Array, Shape
from cuboid.cost.memory import peak_memory
from cuboid.cost.offload import host_bytes
from cuboid.plan.budget import PLACES, may_mix, mixable, mixed, promising
from cuboid.plan.question import Question
from cuboid.plan.score import Scores, chunks, joined, score, score_all
from cuboid.plan.space import PLAIN, Space, bases, scheduled, schedules


def search(
    question: Question, world_size: int, *, keep: int, objective: str = "time", distinct: bool = False
) -> Scores:
    """The `keep` best layouts that fit, best first; none when none fits.

    `distinct`: of layouts with the same ranks, micro-batch and schedule only the best counts."""
    space = _fitting(question, bases(question, world_size))
    if not len(space):
        return score(question, space)
    plain = score_all(question, space)
    best = plain.best(keep, objective, distinct)
    good = np.ones(len(space), dtype=bool)
    if _plain_allowed(question, space) and len(best.space) == keep:
        # A layout that is worse than so many others even at its best cannot be among those kept.
        bound, reached = (plain.memory, best.memory) if objective == "memory" else (plain.even, best.seconds)
        good = bound <= reached[-1] * (1 + 1e-8)
    found = score_all(question, scheduled(question, space.take(np.flatnonzero(good))))
    best = found.best(keep, objective, distinct)
    if may_mix(question, objective):
        best = _with_mixes(question, best, found, keep, distinct)
        others = ~good & promising(question, plain, _place(best, keep))
        found = score_all(question, scheduled(question, space.take(np.flatnonzero(others))))
        best = _with_mixes(question, best, found, keep, distinct)
    return best


def _with_mixes(question: Question, best: Scores, found: Scores, keep: int, distinct: bool) -> Scores:
    """The best with those of others that are faster with some of their layers recomputed."""
    for bound, space in mixable(question, found, _place(best, keep)):
        if bound > _place(best, keep):
            break
        best = joined([best, mixed(question, space)]).best(keep, "time", distinct)
    return best


def _place(best: Scores, keep: int) -> float:
    """Seconds that a mix must undercut to be worth its place."""
    count = min(keep, PLACES)
    return float(best.seconds[count - 1]) if len(best.space) >= count else float("inf")


def _fitting(question: Question, space: Space) -> Space:
    """What fits under some schedule; with the optimizer's state offloaded where it does not without."""
    fits = _least_memory(question, space) <= question.limit
    found = space.take(np.flatnonzero(fits))
    if question.tries_offload and not fits.all():
        away = space.take(np.flatnonzero(~fits)).offloaded()
        fits = _least_memory(question, away) <= question.limit
        found = found.joined(away.take(np.flatnonzero(fits)))
    if not found.columns["offload"].any():
        return found
    needed = host_bytes(Shape.of(question.model), found.jobs, question.profile)
    return found.take(np.flatnonzero(needed <= question.host_limit))


def _least_memory(question: Question, space: Space) -> Array:
    """Bytes of the fullest rank under 1F1B, which no other schedule undercuts."""
    if not len(space):
        return np.zeros(0)
    shape = Shape.of(question.model)
    return np.concatenate([peak_memory(shape, part.jobs, question.profile) for part in chunks(space)])


def _plain_allowed(question: Question, space: Space) -> bool:
    """Whether 1F1B is open to every number of pipeline ranks, so that its times bound those of the best schedule."""
    return all((PLAIN, 1) in schedules(question, pp) for pp in space.pipelines)
