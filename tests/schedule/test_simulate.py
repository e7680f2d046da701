"""The simulator against a slow second one, against published closed forms, and against bounds no schedule can beat."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.schedule.schedules import FAMILIES, make_schedule
from cuboid.schedule.simulate import StageCosts, Timed, draw, makespans, simulate
from cuboid.schedule.table import Action, Kind, Schedule, table_of
from tests.schedule.oracle import duration, overlapped_pairs, singles, slow_makespan

# Whole numbers keep every sum exact, so equalities below need no tolerance.
seconds = st.integers(1, 20)
ranks_and_batches = st.tuples(st.integers(1, 8), st.integers(1, 30))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageCosts, float]:
    """Any schedule with uneven stages and a transfer time."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    stages_per_rank = draw(st.integers(family.least_stages_per_rank, family.most_stages_per_rank or 3))
    schedule = make_schedule(name, draw(st.integers(1, 5)), draw(st.integers(1, 12)), stages_per_rank)
    column = st.tuples(*[seconds] * schedule.stages)
    costs = StageCosts(forward=draw(column), input_backward=draw(column), weight_backward=draw(column))
    return schedule, costs, draw(st.integers(0, 10))


@given(cases())
def test_equals_the_slow_simulator(case: tuple[Schedule, StageCosts, float]) -> None:
    schedule, costs, transfer = case
    assert simulate(schedule, costs, transfer).makespan == slow_makespan(schedule, singles(schedule), costs, transfer)


@given(st.lists(cases(), max_size=4))
def test_many_at_once_equal_one_by_one(given: list[tuple[Schedule, StageCosts, float]]) -> None:
    found = makespans([Timed(table_of(schedule), costs, transfer) for schedule, costs, transfer in given])
    one_by_one = [
        (simulate(schedule, costs).makespan, simulate(schedule, costs, transfer).makespan)
        for schedule, costs, transfer in given
    ]
    assert found == one_by_one


def test_many_at_once_name_who_waits() -> None:
    forward, backward = (tuple(Action(kind, 0, batch) for batch in (0, 1)) for kind in (Kind.FORWARD, Kind.BACKWARD))
    first = (*backward, *forward)
    second = tuple(Action(kind, 1, batch) for batch in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD))
    whole, stuck = make_schedule("1f1b", 2, 2), Schedule("hand-made", 2, 2, (0, 1), (first, second))
    costs = StageCosts.uniform(2)
    with pytest.raises(UserError, match=r"hand-made deadlocks: rank 0 waits at B0.0, rank 1 waits at F1.0"):
        makespans([Timed(table_of(each), costs, 0.0) for each in (whole, stuck)])


@given(cases())
def test_events_are_the_schedule_run_in_order(case: tuple[Schedule, StageCosts, float]) -> None:
    schedule, costs, transfer = case
    timeline = simulate(schedule, costs, transfer)
    for rank, actions in enumerate(schedule.actions):
        events = [event for event in timeline.events if event.rank == rank]
        assert tuple(event.action for event in events) == actions
        assert all(event.end - event.start == duration(event.action, costs) for event in events)
        assert all(before.end <= after.start for before, after in pairwise(events))
        assert timeline.busy[rank] == sum(event.end - event.start for event in events)
        assert timeline.bubble[rank] == 1 - timeline.busy[rank] / timeline.makespan


@given(cases())
def test_no_faster_than_work_and_critical_path_allow(case: tuple[Schedule, StageCosts, float]) -> None:
    schedule, costs, transfer = case
    crossings = sum(a != b for a, b in pairwise(schedule.stage_rank))
    one_micro_batch = sum(costs.forward) + sum(costs.input_backward) + 2 * crossings * transfer
    timeline = simulate(schedule, costs, transfer)
    assert timeline.makespan >= max(*timeline.busy, one_micro_batch)
    assert timeline.makespan >= simulate(schedule, costs).makespan


@given(ranks_and_batches, seconds, seconds, seconds)
def test_gpipe_and_one_forward_one_backward(sizes: tuple[int, int], f: float, i: float, w: float) -> None:
    p, m = sizes
    for name in ("gpipe", "1f1b"):
        assert simulate(make_schedule(name, p, m), StageCosts.uniform(p, f, i, w)).makespan == (m + p - 1) * (f + i + w)


@given(ranks_and_batches, st.integers(2, 4))
def test_interleaved(sizes: tuple[int, int], v: int) -> None:
    p, m = sizes
    for f, i, w in ((1, 1, 1), (2, 3, 1)):
        makespan = simulate(make_schedule("interleaved", p, m, v), StageCosts.uniform(p * v, f, i, w)).makespan
        # With m < p the pipeline never fills and one micro-batch's way through all stages decides.
        assert makespan == (max(m, p) * v + min(m, p) - 1) * (f + i + w)


@given(ranks_and_batches, seconds, seconds, seconds)
def test_zero_bubble_h1(sizes: tuple[int, int], f: float, i: float, w: float) -> None:
    p, m = sizes[0], sizes[0] + sizes[1] - 1
    makespan = simulate(make_schedule("zb1p", p, m), StageCosts.uniform(p, f, i, w)).makespan
    # Published, for W ≤ F and I: (p - 1)(F + I - W). A longer weight half cannot hide the last rank's late start
    # nor the first rank's wait for its first gradient.
    assert makespan - m * (f + i + w) == (p - 1) * (f + i - min(f, i, w))


@given(ranks_and_batches, seconds)
def test_zbv_leaves_only_the_start_up(sizes: tuple[int, int], unit: float) -> None:
    p, m = sizes[0], 2 * sizes[0] + sizes[1] - 1
    timeline = simulate(make_schedule("zbv", p, m, 2), StageCosts.uniform(2 * p, unit, unit, unit))
    assert timeline.makespan - 6 * m * unit == (p - 1) * unit
    for rank in range(p):
        events = [event for event in timeline.events if event.rank == rank]
        assert events[-1].end - events[0].start == timeline.busy[rank], "a rank never idles once it has started"


@given(ranks_and_batches, seconds)
def test_dualpipev(sizes: tuple[int, int], unit: float) -> None:
    p, m = sizes[0], 2 * sizes[0] + sizes[1] - 1
    schedule, costs = make_schedule("dualpipev", p, m, 2), StageCosts.uniform(2 * p, unit, unit, unit)
    work = 6 * m * unit
    # Published for pairs that run as one: (p - 1)(F&B + B - 3W), here with F&B = F + B.
    joined = slow_makespan(schedule, overlapped_pairs(schedule), costs, 0)
    assert joined - work == (p - 1) * (3 * unit + 2 * unit - 3 * unit)
    # One after the other the forward's result leaves early: as ZB-H1 with stages half as long.
    assert simulate(schedule, costs).makespan - work == (p - 1) * unit


@pytest.mark.parametrize("name", FAMILIES)
def test_bubble_falls_with_more_micro_batches(name: str) -> None:
    stages_per_rank = FAMILIES[name].least_stages_per_rank
    for ranks in (1, 2, 3, 4, 6):
        costs = StageCosts.uniform(ranks * stages_per_rank)
        bubbles = [
            simulate(make_schedule(name, ranks, count, stages_per_rank), costs).bubble_fraction
            for count in range(1, 30)
        ]
        assert all(more <= less + 1e-12 for less, more in pairwise(bubbles))


def test_published_order_of_bubbles_and_zero_bubble_pays_no_memory() -> None:
    bubble, peak = {}, {}
    for name, family in FAMILIES.items():
        v = family.least_stages_per_rank
        timeline = simulate(make_schedule(name, 8, 32, v), StageCosts.uniform(8 * v, 1 / v, 1 / v, 1 / v))
        bubble[name], peak[name] = timeline.bubble_fraction, max(timeline.peak_in_flight) / v
    assert bubble["gpipe"] == pytest.approx(bubble["1f1b"])
    assert bubble["1f1b"] > bubble["interleaved"] > bubble["zb1p"] > bubble["zbv"]
    assert bubble["dualpipev"] == pytest.approx(bubble["zbv"])
    assert peak == {"gpipe": 32, "1f1b": 8, "interleaved": 11.5, "zb1p": 8, "zbv": 8, "dualpipev": 8.5}


def test_a_transfer_per_boundary() -> None:
    schedule, costs = make_schedule("1f1b", 3, 1), StageCosts.uniform(3)
    assert simulate(schedule, costs, [10, 100]).makespan == 9 + 2 * 110
    with pytest.raises(ValueError, match="transfer has 3 entries for 2 boundaries"):
        simulate(schedule, costs, [1, 1, 1])


def test_transfers_inside_a_rank_are_free() -> None:
    schedule = make_schedule("zbv", 2, 1, 2)
    assert simulate(schedule, StageCosts.uniform(4), [5, 1000, 5]).makespan < 1000


def test_one_forward_one_backward() -> None:
    assert draw(simulate(make_schedule("1f1b", 2, 3), StageCosts.uniform(2))) == "\n".join(
        [
            "rank 0 F0 F1 ......B0    F2 B1    ...B2    ",
            "rank 1 ...F0 B0    F1 B1    F2 B2    ......",
            "1f1b: bubble 25.0%",
        ]
    )


def test_second_stage_of_a_rank_has_its_own_letter() -> None:
    first = draw(simulate(make_schedule("zbv", 2, 3, 2), StageCosts.uniform(4))).splitlines()[0]
    assert first == "rank 0 F0a F1a F2a F0b I0b W0b F1b I1b W1b B0a     F2b I2b W2b B1a     B2a     ...."


@given(st.integers(10, 200), st.integers(1, 12), st.floats(0.01, 100))
def test_never_wider_than_asked_and_all_rows_alike(width: int, ranks: int, scale: float) -> None:
    timeline = simulate(make_schedule("zb1p", ranks, 9), StageCosts.uniform(ranks, scale, 2 * scale, scale), scale / 3)
    rows = draw(timeline, width).splitlines()[:-1]
    assert len(rows) == ranks
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width + len("rank 11 ")


def test_nothing_to_draw_when_nothing_takes_time() -> None:
    assert draw(simulate(make_schedule("gpipe", 1, 1), StageCosts.uniform(1, 0, 0, 0))) == "rank 0 \ngpipe: bubble 0.0%"
