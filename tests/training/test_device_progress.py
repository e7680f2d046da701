"""Marks in the order of a device's work, and what the watchdog learns from them. These pass when they are told to."""

from __future__ import annotations

from cuboid.telemetry.heartbeat import DEVICE_LEFT, DEVICE_PASSED, Heartbeat, read_heartbeat
from cuboid.training.device_progress import DeviceProgress


class Told:
    passed = False

    def query(self) -> bool:
        return self.passed


def test_each_note_leaves_a_mark_until_the_phase_is_known() -> None:
    heartbeat, marks = Heartbeat(), list[Told]()

    def leave() -> Told:
        marks.append(Told())
        return marks[-1]

    progress = DeviceProgress(heartbeat, leave)
    heartbeat.mark = progress.mark
    heartbeat.enter("step", 1)
    heartbeat.do("forward")
    with heartbeat.track("data", (0, 1)).collective("all-reduce"):
        pass
    assert len(marks) == 3 and read_heartbeat(heartbeat.words).device_left == 3
    marks[0].passed = marks[2].passed = True
    progress.look()
    assert (heartbeat.words[DEVICE_PASSED], heartbeat.words[DEVICE_LEFT]) == (1, 2), "the second holds up the third"
    marks[1].passed = True
    progress.look()
    assert (heartbeat.words[DEVICE_PASSED], heartbeat.words[DEVICE_LEFT]) == (3, 0)
    for step in (2, 3, 4):
        heartbeat.enter("step", step)
    left = len(marks)
    heartbeat.do("forward")
    assert len(marks) == left, "two steps were seen: how long one takes is known"


def test_a_stream_that_is_captured_has_no_marks() -> None:
    heartbeat = Heartbeat()
    progress = DeviceProgress(heartbeat, lambda: None)
    progress.start()
    try:
        heartbeat.do("forward")
        assert heartbeat.words[DEVICE_LEFT] == 0
    finally:
        progress.stop()
    assert heartbeat.mark is None
