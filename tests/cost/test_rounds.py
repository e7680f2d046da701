"""Rounds of islands over time, against what can be said of them in closed form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.rounds import (
    EFFICIENCY,
    FIRST_WINDOW,
    IslandTimes,
    Prediction,
    predict_computing,
    rounds_over_time,
    transfer_seconds,
)
from cuboid.spec.islands import IslandsSpec

RATE = 1e6 / EFFICIENCY
"""At which a million bytes take a second."""


def predicted(size: float, every: int, delay: int, **others: float) -> Prediction:
    table = {"islands": 2, "fragments": 1, "latency": 0.0, "step_seconds": 1.0} | others
    return predict_computing(fragment_bytes=size, link_bytes_per_second=RATE, every=every, delay=delay, **table)  # type: ignore[arg-type]


def test_without_a_delay_every_round_stops_the_training() -> None:
    found = predicted(2e6, every=8, delay=0, encode_seconds=0.5, outer_seconds=0.25, apply_seconds=0.25)
    assert found.computing == pytest.approx(8 / (8 + 0.5 + 2 + 0.25 + 0.25))
    assert found.hidden == 0


def test_a_delay_hides_what_ends_in_it() -> None:
    assert predicted(3e6, every=8, delay=3).computing == pytest.approx(1)
    found = predicted(5e6, every=8, delay=3)
    assert found.computing == pytest.approx(8 / (8 + 2))
    assert found.hidden == pytest.approx(3 / 5)
    # What stops the training gives a transfer time as well, but for what is encoded before it begins.
    assert predicted(3e6, every=8, delay=3, encode_seconds=1, apply_seconds=1).computing == pytest.approx(8 / 10)


def test_rounds_queue_on_a_link_that_is_slower_than_they_begin() -> None:
    found = predicted(6e6, every=8, fragments=4, delay=7)  # a round every 2 s that takes 6 s
    assert found.computing == pytest.approx(2 / 6)


def test_all_others_share_a_link() -> None:
    two, four = predicted(1e6, every=4, delay=0), predicted(1e6, every=4, delay=0, islands=4)
    assert (two.computing, four.computing) == (pytest.approx(4 / 5), pytest.approx(4 / 7))


def test_a_round_takes_three_round_trips() -> None:
    found = predicted(1e3, every=4, delay=0, latency=0.5)
    assert found.computing == pytest.approx(4 / (4 + 3 + 1e-3))


def test_windows_grow_to_the_rate() -> None:
    size, latency = 100e6, 0.05
    slow = transfer_seconds(size, 1e9 / EFFICIENCY, latency)
    assert slow > size / 1e9 + 5 * 2 * latency
    assert transfer_seconds(size, 1e9 / EFFICIENCY, latency, connections=64) < slow
    assert transfer_seconds(FIRST_WINDOW / 2, 1e9 / EFFICIENCY, latency) == pytest.approx(latency, rel=1e-3)


def test_the_slowest_island_is_waited_for() -> None:
    spec = IslandsSpec(count=2, every=4, delay=0)
    timeline = rounds_over_time(spec, 8, [IslandTimes(1.0), IslandTimes(2.0)], [0.0], 0.0)
    first = timeline.rounds[0]
    assert (first.due, first.arrived, first.waited) == (4, (4.0, 8.0), (4.0, 0.0))
    assert predict_computing(
        fragment_bytes=0, islands=2, link_bytes_per_second=RATE, latency=0, step_seconds=[1, 2], every=4, fragments=1,
        delay=0,
    ).computing == pytest.approx(1 / 2)  # fmt: skip


@pytest.mark.parametrize(("delay", "ramp_steps"), [(0, 0), (3, 0), (3, 16)])
def test_rounds_are_those_of_the_table(delay: int, ramp_steps: int) -> None:
    """All are begun and applied, at the steps that the engine asks the same table for."""
    spec = IslandsSpec(count=3, every=5, ramp_steps=ramp_steps, fragments=3, delay=delay)
    timeline = rounds_over_time(spec, 23, [IslandTimes(1.0)] * 3, [0.1] * 3, 0.01)
    due = [round_ for step in range(1, 24) for round_ in spec.rounds_due(step, 23)]
    assert [each.round for each in timeline.rounds] == due
    assert len(timeline.starts[0]) == 24
    for each in timeline.rounds:
        assert each.arrived[0] >= timeline.starts[0][each.due - 1] + 1.0
        assert each.applied[0] >= each.done


@settings(max_examples=60, deadline=None)
@given(
    size=st.floats(1e3, 1e8),
    every=st.integers(2, 32),
    fragments=st.integers(1, 6),
    delay=st.integers(0, 31),
    latency=st.floats(0, 0.3),
    islands=st.integers(2, 5),
)
def test_more_time_or_less_to_send_never_computes_less(
    size: float, every: int, fragments: int, delay: int, latency: float, islands: int
) -> None:
    delay = min(delay, every - 1)

    def share(size: float, delay: int, latency: float) -> float:
        return predicted(size, every, delay, fragments=fragments, latency=latency, islands=islands).computing

    found = share(size, delay, latency)
    assert 0 < found <= 1 + 1e-12
    assert share(size / 2, delay, latency) >= found - 1e-9
    assert share(size, delay, latency / 2) >= found - 1e-9
    assert share(size, min(delay + 1, every - 1), latency) >= found - 1e-9
