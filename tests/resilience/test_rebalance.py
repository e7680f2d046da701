"""Which parts of a batch slow nodes are given, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.resilience.rebalance import Pace, balance, deal
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run


def run_of(layout: str, steps: int = 1000, **training: object) -> Run:
    table = {"model": "tiny-llama", "layout": layout}
    return build_run({**table, "training": {"global_batch": 24, "sequence": 64, "steps": steps, **training}})


def paces(*own: float, step: int = 20, setup: float = 5.0, waits: float = 0.1) -> dict[str, Pace]:
    return {f"node{place}": Pace(step, each, max(own) + waits, setup) for place, each in enumerate(own)}


def test_a_node_at_half_speed_gets_half() -> None:
    run = run_of("dp=2,zero=1")
    found = balance(run, run.layout, 1, paces(1.0, 2.0))
    assert found is not None
    assert str(found.layout) == "dp=2,tp=1,pp=1,zero=1,batch_weights=2:1"
    assert (found.before, found.after) == pytest.approx((2.1, 4 / 3 + 0.1))
    told = "node node1 is 2 times as slow as the fastest: batch_weights=2:1 makes a step 1.43 s, not 2.1 s"
    assert found.why == told


def test_what_was_slow_and_is_not_any_more_gets_its_part_back() -> None:
    run = run_of("dp=2")
    found = balance(run, Layout.parse("dp=2,batch_weights=2:1"), 1, paces(2.0, 1.0))
    assert found is not None
    assert found.layout == Layout(dp=2)
    assert found.why == "equal parts of the batch makes a step 1.6 s, not 2.1 s"


def test_it_must_pay() -> None:
    run = run_of("dp=2", steps=40)
    assert balance(run, run.layout, 1, paces(1.0, 2.0, setup=6.0)) is not None  # 20 steps × 0.67 s
    assert balance(run, run.layout, 1, paces(1.0, 2.0, setup=7.0)) is None
    assert balance(run, run.layout, 1, paces(1.0, 1.1)) is None, "times vary by some percent"


def test_a_replica_is_as_slow_as_its_slowest_node() -> None:
    run = run_of("dp=2,pp=2")  # nodes hold stage 0 of both replicas, then stage 1
    found = balance(run, run.layout, 1, paces(1.0, 1.0, 1.0, 3.0))
    assert found is not None
    assert (found.layout.batch_weights, found.slow) == ((3, 1), "node3")


def test_a_slow_stage_gets_fewer_layers() -> None:
    run = run_of("dp=2,pp=2")  # a node for each stage
    found = balance(run, run.layout, 2, paces(1.0, 2.0))
    assert found is not None
    assert (found.layout.layers, found.slow) == ((6, 2), "node1")
    assert (found.before, found.after) == pytest.approx((2.1, 2.1 * 1.5 / 2))
    assert "node node1 is 2 times as slow as the fastest: layers=6:2 makes a step" in found.why
    back = balance(run, found.layout, 2, paces(1.5, 0.5))
    assert back is not None and back.layout.layers == (4, 4)


def test_layers_of_a_rank_are_shared_by_its_stages() -> None:
    run = run_of("pp=2,schedule=zbv")
    found = balance(run, run.layout, 1, paces(1.0, 3.0))
    assert found is not None
    assert (found.layout.layers, found.layout.stages_of(0)) == ((3, 1, 1, 3), (0, 3))
    assert balance(run, Layout.parse("pp=2,layers=4:4"), 2, paces(1.0)) is None, "both on one node"


def test_layers_that_are_recomputed_stay_within_the_longest_stage() -> None:
    run = run_of("pp=2,layers=6:2,recompute=full,recompute_layers=5")
    found = balance(run, run.layout, 1, paces(3.0, 1.0))
    assert found is not None
    assert (found.layout.layers, found.layout.recompute_layers) == ((4, 4), 0)
    assert replace(run, layout=found.layout).layout == found.layout


def test_replicas_in_step_get_larger_micro_batches_but_not_much_larger() -> None:
    run = run_of("dp=2,zero=3")
    found = balance(run, run.layout, 1, paces(1.0, 2.5))
    assert found is not None
    assert (found.layout.batch_weights, found.layout.micro_batch_of(0)) == ((2, 1), 2)


def test_every_batch_of_a_ramp_divides() -> None:
    run = run_of("dp=2", batch_ramp="4x10")
    found = balance(run, run.layout, 1, paces(1.0, 2.0))
    assert found is not None
    assert found.layout.batch_weights == (3, 1)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(0, 30))
def test_no_other_part_would_be_done_sooner(speeds: list[float], more: int) -> None:
    given_parts = deal(len(speeds) + more, speeds)
    assert sum(given_parts) == len(speeds) + more
    last = max(part / speed for part, speed in zip(given_parts, speeds, strict=True))
    for part, speed in zip(given_parts, speeds, strict=True):
        assert part > 0
        if part > 1 and part / speed == last:  # its last part would not end sooner anywhere else
            assert all((other + 1) / its >= last for other, its in zip(given_parts, speeds, strict=True))
