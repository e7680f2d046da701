"""Every schedule is valid for any size, keeps to its published shape, and bad requests are refused in one sentence."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.schedule.order import validate
from cuboid.schedule.schedules import FAMILIES, make_schedule, make_table
from cuboid.schedule.simulate import peak_activations, peak_in_flight
from cuboid.schedule.table import Action, Kind, Schedule, join, table_of


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 9, most_micro_batches: int = 40) -> Schedule:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    stages_per_rank = draw(st.integers(family.least_stages_per_rank, family.most_stages_per_rank or 5))
    ranks, micro_batches = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_micro_batches))
    return make_schedule(name, ranks, micro_batches, stages_per_rank)


@given(schedules())
def test_every_schedule_is_valid(schedule: Schedule) -> None:
    validate(schedule)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_small_schedule_is_valid(name: str) -> None:
    least = FAMILIES[name].least_stages_per_rank
    for ranks in range(1, 7):
        for micro_batches in range(1, 2 * ranks + 3):
            validate(make_schedule(name, ranks, micro_batches, least))


@given(schedules())
def test_lists_as_arrays_are_the_same_lists(schedule: Schedule) -> None:
    table = table_of(schedule)
    assert table.schedule == schedule
    made = make_table(schedule.name, schedule.ranks, schedule.micro_batches, schedule.stages // schedule.ranks)
    assert made.rows.tolist() == table.rows.tolist()


@given(schedules())
def test_backward_is_split_only_where_another_rank_gains(schedule: Schedule) -> None:
    for actions in schedule.actions:
        for first, second in pairwise(actions):
            at_once = first.kind is Kind.INPUT and second == Action(Kind.WEIGHT, first.stage, first.micro_batch)
            if at_once:
                assert first.stage > 0
                assert schedule.stage_rank[first.stage - 1] != schedule.stage_rank[first.stage]


def test_only_zero_bubble_schedules_split_and_one_rank_never_does() -> None:
    splitting = {name for name in FAMILIES if _least(name, 4).splits_backward}
    assert splitting == {"zb1p", "zbv", "dualpipev"}
    assert not any(_least(name, 1).splits_backward for name in FAMILIES)


def test_placement_loops_or_is_a_v() -> None:
    assert make_schedule("interleaved", 3, 3, 3).stage_rank == (0, 1, 2, 0, 1, 2, 0, 1, 2)
    for name in ("zbv", "dualpipev"):
        schedule = make_schedule(name, 3, 6, 2)
        assert schedule.stage_rank == (0, 1, 2, 2, 1, 0)
        assert schedule.stages_of(0) == (0, 5)


def test_orders_as_published() -> None:
    assert join(make_schedule("gpipe", 2, 2).actions[1]) == "F1.0 F1.1 B1.0 B1.1"
    assert join(make_schedule("1f1b", 3, 4).actions[1]) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"
    assert join(make_schedule("1f1b", 4, 2).actions[0]) == "F0.0 F0.1 B0.0 B0.1"
    assert join(make_schedule("interleaved", 2, 4, 2).actions[1]) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )
    assert join(make_schedule("zb1p", 3, 4).actions[2]) == (
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3"
    )
    assert join(make_schedule("zbv", 2, 3, 2).actions[1]) == (
        "F1.0 F2.0 F1.1 F2.1 B2.0 F1.2 I1.0 W1.0 F2.2 B2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2"
    )
    assert join(make_schedule("dualpipev", 2, 4, 2).actions[0]) == (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 B0.2 B0.3"
    )


@given(st.integers(1, 9), st.integers(1, 30))
def test_peaks_in_flight(ranks: int, micro_batches: int) -> None:
    p, m = ranks, micro_batches
    assert peak_in_flight(make_table("gpipe", p, m)) == (m,) * p
    assert peak_in_flight(make_table("1f1b", p, m)) == tuple(min(m, p - rank) for rank in range(p))
    split = make_table("zb1p", p, m)
    assert peak_in_flight(split) == (min(m, p),) * p
    assert peak_in_flight(split, until_input=True) == tuple(min(m, p - rank) for rank in range(p))
    # Stages of a V are half as large, so 2p of them are the p of 1F1B's first rank.
    assert max(peak_in_flight(make_table("zbv", p, m, 2))) <= 2 * min(m, p)
    assert max(peak_in_flight(make_table("dualpipev", p, m, 2))) <= min(2 * m, 2 * p + 1)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(2, 4))
def test_interleaved_warms_up_as_megatron(ranks: int, rounds: int, stages_per_rank: int) -> None:
    schedule = make_schedule("interleaved", ranks, rounds * ranks, stages_per_rank)
    for rank, actions in enumerate(schedule.actions):
        before_first_backward = [action.kind for action in actions].index(Kind.BACKWARD)
        assert before_first_backward - 1 == 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks


def test_peak_activations_weigh_stages_and_what_the_weight_half_keeps() -> None:
    schedule = make_schedule("zb1p", 2, 4)
    assert join(schedule.actions[1]) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 F1.3 I1.3 W1.2 W1.3"
    table = make_table("zb1p", 2, 4)
    assert peak_activations(table, [3.0, 10.0]) == (6.0, 20.0)
    assert peak_activations(table, [3.0, 10.0], [3.0, 4.0]) == (6.0, 14.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("1f1f", 2, 2, 1), "schedule '1f1f' is unknown; did you mean 1f1b? known: gpipe, 1f1b"),
        (("quantum", 2, 2, 1), "schedule 'quantum' is unknown; known: gpipe, 1f1b"),
        (("1f1b", 0, 2, 1), "ranks 0 of a pipeline schedule; it must be 1 or more"),
        (("1f1b", 2, 0, 1), "micro_batches 0 of a pipeline schedule; it must be 1 or more"),
        (("1f1b", 2, 2, 2), "stages_per_rank 2 with schedule 1f1b; it takes 1"),
        (("zbv", 2, 2, 3), "stages_per_rank 3 with schedule zbv; it takes 2"),
        (("interleaved", 2, 2, 1), "stages_per_rank 1 with schedule interleaved; it takes 2 or more"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_schedule(*arguments)
    assert str(refusal.value).startswith(sentence)


def _least(name: str, ranks: int) -> Schedule:
    return make_schedule(name, ranks, 2 * ranks, FAMILIES[name].least_stages_per_rank)
