"""Marks in the order of a device's work, and what the watchdog learns from them. These pass when they are told to."""

from __future__ import annotations

from cuboid.resilience.pulse import DEVICE_LEFT, DEVICE_PASSED, Pulse
from cuboid.resilience.reading import read_pulse
from cuboid.train.device_progress import DeviceProgress


class Told:
    passed = False

    def query(self) -> bool:
        return self.passed


def test_each_note_leaves_a_mark_until_the_phase_is_known() -> None:
    pulse, marks = Pulse(), list[Told]()

    def leave() -> Told:
        marks.append(Told())
        return marks[-1]

    progress = DeviceProgress(pulse, leave)
    pulse.mark = progress.mark
    pulse.enter("step", 1)
    pulse.do("forward")
    with pulse.track("data", (0, 1)).joined("all-reduce"):
        pass
    assert len(marks) == 3 and read_pulse(pulse.words).device_left == 3
    marks[0].passed = marks[2].passed = True
    progress.look()
    assert (pulse.words[DEVICE_PASSED], pulse.words[DEVICE_LEFT]) == (1, 2), "the second holds up the third"
    marks[1].passed = True
    progress.look()
    assert (pulse.words[DEVICE_PASSED], pulse.words[DEVICE_LEFT]) == (3, 0)
    for step in (2, 3, 4):
        pulse.enter("step", step)
    left = len(marks)
    pulse.do("forward")
    assert len(marks) == left, "two steps were seen: how long one takes is known"


def test_a_stream_that_is_captured_has_no_marks() -> None:
    pulse = Pulse()
    progress = DeviceProgress(pulse, lambda: None)
    progress.start()
    try:
        pulse.do("forward")
        assert pulse.words[DEVICE_LEFT] == 0
    finally:
        progress.stop()
    assert pulse.mark is None
