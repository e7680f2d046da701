"""Which layers each pipeline stage holds: contiguous, none empty, the costliest stage as cheap as can be.

>>> stage_layers([1.0] * 8, first=0.0, last=2.0, stages=4)
[range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from cuboid.spec.model import ModelSpec


def stage_layers(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """`first` and `last`: what the embedding and the head add to the first and last stage.

    Dynamic programming over (stages, layers): the largest stage cost first, then the sum of squares, so that among
    equally slow splits the most even one is taken."""
    layers = len(costs)
    total = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (first if start == 0 else 0.0) + (last if stop == layers else 0.0)

    # best[stop]: (largest cost, sum of squares, boundaries) of the stages so far, holding layers 0:stop.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (cost(0, stop), cost(0, stop) ** 2, (0, stop)) for stop in range(1, layers - stages + 2)
    }
    for stage in range(1, stages):
        following = {}
        for stop in range(stage + 1, layers - (stages - 1 - stage) + 1):
            following[stop] = min(
                (max(largest, cost(start, stop)), squares + cost(start, stop) ** 2, (*boundaries, stop))
                for start, (largest, squares, boundaries) in best.items()
                if start < stop
            )
        best = following
    boundaries = best[layers][2]
    return [range(start, stop) for start, stop in pairwise(boundaries)]


def partition(model: ModelSpec, stages: int, sequence: int) -> list[range]:
    """Layers per stage, balanced by forward products per token; the head counts, looking tokens up costs nothing."""
    projections = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    feed_forward = model.hidden * model.ffn * (3 if model.activation == "swiglu" else 2)
    attention = sequence * model.heads * model.head_dim  # causal: half of two products over the sequence
    layer = float(projections + feed_forward + attention)
    return stage_layers([layer] * model.layers, 0.0, float(model.hidden * model.vocab), stages)
