"""The trace and the picture show every action where the simulation put it."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from cuboid.planning.picture import chrome_trace, svg
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, Timeline, simulate


def timeline(name: str = "zb1p", chunks: int = 1) -> Timeline:
    schedule = make_schedule(name, 4, 6, chunks)
    return simulate(schedule, StageCosts.uniform(4 * chunks, 1.0, 1.5, 0.5), 0.1)


def test_the_trace_holds_every_action() -> None:
    made = timeline()
    trace = chrome_trace(made, "four ranks")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(made.events)
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(made.makespan * 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"four ranks", "pipeline rank 0", "pipeline rank 3"} <= names
    for rank in range(4):
        mine = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == rank)
        assert all(start + length <= after + 1e-3 for (start, length), (after, _) in pairwise(mine))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb1p", 1), ("interleaved", 2), ("dualpipev", 2)])
def test_the_picture_is_well_formed_and_complete(name: str, chunks: int) -> None:
    made = timeline(name, chunks)
    text = svg(made, "a < b & c", "subtitle")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in root.iter(f"{space}rect") if box.find(f"{space}title") is not None]
    assert len(boxes) == len(made.events)
    words = [entry.text for entry in root.iter(f"{space}text")]
    assert {"a < b & c", "subtitle", "rank 0", "rank 3", "F forward"} <= set(words)
    width = float(root.attrib["width"])
    assert all(0 <= float(box.attrib["x"]) <= width for box in boxes)


def test_an_empty_step_has_a_picture() -> None:
    free = simulate(make_schedule("1f1b", 2, 2), StageCosts.uniform(2, 0.0, 0.0, 0.0))
    assert ElementTree.fromstring(svg(free, "free")) is not None
