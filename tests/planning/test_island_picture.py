"""Drawings of rounds: nothing overlaps, nothing is lost, and text, picture and trace tell the same."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from cuboid.cost.rounds import IslandTimes, Timeline, rounds_over_time
from cuboid.planning.island_picture import BESIDE, FILL, activities, chrome_trace, draw, svg
from cuboid.spec.islands import IslandsSpec

NAMES = ("oregon", "paris")


@pytest.fixture
def timeline() -> Timeline:
    spec = IslandsSpec(count=2, every=4, fragments=2, delay=1)
    times = (IslandTimes(1.0, 0.2, 0.1, 0.1), IslandTimes(1.5, 0.2, 0.1, 0.1))
    return rounds_over_time(spec, 8, times, (1.9, 1.0), 0.05)


def test_what_stops_the_training_fills_its_time(timeline: Timeline) -> None:
    found = activities(timeline)
    for island, starts in enumerate(timeline.starts):
        own = sorted(
            (each for each in found if each.island == island and each.kind not in BESIDE), key=lambda a: a.start
        )
        assert sum(each.end - each.start for each in own) == pytest.approx(starts[-1])
        for before, after in pairwise(own):
            assert after.start == pytest.approx(before.end)
    assert sum(each.kind == "step" for each in found) == 16
    assert sum(each.kind == "fetch" for each in found) == 2 * len(timeline.rounds)


def test_rows_of_text(timeline: Timeline) -> None:
    lines = draw(timeline, NAMES, 80).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("oregon =")
    assert "." in lines[0]  # the fast one waits
    assert "~" in lines[1]


def test_the_picture_and_the_trace_hold_everything(timeline: Timeline) -> None:
    root = ElementTree.fromstring(svg(timeline, NAMES, "llama & co", "two <islands>"))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(activities(timeline))
    events = [each for each in chrome_trace(timeline, NAMES, "llama")["traceEvents"] if each["ph"] == "X"]
    assert len(events) == len(titles)
    assert set(FILL) == {each.kind for each in activities(timeline)}
