"""The drawing shows who works when, within the width it is given."""

from hypothesis import given
from hypothesis import strategies as st

from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, draw, simulate


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
