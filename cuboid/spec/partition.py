"""Which layers each pipeline stage holds: contiguous, none empty, the costliest stage as cheap as can be.

>>> stage_layers([1.0] * 8, first=0.0, last=2.0, stages=4)
[range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec


def stage_layers(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """`first` and `last`: what the embedding and the head add to the first and last stage.

    The largest stage cost first, then the sum of squares: among equally slow splits the most even one is taken."""
    same = len(set(costs)) == 1
    boundaries = _equal(costs, first, last, stages) if same else _dynamic(costs, first, last, stages)
    return [range(start, stop) for start, stop in pairwise(boundaries)]


def _equal(costs: Sequence[float], first: float, last: float, stages: int) -> list[int]:
    """Layers that cost the same: each goes to the stage that is cheapest so far, a later one of equals.

    Costs of stages are convex in their layers, so this is optimal for the largest cost and for the sum of squares."""
    each = costs[0]
    counts = [1] * stages
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    heap = [(each + extra[stage], -stage) for stage in range(stages)]
    heapq.heapify(heap)
    for _ in range(len(costs) - stages):
        cost, stage = heap[0]
        counts[-stage] += 1
        heapq.heapreplace(heap, (cost + each, stage))
    return [0, *accumulate(counts)]


def _dynamic(costs: Sequence[float], first: float, last: float, stages: int) -> list[int]:
    """The least cost of the largest stage, then dynamic programming over (stages, layers) for the squares under it."""
    layers = len(costs)
    table = _stage_costs(tuple(costs), first, last)
    limit = _least_largest(tuple(costs), first, last, stages) * (1 + 1e-12)
    least = [layers]  # for every number of stages that follow the first layer they can begin with
    while len(least) < stages:
        stop = least[-1]
        least.append(next(start for start in range(stop + 1) if start == stop or table[start][stop] <= limit))
    after = range(stages - 1, -1, -1)
    ends = [range(max(stage + 1, least[more]), layers - more + 1) for stage, more in enumerate(after)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        stop: (table[0][stop] ** 2, (0, stop)) for stop in ends[0] if table[0][stop] <= limit
    }
    for stage in range(1, stages):
        following = {}
        for stop in ends[stage]:
            chosen = None
            for start in range(stop - 1, -1, -1):
                cost = table[start][stop]
                if cost > limit:
                    break  # a stage that begins earlier costs more
                if start in best:
                    squares, boundaries = best[start]
                    option = (squares + cost**2, boundaries)
                    chosen = option if chosen is None else min(chosen, option)
            if chosen:
                following[stop] = (chosen[0], (*chosen[1], stop))
        best = following
    return list(best[layers][1])


@lru_cache(maxsize=8)
def _stage_costs(costs: tuple[float, ...], first: float, last: float) -> list[list[float]]:
    """What a stage costs that begins with one layer and stops before another, whatever the number of stages."""
    layers, total = len(costs), [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (first if start == 0 else 0.0) + (last if stop == layers else 0.0)

    return [[cost(start, stop) if start < stop else 0.0 for stop in range(layers + 1)] for start in range(layers)]


def _least_largest(costs: tuple[float, ...], first: float, last: float, stages: int) -> float:
    """The least that the largest of so many stages can cost: of what stages cost, the first that is enough for all."""
    table, known = _stage_costs(costs, first, last), _known_costs(costs, first, last)
    return known[bisect_left(known, True, key=lambda limit: _fewest_stages(table, limit) <= stages)]


@lru_cache(maxsize=8)
def _known_costs(costs: tuple[float, ...], first: float, last: float) -> list[float]:
    table = _stage_costs(costs, first, last)
    return sorted({row[stop] for start, row in enumerate(table) for stop in range(start + 1, len(row))})


def _fewest_stages(table: list[list[float]], limit: float) -> float:
    """Stages within a limit that hold all layers, each as many as it can; more are as cheap: any can be split."""
    layers, start, count = len(table), 0, 0
    while start < layers:
        stop = bisect_right(table[start], limit, start + 1)  # costs rise with every layer
        if stop == start + 1:
            return float("inf")
        start, count = stop - 1, count + 1
    return count


def layer_costs(model: ModelSpec, sequence: int) -> tuple[list[float], float]:
    """Forward matmuls per token of each layer, and of the head; looking tokens up costs nothing."""
    if isinstance(model, PythonModelSpec):  # what its matmuls are is not known; most have a weight each
        parameters = model.built.segment_parameters
        return [float(max(parameters(f"layers.{layer}"), 1)) for layer in range(model.layers)], float(
            parameters("head")
        )
    latent = model.latent
    if latent is None:
        projections = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        attention = [_attention_cost(model, layer, sequence) for layer in range(model.layers)]
    else:
        projections = model.attention_parameters()
        each = sequence * model.heads * (latent.qk_nope_dim + latent.qk_rope_dim + latent.v_dim) // 2
        attention = [each] * model.layers
    costs = [projections + attention[layer] + _feed_forward_cost(model, layer) for layer in range(model.layers)]
    head = model.hidden * model.vocab
    if model.prediction_layers:  # the last stage has them, and the head's matmul once more for each
        layer = projections + attention[-1] + _feed_forward_cost(model, model.layers)
        head += model.prediction_layers * (layer + 2 * model.hidden**2 + head)
    return [float(cost) for cost in costs], float(head)


def _feed_forward_cost(model: ModelSpec, layer: int) -> int:
    matrices, mixture = 3 if model.is_gated else 2, model.mixture
    if mixture is None or not model.has_experts(layer):
        return model.hidden * model.ffn * matrices
    width = mixture.top_k * mixture.expert_ffn + mixture.shared_ffn
    return model.hidden * (width * matrices + mixture.experts)


def _attention_cost(model: ModelSpec, layer: int, sequence: int) -> int:
    """Two matmuls with the keys that a query sees on average, which without a window is half of the sequence."""
    window = model.window_of(layer)
    if not 0 < window < sequence:
        return sequence * model.heads * model.head_dim
    return window * (2 * sequence + 1 - window) // sequence * model.heads * model.head_dim


@lru_cache(maxsize=1024)
def _partition(model: ModelSpec, stages: int, sequence: int, layers: tuple[int, ...]) -> tuple[range, ...]:
    if layers:
        return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(layers)]))
    costs, head = layer_costs(model, sequence)
    return tuple(stage_layers(costs, 0.0, head, stages))


def partition(model: ModelSpec, stages: int, sequence: int, layers: tuple[int, ...] = ()) -> list[range]:
    """Layers per stage: as many as `layers` says (`Layout.layers`), or balanced by forward matmuls per token. The
    engine and the planner both ask here."""
    return list(_partition(model, stages, sequence, layers))


def held_layers(model: ModelSpec, layout: Layout, sequence: int) -> list[range]:
    """As `partition`, with the prediction layers behind the last stage's own."""
    *others, last = partition(model, layout.stages, sequence, layout.layers)
    return [*others, range(last.start, model.all_layers)]


def longest_stage(model: ModelSpec, stages: int, sequence: int, layers: tuple[int, ...] = ()) -> int:
    """Layers of the stage that holds most."""
    return max(map(len, _partition(model, stages, sequence, layers)))
