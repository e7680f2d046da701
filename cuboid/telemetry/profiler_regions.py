"""Names, in a profiler's trace, for what a rank does: passes of the pipeline, layers, waits for others.

They stand around compiled graphs, never inside. While nobody takes a trace a region is one look at a flag."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

from cuboid.telemetry.heartbeat import HEARTBEAT, Activity, Heartbeat, Wait

NOTHING: AbstractContextManager[object] = nullcontext()


class Regions:
    """What the heartbeat of this rank notes becomes regions too, while a trace is taken: each activity until the
    next begins, and inside that every wait."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._taken = False
        self._activity: record_function | None = None
        self._waits = threading.local()  # autograd waits for others in a thread of its own

    def begin(self) -> None:
        self._taken = True
        self._heartbeat.observer = self

    def end(self) -> None:
        self._taken = False
        self._heartbeat.observer = None
        self._close_activity()

    def around(self, action: str, name: str = "") -> AbstractContextManager[object]:
        """For a `with` statement."""
        return record_function(f"{action} {name}".strip()) if self._taken else NOTHING

    def open(self, action: str, name: str) -> record_function | None:
        """For what begins in one call and ends in another of the same thread, with `close`."""
        if not self._taken:
            return None
        region = record_function(f"{action} {name}")
        region.__enter__()
        return region

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """All that the host does for one step, its last activity included."""
        with self.around("step", str(number)):
            yield
            self._close_activity()

    # What the heartbeat tells.

    def began(self, activity: Activity, stage: int, micro_batch: int) -> None:
        self._close_activity()
        if stage >= 0:
            self._activity = self.open(f"stage {stage} {activity}", f"micro-batch {micro_batch}")
        elif activity:
            self._activity = self.open(activity, "of this step")

    def waits(self, kind: Wait, track: str) -> None:
        self._waits.region = self.open("wait:", f"{kind} of {track}" if track not in ("", kind) else kind)

    def wait_ended(self) -> None:
        close(getattr(self._waits, "region", None))
        self._waits.region = None

    def _close_activity(self) -> None:
        close(self._activity)
        self._activity = None


def close(region: record_function | None) -> None:
    if region is not None:
        region.__exit__(None, None, None)


REGIONS = Regions(HEARTBEAT)
"""Of this process, which is one rank."""
