"""Stages: contiguous, complete, as even as trying everything can make them."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuboid.spec.model import load_model
from cuboid.spec.partition import layer_costs, partition, stage_layers


def splits(layers: int, stages: int) -> Iterator[list[range]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield [range(start, stop) for start, stop in pairwise((0, *inner, layers))]


def quality(costs: list[float], first: float, last: float, parts: list[range]) -> tuple[float, float]:
    sums = [sum(costs[index] for index in part) for part in parts]
    sums[0] += first
    sums[-1] += last
    return max(sums), sum(value**2 for value in sums)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0.0, 1.0, 3.5]),
    st.data(),
)
def test_no_other_split_is_more_even(
    costs: list[float], same: bool, first: float, last: float, data: st.DataObject
) -> None:
    costs = [costs[0]] * len(costs) if same else costs
    stages = data.draw(st.integers(1, len(costs)))
    parts = stage_layers(costs, first, last, stages)
    assert [index for part in parts for index in part] == list(range(len(costs)))
    assert all(len(part) for part in parts)
    found = quality(costs, first, last, parts)
    best = min(quality(costs, first, last, other) for other in splits(len(costs), stages))
    assert found == pytest.approx(best, rel=1e-9)


def test_the_head_takes_layers_from_the_last_stage() -> None:
    parts = partition(load_model("llama3-8b"), 4, 8192)
    assert len(parts[-1]) < len(parts[0])
    assert sum(len(part) for part in parts) == 32


def test_layers_of_a_mixture_cost_what_they_compute() -> None:
    model = load_model("deepseek-v3")
    costs, head = layer_costs(model, 4096)
    assert model.mixture is not None
    assert len(set(costs[: model.mixture.first_dense_layers])) == 1
    assert len(set(costs)) == 2
    assert min(costs) > 0
    assert head == model.hidden * model.vocab
    assert sum(len(part) for part in partition(model, 16, 4096)) == model.layers
