"""Partitions, bubbles and micro-batches in flight: closed forms against the schedule tables."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.constants import Engine
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.pipeline import (
    bubble,
    in_flight,
    is_v_shaped,
    least_waited_transfers,
    paired_fraction,
    partition,
    waited_transfers,
)
from cuboid.planning.stages import even_layers
from cuboid.schedule.order import Compute, instructions
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, simulate
from cuboid.spec.layout import SCHEDULES
from cuboid.spec.model import ModelSpec

CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}


def jobs(name: str, ranks: int, micro_batches: int) -> Jobs:
    return Jobs.make(
        pp=ranks,
        vpp=CHUNKS.get(name, 1),
        schedule=SCHEDULES.index(name),
        global_batch=micro_batches,
        sequence=1,
    )


def closed_form(name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float]) -> float:
    forward, inputs, weight = costs
    work = forward + inputs + weight
    idle = bubble(
        jobs(name, ranks, micro_batches),
        number(forward),
        number(inputs + weight),
        number(weight),
        number((ranks - 1) * work),
    )
    return micro_batches * work + float(idle)


def simulated(name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float]) -> float:
    chunks = CHUNKS.get(name, 1)
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    return simulate(schedule, StageCosts.uniform(ranks * chunks, *(cost / chunks for cost in costs))).makespan


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("gpipe", "1f1b", "interleaved")),
    st.integers(1, 8),
    st.integers(1, 32),
    st.floats(0.5, 2.0),
    st.floats(0.5, 2.0),
)
def test_plain_schedules_equal_their_closed_form(
    name: str, ranks: int, micro_batches: int, inputs: float, weight: float
) -> None:
    costs = (1.0, inputs, weight)
    assert closed_form(name, ranks, micro_batches, costs) == pytest.approx(
        simulated(name, ranks, micro_batches, costs), rel=1e-9
    )


@pytest.mark.parametrize("name", ["zb1p", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 16), (8, 64), (4, 6), (4, 2), (8, 1)])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (1.0, 2.0, 0.9), (0.8, 1.2, 0.9)])
def test_zero_bubble_schedules_are_near_their_tables(
    name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float]
) -> None:
    assert closed_form(name, ranks, micro_batches, costs) == pytest.approx(
        simulated(name, ranks, micro_batches, costs), rel=0.045
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_is_what_the_tables_keep(name: str) -> None:
    chunks = CHUNKS.get(name, 1)
    for ranks, micro_batches in ((4, 8), (8, 32), (2, 2)):
        table = simulate(
            make_schedule(name, ranks, micro_batches, chunks), StageCosts.uniform(ranks * chunks)
        ).peak_in_flight
        ours = [float(in_flight(jobs(name, ranks, micro_batches), number(rank))) * chunks for rank in range(ranks)]
        assert ours[0] >= table[0]
        assert ours[0] <= table[0] + chunks
        assert all(mine >= kept - 1e-9 for mine, kept in zip(ours, table, strict=True))


@given(st.sampled_from(SCHEDULES), st.integers(2, 16))
def test_the_bubble_fraction_falls_with_micro_batches(name: str, ranks: int) -> None:
    fractions = []
    for rounds in (1, 2, 4, 8):
        total = closed_form(name, ranks, ranks * rounds, (1.0, 1.2, 0.9))
        fractions.append(1 - ranks * rounds * 3.1 / total)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(fractions))


def shape(layers: int, vocab: int = 1024, hidden: int = 256) -> Shape:
    return Shape.of(ModelSpec(hidden=hidden, layers=layers, heads=4, ffn=4 * hidden, vocab=vocab))


@given(st.integers(1, 130), st.integers(1, 64))
def test_even_partitions_hold_every_layer(layers: int, ranks: int) -> None:
    counts = even_layers(layers, ranks)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    stage = partition(shape(layers), Jobs.make(pp=ranks, global_batch=1, sequence=1), Engine(name="test"))
    assert float(stage.first) == counts[0]
    assert max(float(stage.first), float(stage.middle), float(stage.last)) == max(counts)


def test_nanotron_partition_follows_its_costs() -> None:
    # Llama-like 8.86B of the Ultra-Scale Playbook: the head costs as much as 2.2 layers.
    model = ModelSpec(hidden=4096, layers=32, heads=32, ffn=14336, vocab=131072)
    engine = Engine(name="test", partition="balanced")
    ranks = np.array([1, 2, 4, 8, 16, 32])
    stage = partition(Shape.of(model), Jobs.make(pp=ranks, global_batch=1, sequence=1), engine)
    assert stage.first.tolist() == [32, 18, 9, 5, 3, 2]
    assert stage.last.tolist() == [32, 14, 6, 2, 2, 1]
    assert np.all(stage.filled == ranks)


def test_nanotron_leaves_ranks_empty_where_the_head_outweighs_layers() -> None:
    # The 1.34B model has sixteen layers and a head of four: sixteen ranks cannot all get a block.
    model = ModelSpec(hidden=2048, layers=16, heads=32, ffn=8192, vocab=131072, tie_embeddings=True)
    engine = Engine(name="test", partition="balanced")
    stage = partition(Shape.of(model), Jobs.make(pp=number([8, 16]), global_batch=1, sequence=1), engine)
    assert stage.filled.tolist() == [8, 15]


def test_head_partition_counts_the_ends_as_layers() -> None:
    # BLOOM: 70 layers and two ends on 12 ranks of six.
    engine = Engine(name="test", partition="head")
    stage = partition(shape(70), Jobs.make(pp=12, global_batch=1, sequence=1), engine)
    assert (float(stage.first), float(stage.middle), float(stage.last)) == (5, 6, 5)


def test_v_shaped_schedules_end_where_they_begin() -> None:
    flags = [float(is_v_shaped(jobs(name, 4, 8))) for name in SCHEDULES]
    assert flags == [0, 0, 0, 0, 1, 1]
    assert float(is_v_shaped(jobs("1f1b", 1, 8))) == 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [2, 8])
def test_transfers_are_waited_for_as_in_the_tables(name: str, ranks: int, times: int) -> None:
    """To within a few of them: in the steady state all schedules but 1F1B hide theirs."""
    short, chunks, count = 0.01, CHUNKS.get(name, 1), times * ranks
    schedule = make_schedule(name, ranks, count, chunks)
    costs = StageCosts.uniform(ranks * chunks)
    waited = (simulate(schedule, costs, short).makespan - simulate(schedule, costs).makespan) / (2 * short)
    found = float(waited_transfers(jobs(name, ranks, count), Engine(name="test", transfer_scheduled=True)))
    assert found == pytest.approx(waited, abs=0.4 * ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [2, 4, 8])
def test_pairs_are_as_many_as_in_the_table(ranks: int, times: int) -> None:
    count = times * ranks
    rows = instructions(make_schedule("dualpipev", ranks, count, 2), paired=True)
    pairs = sum(isinstance(each, Compute) and len(each.actions) == 2 for row in rows for each in row)
    assert float(paired_fraction(jobs("dualpipev", ranks, count))) == pytest.approx(
        pairs / (2 * ranks * count), abs=0.02
    )
    assert float(paired_fraction(jobs("zbv", ranks, count))) == 0


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("exposed", [0.0, 0.3, 1.0])
def test_no_schedule_waits_for_fewer_transfers_than_the_least(scheduled: bool, exposed: float) -> None:
    engine = Engine(name="test", transfer_scheduled=scheduled, transfer_exposed=exposed)
    for ranks in (1, 2, 3, 8):
        for count in (1, 2, 7, 64):
            waited = {
                (name, vpp): float(waited_transfers(replace(jobs(name, ranks, count), vpp=number(vpp)), engine))
                for name in SCHEDULES
                for vpp in (1, 2, 3)
                if (vpp > 1) == (name == "interleaved")
            }
            tried = min(each for (name, _), each in waited.items() if name != "gpipe")
            assert float(least_waited_transfers(jobs("1f1b", ranks, count), engine)) == pytest.approx(tried)
            least = float(least_waited_transfers(jobs("1f1b", ranks, count), engine, gpipe=True))
            assert least == pytest.approx(min(waited.values()))
