"""How far a rank's GPU has come, for the watchdog: the host runs ahead of it and knows nothing of a kernel that hangs.

Each note of the heartbeat leaves a mark (a CUDA event) in the order of the device's work; a thread counts the marks
that the device has passed. Marks are left only where the watchdog has learned nothing yet: in set-up, in the first
steps, in the first evaluation and save."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
import torch.distributed as dist

from cuboid.telemetry.heartbeat import DEVICE_LEFT, DEVICE_PASSED, HEARTBEAT, PHASE, SEEN, Heartbeat

EVERY = 0.5
"""Seconds between two looks at the marks."""
MOST = 4096
"""Marks that are kept: a device so far behind needs no more to be told apart from one that stands still."""
ENOUGH = 2
"""Times that a phase was gone through, after which its length is known."""


class Mark(Protocol):
    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


def leave_mark() -> Mark | None:
    """On the current stream. None: it is being captured, where a mark would become a part of the graph."""
    if torch.cuda.is_current_stream_capturing():
        return None
    # Without timing: such an event is the cheapest there is, and only asked whether it has passed.
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class DeviceProgress:
    def __init__(self, heartbeat: Heartbeat, leave: Callable[[], Mark | None] = leave_mark) -> None:
        self._heartbeat, self._leave = heartbeat, leave
        self._marks = deque[Mark]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device-progress", daemon=True)

    def mark(self) -> None:
        """Called by any thread of the rank."""
        words = self._heartbeat.words
        # An event costs the host microseconds; once a phase's length is known its silence tells enough.
        if words[SEEN + words[PHASE]] < ENOUGH and len(self._marks) < MOST and (mark := self._leave()) is not None:
            self._marks.append(mark)
            words[DEVICE_LEFT] = len(self._marks)

    def look(self) -> None:
        passed = 0
        # Marks are passed in order: the first that is not passed ends the look.
        while self._marks and self._marks[0].query():
            self._marks.popleft()
            passed += 1
        self._heartbeat.words[DEVICE_PASSED] += passed
        self._heartbeat.words[DEVICE_LEFT] = len(self._marks)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # of the device: the rank's own calls meet it too, and say so
            while not self._over.wait(EVERY):
                self.look()

    def start(self) -> None:
        self._heartbeat.mark = self.mark
        self._thread.start()

    def stop(self) -> None:
        self._heartbeat.mark = None
        self._over.set()
        self._thread.join(2 * EVERY)  # it may be inside a call that the device does not answer


@contextmanager
def device_progress(device: torch.device) -> Iterator[None]:
    """Of a rank that has others to wait for. Its thread may look while graphs are captured: `thread_local` errors."""
    if device.type != "cuda" or not dist.is_initialized():
        yield
        return
    progress = DeviceProgress(HEARTBEAT)
    progress.start()
    try:
        yield
    finally:
        progress.stop()
