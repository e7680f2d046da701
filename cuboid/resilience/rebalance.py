"""Unequal parts of a batch, or of the layers, for nodes that are not equally fast, from the seconds that their ranks
need for themselves.

A replica computes as many sequences as before in as many seconds, and a pipeline rank as many layers, so what a step
would take with other weights, or other layers, follows from what it takes now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from cuboid.errors import UserError
from cuboid.spec.layout import Layout
from cuboid.spec.partition import partition
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run

WORTH = 1.1
"""So much longer a step must be now: times of steps vary by some percent."""
SIMPLER = 1.05
"""So many times as long may be a step with other parts of the batch, in place of other layers."""
LARGER = 2
"""Where replicas differ in the size of micro-batches, the largest is at most so many times as large as `micro_batch`
says: there may be no more memory."""


@dataclass(frozen=True)
class Pace:
    """What the latest steps of a node's ranks were made of."""

    step: int
    """The last one of them."""
    own: float
    """Seconds of a step that its slowest rank needs for itself."""
    whole: float
    """… and those in which it waits for others."""
    setup: float
    """Seconds its ranks took to begin."""


@dataclass(frozen=True)
class Balance:
    layout: Layout
    before: float
    """Seconds of a step, measured."""
    after: float
    """… and predicted."""
    slow: str
    """The node whose replica has least of the batch."""
    times: float
    """As slow as the fastest."""

    field: str = "batch_weights"

    @property
    def why(self) -> str:
        written = str(self.layout).partition(f",{self.field}=")[2].partition(",")[0]
        now = f"{self.field}={written}" if written else "equal parts of the batch"
        slow = f"node {self.slow} is {self.times:.2g} times as slow as the fastest: " if self.times > WORTH else ""
        return f"{slow}{now} makes a step {self.after:.3g} s, not {self.before:.3g} s"


def balance(run: Run, layout: Layout, ranks: int, paces: Mapping[str, Pace]) -> Balance | None:
    """Better weights or layers; None where what they save until the last step is less than what starting again takes.
    `ranks`: on each node, of which `paces` has one in the order of their ranks."""
    ways = [found for way in (_weighted, _staged) if (found := way(run, layout, ranks, paces)) is not None]
    if not ways:
        return None
    # Of two that are about as fast the one that leaves every stage its memory.
    best = min(ways, key=lambda found: found.after * (SIMPLER if found.field == "layers" else 1))
    left = run.training.steps - max(each.step for each in paces.values())
    worth = left * (best.before - best.after) >= 2 * max(each.setup for each in paces.values())
    return best if worth and best.before >= WORTH * best.after else None


def _staged(run: Run, layout: Layout, ranks: int, paces: Mapping[str, Pace]) -> Balance | None:
    """Other layers for the pipeline ranks; with several stages on each, these share its layers as equally as can be."""
    nodes, told = list(paces), list(paces.values())
    if layout.pp == 1:
        return None
    size = layout.world_size // layout.pp
    slowest = [
        max(range(rank * size // ranks, -(-(rank + 1) * size // ranks)), key=lambda node: told[node].own)
        for rank in range(layout.pp)
    ]
    seconds = [told[node].own for node in slowest]
    stages = [layout.stages_of(rank) for rank in range(layout.pp)]
    held = [len(part) for part in partition(run.model, layout.stages, run.training.sequence, layout.layers)]
    now = [sum(held[stage] for stage in own) for own in stages]
    if min(seconds) <= 0 or len(set(slowest)) < 2:
        return None
    speeds = [count / each for count, each in zip(now, seconds, strict=True)]
    given = deal(run.model.layers - layout.stages + layout.pp, speeds)  # each stage has one besides
    counts = [given[rank] + layout.vpp - 1 for rank in range(layout.pp)]
    if counts == now or any(count > LARGER * before for count, before in zip(counts, now, strict=True)):
        return None
    layers = [0] * layout.stages
    for own, count in zip(stages, counts, strict=True):
        for place, stage in enumerate(own):
            layers[stage] = count // len(own) + (place < count % len(own))
    found = layout.changed(layers=tuple(layers))
    if 0 < found.recompute_layers >= max(layers):  # which are all of them now
        found = found.changed(recompute_layers=0)
    waits = max(each.whole for each in told) - max(seconds)
    after = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    # What fills and drains the pipeline is as long as its stages.
    step = max(seconds) + waits
    least = min(range(layout.pp), key=lambda rank: speeds[rank])
    return Balance(found, step, step * after / max(seconds), nodes[slowest[least]], max(speeds) / min(speeds), "layers")


def _weighted(run: Run, layout: Layout, ranks: int, paces: Mapping[str, Pace]) -> Balance | None:
    nodes, told = list(paces), list(paces.values())
    holders: list[set[int]] = [set() for _ in range(layout.dp)]
    for rank in range(layout.world_size):
        holders[coordinates(rank, layout).dp].add(rank // ranks)
    slowest = [max(own, key=lambda node: told[node].own) for own in holders]
    seconds = [told[node].own for node in slowest]
    if layout.dp == 1 or min(seconds) <= 0:
        return None
    speeds = [layout.weight_of(replica) / each for replica, each in enumerate(seconds)]
    found = _layout(run, layout, speeds)
    if found is None:
        return None
    waits = max(each.whole for each in told) - max(seconds)
    part = [found.weight_of(replica) / found.batch_parts / speed for replica, speed in enumerate(speeds)]
    before, after = max(seconds) + waits, max(part) * layout.batch_parts + waits
    least = min(range(layout.dp), key=lambda replica: speeds[replica])
    return Balance(found, before, after, nodes[slowest[least]], max(speeds) / min(speeds))


def _layout(run: Run, layout: Layout, speeds: Sequence[float]) -> Layout | None:
    parts = run.training.batch_sizes.divisor // layout.micro_batch
    equal = layout.changed(batch_weights=())
    if layout.zero < 2 and layout.ep <= layout.cp * layout.tp:  # replicas meet once a step: any numbers will do
        sums = [parts]
    else:
        sums = [number for number in range(layout.dp, LARGER * layout.dp + 1) if parts % number == 0]
    best: tuple[float, Layout] | None = None
    for number in sums:
        if number < layout.dp:
            continue
        weights = deal(number, speeds)
        time = max(weight / speed for weight, speed in zip(weights, speeds, strict=True)) / number
        try:
            found = equal.changed(batch_weights=weights)
        except UserError:  # weights that are too large
            continue
        if found.has_unequal_sizes and max(found.batch_weights) > LARGER:
            continue
        if best is None or time < best[0] * 0.98:
            best = time, found
    return best[1] if best else None


def deal(parts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """So many equal parts, at least one for each, so that the last is done soonest.

    >>> deal(8, [2.0, 1.0, 1.0])
    (4, 2, 2)
    """
    given = [1] * len(speeds)
    heap = [(2 / speed, place) for place, speed in enumerate(speeds)]
    heapify(heap)
    for _ in range(parts - len(speeds)):
        _, place = heap[0]
        given[place] += 1
        heapreplace(heap, ((given[place] + 1) / speeds[place], place))
    return tuple(given)
