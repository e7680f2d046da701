"""Which replica and which of its micro-batches takes which sequence of a step, so that all have as much to compute.

Step and position in the global batch decide the sequences of a step; lengths of documents and the layout decide who
takes which of them. Nothing else does, so there is no state, and each rank finds by itself what all others find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.compute import active_parameters, attention_width, seen_fraction
from cuboid.cost.inputs import Shape
from cuboid.data.source import Source
from cuboid.model.batch import Documents
from cuboid.spec.run import Run


@dataclass(frozen=True)
class Assignment:
    replicas: list[list[list[int]]]
    """Of each replica, of each of its micro-batches: positions in the global order."""
    imbalance: float
    """What replicas compute or wait for, over the mean of what they compute: the busiest one's work; with ZeRO 2 and 3,
    and with experts on several ranks, that of the busiest in each micro-batch."""
    in_order: float
    """The same if sequences were taken in their order."""


@lru_cache(maxsize=2)
def assignment(source: Source, run: Run, places: Sequence[int], cut: int) -> Assignment:
    """Of positions of the global order. `cut`: tokens after which sequences are cut; 0: nowhere. Kept for whoever asks
    again in the same step."""
    ids = (source.documents_at(place).unsqueeze(0) for place in places)
    documents = (Documents(each) for each in ids)
    lengths = [(each.cut(cut) if cut else each).lengths.numpy() for each in documents]
    works = [work(run, each) for each in lengths]
    layout = run.layout
    weights = [layout.weight_of(replica) for replica in range(layout.dp)]
    replicas = assign(works, weights, layout.micro_batch)
    if layout.has_unequal_sizes:
        replicas = [
            [list(chain.from_iterable(batches[at : at + weight])) for at in range(0, len(batches), weight)]
            for weight, batches in zip(weights, replicas, strict=True)
        ]
    in_order = [
        [
            list(own[at : at + layout.micro_batch_of(replica)])
            for at in range(0, len(own), layout.micro_batch_of(replica))
        ]
        for replica, own in enumerate(layout.sequences_of(each, len(places)) for each in range(layout.dp))
    ]
    taken = [[[places[number] for number in batch] for batch in batches] for batches in replicas]
    waits = (layout.zero >= 2 or layout.ep > 1) and not layout.has_unequal_counts
    return Assignment(taken, _imbalance(works, replicas, weights, waits), _imbalance(works, in_order, weights, waits))


def _imbalance(
    works: Sequence[int], replicas: Sequence[Sequence[Sequence[int]]], weights: Sequence[int], waits: bool
) -> float:
    """`waits`: in each micro-batch for all others. A replica of twice the weight is taken to be twice as fast."""
    loads = [
        [sum(works[number] for number in batch) / weight for batch in batches]
        for weight, batches in zip(weights, replicas, strict=True)
    ]
    longest = sum(map(max, zip(*loads, strict=True))) if waits else max(map(sum, loads))
    return longest * sum(weights) / sum(works)


def work(run: Run, lengths: NDArray[np.int64]) -> int:
    """Of a sequence with documents of these lengths, as the planner counts arithmetic: that of so many tokens without
    attention. A whole number, and of no accelerator: all machines must come to the same."""
    shape = Shape.of(run.model)
    sizes = lengths.astype(np.float64)
    pairs = sizes * (sizes + 1) / 2 * seen_fraction(shape, sizes)
    attention = 12 * shape.layers * attention_width(shape) * pairs / (6 * active_parameters(shape))
    return int(lengths.sum() + np.rint(attention).astype(np.int64).sum())


def assign(works: Sequence[int], weights: Sequence[int], width: int) -> list[list[list[int]]]:
    """Numbers of sequences by replica and micro-batch, of which each has `width`; a replica of more weight has so many
    more.

    Longest first, to whoever has least. First sequences to micro-batches, which a pipeline wants even. Then
    micro-batches to replicas: those that come one after another in the order of their work go to different replicas at
    the same time, because with ZeRO 2 and 3, and with experts, replicas wait for one another in each of them."""
    batches: list[list[int]] = [[] for _ in range(len(works) // width)]
    heap = [(0, number) for number in range(len(batches))]
    heapify(heap)
    for place in _longest_first(works):
        held, number = heappop(heap)
        batches[number].append(place)
        if len(batches[number]) < width:
            heappush(heap, (held + works[place], number))
    loads = [sum(works[place] for place in batch) for batch in batches]
    taken: list[list[list[int]]] = [[] for _ in weights]
    totals = [0] * len(weights)
    order, parts = _longest_first(loads), sum(weights)
    for start in range(0, len(order), parts):
        turn = order[start : start + parts]
        free = [(Fraction(totals[replica], weight), replica, weight) for replica, weight in enumerate(weights)]
        heapify(free)
        for number in turn:
            _, replica, room = heappop(free)
            taken[replica].append(batches[number])
            totals[replica] += loads[number]
            if room > 1:
                heappush(free, (Fraction(totals[replica], weights[replica]), replica, room - 1))
    return taken


def _longest_first(works: Sequence[int]) -> list[int]:
    return sorted(range(len(works)), key=lambda number: (-works[number], number))
