"""Which layers each pipeline stage holds: contiguous, none empty, the costliest stage as cheap as can be.

>>> stage_layers([1.0] * 8, first=0.0, last=2.0, stages=4)
[range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

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
    """Dynamic programming over (stages, layers), once for the largest cost and once for the squares under it."""
    layers = len(costs)
    table = _stage_costs(tuple(costs), first, last)
    ends = [range(stage + 1, layers - (stages - 1 - stage) + 1) for stage in range(stages)]
    largest = {stop: table[0][stop] for stop in ends[0]}
    for stage in range(1, stages):
        largest = {stop: _least_largest(largest, table, stop) for stop in ends[stage]}
    limit = largest[layers] * (1 + 1e-12)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        stop: (table[0][stop] ** 2, (0, stop)) for stop in ends[0] if table[0][stop] <= limit
    }
    for stage in range(1, stages):
        following = {}
        for stop in ends[stage]:
            options = []
            for start in range(stop - 1, -1, -1):
                if table[start][stop] > limit:
                    break  # a stage that begins earlier costs more
                if start in best:
                    squares, boundaries = best[start]
                    options.append((squares + table[start][stop] ** 2, (*boundaries, stop)))
            if options:
                following[stop] = min(options)
        best = following
    return list(best[layers][1])


@lru_cache(maxsize=8)
def _stage_costs(costs: tuple[float, ...], first: float, last: float) -> list[list[float]]:
    """What a stage costs that begins with one layer and stops before another, whatever the number of stages."""
    layers, total = len(costs), [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (first if start == 0 else 0.0) + (last if stop == layers else 0.0)

    return [[cost(start, stop) if start < stop else 0.0 for stop in range(layers + 1)] for start in range(layers)]


def _least_largest(largest: dict[int, float], table: list[list[float]], stop: int) -> float:
    """The least cost of the largest of so many stages and one more up to `stop`. Of the two the one falls and the other
    rises as that one begins later, so the first place where it is not the larger decides."""
    least = float("inf")
    for start in range(stop - 1, -1, -1):
        if start in largest:
            least = min(least, max(largest[start], table[start][stop]))
            if table[start][stop] >= largest[start]:
                break
    return least


def layer_costs(model: ModelSpec, sequence: int) -> tuple[list[float], float]:
    """Forward matmuls per token of each layer, and of the head; looking tokens up costs nothing."""
    if isinstance(model, PythonModelSpec):  # what its matmuls are is not known; most have a weight each
        parameters = model.built.segment_parameters
        return [float(max(parameters(f"layers.{layer}"), 1)) for layer in range(model.layers)], float(
            parameters("head")
        )
    mixture, latent = model.mixture, model.latent
    if latent is None:
        projections = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        attention = sequence * model.heads * model.head_dim  # causal: half of two matmuls over the sequence
    else:
        projections = model.attention_parameters()
        attention = sequence * model.heads * (latent.qk_nope_dim + latent.qk_rope_dim + latent.v_dim) // 2
    matrices = 3 if model.activation == "swiglu" else 2
    dense = float(projections + attention + model.hidden * model.ffn * matrices)
    if mixture is None:
        return [dense] * model.layers, float(model.hidden * model.vocab)
    width = mixture.top_k * mixture.expert_ffn + mixture.shared_ffn
    routed = float(projections + attention + model.hidden * (width * matrices + mixture.experts))
    costs = [dense] * mixture.first_dense_layers + [routed] * (model.layers - mixture.first_dense_layers)
    return costs, float(model.hidden * model.vocab)


@lru_cache(maxsize=1024)
def _partition(model: ModelSpec, stages: int, sequence: int) -> tuple[range, ...]:
    costs, head = layer_costs(model, sequence)
    return tuple(stage_layers(costs, 0.0, head, stages))


def partition(model: ModelSpec, stages: int, sequence: int) -> list[range]:
    """Layers per stage, balanced by forward matmuls per token; the engine and the planner both ask here."""
    return list(_partition(model, stages, sequence))


def longest_stage(model: ModelSpec, stages: int, sequence: int) -> int:
    """Layers of the stage that holds most."""
    return max(map(len, _partition(model, stages, sequence)))
