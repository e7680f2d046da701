"""The best layouts of a space: every layout is looked at, or proved to be worse than those returned.

First all layouts with the schedule that needs the least memory. What does not fit even so is out, whatever its
schedule; what would be too slow even without any bubble and with perfectly even stages is out too. The rest is tried
with every schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.estimate import Estimates, estimate_many
from cuboid.cost.inputs import Array, Shape
from cuboid.cost.memory import peak_memory
from cuboid.cost.offload import host_bytes
from cuboid.cost.step import PARTS
from cuboid.plan.question import Question
from cuboid.plan.space import DEGREES, PLAIN, Space, bases, scheduled, schedules
from cuboid.plan.stages import LayerSeconds, assumed_slowest, everything, real_slowest

BUSY = ("compute", "tensor", "context", "expert", "host")
"""Parts of the step that grow with the layers of the slowest rank."""
OBJECTIVES = ("time", "memory")
CHUNK = 50_000


@dataclass(frozen=True)
class Scores:
    """What layouts cost, in closed form, with the engine's own partition."""

    space: Space
    parts: dict[str, Array]
    memory: Array
    fits: NDArray[np.bool_]
    even: Array
    """Seconds that no other schedule and no other partition takes away."""

    @property
    def seconds(self) -> Array:
        """Seconds of a step."""
        return sum(self.parts.values(), np.zeros(len(self.space)))

    def take(self, which: NDArray[np.intp]) -> "Scores":
        """Some of them."""
        parts = {name: part[which] for name, part in self.parts.items()}
        return Scores(self.space.take(which), parts, self.memory[which], self.fits[which], self.even[which])

    def order(self, objective: str) -> NDArray[np.intp]:
        """Best first; layouts that cost the same keep the order of the space, so that the answer never varies."""
        keys = (self.seconds, self.memory) if objective == "memory" else (self.memory, self.seconds)
        # Rounding makes layouts that differ by the last bit equal.
        rounded = [np.round(key / max(key.max(), 1e-300), 9) if len(key) else key for key in keys]
        return np.lexsort(rounded)

    def best(self, keep: int, objective: str, distinct: bool) -> "Scores":
        """The best of those that fit, best first."""
        fitting = np.flatnonzero(self.fits)
        order = fitting[self.take(fitting).order(objective)]
        if not distinct:
            return self.take(order[:keep])
        keys = np.stack([self.space.columns[name] for name in (*DEGREES, "schedule")], axis=1)
        firsts: dict[tuple[int, ...], int] = {}
        for index in order.tolist():
            firsts.setdefault(tuple(keys[index].tolist()), index)
            if len(firsts) == keep:
                break
        return self.take(np.array(list(firsts.values()), dtype=np.intp))


def score(question: Question, space: Space) -> Scores:
    """Closed-form costs of layouts, with the slowest rank as the engine's partition makes it."""
    estimates: Estimates = estimate_many(
        question.model, question.machine, space.jobs, question.profile, question.cost_precision
    )
    size = len(space)
    parts = {name: np.broadcast_to(getattr(estimates.time, name), size) for name in PARTS}
    seconds = LayerSeconds.of(question, space.jobs)
    micro_batches = space.jobs.micro_batches
    assumed = micro_batches * assumed_slowest(question, space, seconds)
    real = micro_batches * real_slowest(question, space, seconds)
    even = micro_batches * everything(question, seconds) / space.jobs.pp
    busy = sum((parts[name] for name in BUSY), np.zeros(size))
    # Part of the host's time comes once per step and does not grow with the layers.
    fixed = np.maximum(busy - assumed, 0.0)
    growth = real / np.maximum(busy - fixed, 1e-300)
    for name in BUSY:
        once = fixed if name == "host" else 0.0
        parts[name] = (parts[name] - once) * growth + once
    others = sum((parts[name] for name in ("data", "optimizer", "transfer")), np.zeros(size))
    straggling = parts["straggler"] / np.maximum(assumed + parts["bubble"], 1e-300)
    fits = estimates.fits & (estimates.memory <= question.limit)
    memory = np.broadcast_to(estimates.memory, size)
    return Scores(space, parts, memory, np.broadcast_to(fits, size), even * (1 + straggling) + fixed + others)


def search(
    question: Question, world_size: int, *, keep: int, objective: str = "time", distinct: bool = False
) -> Scores:
    """The `keep` best layouts that fit, best first; none when none fits.

    `distinct`: of layouts with the same ranks, micro-batch and schedule only the best counts."""
    space = _fitting(question, bases(question, world_size))
    if not len(space):
        return score(question, space)
    plain = _concatenate([score(question, part) for part in _chunks(space)])
    best = plain.best(keep, objective, distinct)
    if _plain_allowed(question, space) and len(best.space) == keep:
        # A layout that is worse than so many others even at its best cannot be among those kept.
        bound, reached = (plain.memory, best.memory) if objective == "memory" else (plain.even, best.seconds)
        space = space.take(np.flatnonzero(bound <= reached[-1] * (1 + 1e-8)))
    found = _concatenate([score(question, part) for part in _chunks(scheduled(question, space))])
    return found.best(keep, objective, distinct)


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
    return np.concatenate([peak_memory(shape, part.jobs, question.profile) for part in _chunks(space)])


def _plain_allowed(question: Question, space: Space) -> bool:
    """Whether 1F1B is open to every number of pipeline ranks, so that its times bound those of the best schedule."""
    return all((PLAIN, 1) in schedules(question, pp) for pp in space.pipelines)


def _chunks(space: Space) -> Iterator[Space]:
    """Pieces small enough for the processor's caches."""
    for start in range(0, max(len(space), 1), CHUNK):
        yield space.take(np.arange(start, min(start + CHUNK, len(space))))


def _concatenate(scores: list[Scores]) -> Scores:
    if len(scores) == 1:
        return scores[0]
    first = scores[0].space
    columns = {name: np.concatenate([part.space.columns[name] for part in scores]) for name in first.columns}
    return Scores(
        Space(columns, first.global_batch, first.sequence),
        {name: np.concatenate([part.parts[name] for part in scores]) for name in PARTS},
        np.concatenate([part.memory for part in scores]),
        np.concatenate([part.fits for part in scores]),
        np.concatenate([part.even for part in scores]),
    )
