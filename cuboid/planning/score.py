"""What layouts cost in closed form, with the engine's own partition: what a search compares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.engine import Engine
from cuboid.cost.estimate import Estimates, estimate_many
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.memory import peak_memory
from cuboid.cost.step import PARTS
from cuboid.planning.bounds import least_busy, least_transfer
from cuboid.planning.question import Question
from cuboid.planning.space import DEGREES, Space
from cuboid.planning.stages import LayerSeconds, assumed_slowest, real_slowest

BUSY = ("compute", "tensor", "context", "expert", "host")
"""Parts of the step that grow with the layers of the slowest rank."""
CHUNK = 50_000
Memory = Callable[[Shape, Jobs, Engine], Array]


@dataclass(frozen=True)
class Scores:
    """What layouts cost, in closed form, with the engine's own partition."""

    space: Space
    parts: dict[str, Array]
    memory: Array
    fits: NDArray[np.bool_]
    even: Array
    """Seconds that no schedule and no partition takes away."""

    @property
    def seconds(self) -> Array:
        """Seconds of a step."""
        return sum(self.parts.values(), np.zeros(len(self.space)))

    def take(self, which: NDArray[np.intp]) -> "Scores":
        """Some of them."""
        parts = {name: part[which] for name, part in self.parts.items()}
        return Scores(self.space.take(which), parts, self.memory[which], self.fits[which], self.even[which])

    def within(self, slowest: float) -> "Scores":
        """Those that take no longer."""
        return self if slowest == float("inf") else self.take(np.flatnonzero(self.seconds <= slowest))

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


def score(question: Question, space: Space, memory: Array | None = None) -> Scores:
    """Closed-form costs of layouts, with the slowest rank as the engine's partition makes it. `memory`: bytes of the
    fullest rank of each, where they are known."""
    size = len(space)
    if not size:  # as long to compute as those of a thousand
        none = np.zeros(0)
        return Scores(space, dict.fromkeys(PARTS, none), none, np.zeros(0, dtype=bool), none)
    estimates: Estimates = estimate_many(
        question.model, question.machine, space.jobs, question.profile, question.cost_precision, memory
    )
    parts = {name: np.broadcast_to(getattr(estimates.time, name), size) for name in PARTS}
    seconds = LayerSeconds.of(question, space.jobs)
    micro_batches = space.jobs.micro_batches
    assumed = micro_batches * assumed_slowest(question, space, seconds)
    real = micro_batches * real_slowest(question, space, seconds)
    even = least_busy(question, space, seconds)
    busy = sum((parts[name] for name in BUSY), np.zeros(size))
    # Part of the host's time comes once per step and does not grow with the layers.
    fixed = np.maximum(busy - assumed, 0.0)
    growth = real / np.maximum(busy - fixed, 1e-300)
    for name in BUSY:
        once = fixed if name == "host" else 0.0
        parts[name] = (parts[name] - once) * growth + once
    others = parts["data"] + parts["optimizer"] + parts["transfer"] * least_transfer(question, space)
    straggling = parts["straggler"] / np.maximum(assumed + parts["bubble"], 1e-300)
    fits = estimates.fits & (estimates.memory <= question.limit)
    known = np.broadcast_to(estimates.memory, size)
    return Scores(space, parts, known, np.broadcast_to(fits, size), even * (1 + straggling) + fixed + others)


def score_all(question: Question, space: Space, memory: Array | None = None) -> Scores:
    """As `score`, in pieces small enough for the processor's caches."""
    if memory is None:
        return joined([score(question, part) for part in chunks(space)])
    pieces = np.split(memory, range(CHUNK, len(memory), CHUNK))
    return joined([score(question, part, each) for part, each in zip(chunks(space), pieces, strict=True)])


def memory_of(question: Question, space: Space, cost: Memory = peak_memory) -> Array:
    """Bytes of the fullest rank of each, or of another."""
    shape = Shape.of(question.model)
    each = (np.broadcast_to(cost(shape, part.jobs, question.profile), len(part)) for part in chunks(space))
    return np.concatenate(list(each)) if len(space) else np.zeros(0)


def chunks(space: Space) -> Iterator[Space]:
    """Pieces small enough for the processor's caches."""
    for start in range(0, max(len(space), 1), CHUNK):
        yield space.take(np.arange(start, min(start + CHUNK, len(space))))


def joined(scores: list[Scores]) -> Scores:
    """Those of several spaces as one."""
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
