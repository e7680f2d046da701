"""A wish that the job stop, told by SIGTERM or SIGUSR1 to any of its processes: a rank, or the supervisor.

Whoever is told first tells the others: a supervisor its ranks, a rank all ranks with the numbers of the next step. All
then save what was done and end with `REQUEUE`. A rank may be waiting inside a collective when the signal comes, where
Python runs no handler: so a thread listens."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import MutableSequence
from contextlib import suppress
from types import FrameType
from typing import Self

from cuboid.spec.run import Run

REQUEUE = 75
"""The exit code that says: nothing is wrong, start the same command again (EX_TEMPFAIL of sysexits.h)."""
ASKING = (signal.SIGTERM, signal.SIGUSR1)
AGAIN = 2.0
"""Seconds in which two SIGTERMs are one: a scheduler signals a launcher and its ranks, and the launcher its ranks."""
BEAT = 0.1
LEFT_BEHIND = 0.5
"""Seconds that ranks outlive one that failed. They would treat the launcher's SIGTERM as a wish, and linger."""


def _nothing(sent: int, frame: FrameType | None) -> None:
    """That Python has a handler is what lets the thread hear of a signal; the thread does the rest."""


class Listener:
    """In the main thread of a process, from as early as possible to its end. Signals are blocked in this thread, and so
    in all threads and processes it starts meanwhile: no compiler, fork server or writer of checkpoints dies of them
    while the job still needs it. A run that keeps no checkpoints listens to nothing: signals end it as they always
    do."""

    def __init__(self, run: Run, patience: float = 0.0) -> None:
        """`patience`: seconds by which whoever else may end the job when its time is over comes first."""
        self.active = run.checkpoint.every > 0
        self.grace = run.resilience.grace_seconds
        self._patience = patience
        self.code: int | None = None
        """With what the job ends without having saved: the time given was over, or somebody could not wait for it."""
        self._asked: float | None = None
        self._over = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked is not None

    def __enter__(self) -> Self:
        if self.active:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            self.block()
            self._handlers = {sent: signal.signal(sent, _nothing) for sent in ASKING}
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._thread.start()
        return self

    def block(self) -> None:
        """In this thread, and in what it starts from now on."""
        if self.active:
            signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)

    def __exit__(self, *_: object) -> None:
        if self.active:
            self._over.set()
            self._thread.join()
            signal.set_wakeup_fd(self._wakeup)
            for sent, handler in self._handlers.items():
                signal.signal(sent, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            os.close(self._reader)
            os.close(self._writer)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        while not self._over.is_set():
            if select.select([self._reader], [], [], BEAT)[0]:
                for sent in os.read(self._reader, 64):
                    if sent in ASKING:
                        self._hear(signal.Signals(sent), time.monotonic())
            if self._asked is not None and time.monotonic() > self._asked + self.grace + self._patience:
                self._end(REQUEUE, f"resilience.grace_seconds={self.grace:g} are over and nothing new is saved")
            self._beat()

    def _hear(self, sent: signal.Signals, now: float) -> None:
        if self._asked is None:
            self._asked = now
        elif sent == signal.SIGTERM and now > self._asked + AGAIN:
            self._end(128 + sent, f"stopped by a second {sent.name}; nothing new is saved")

    def _end(self, code: int, reason: str) -> None:
        if self.code is None:
            self.code = code
            print(f"warning: {reason}", file=sys.stderr, flush=True)
            self._leave(code)

    def _leave(self, code: int) -> None:
        """At once: a checkpoint is published whole or not at all, so nothing that counts is left half-written."""
        os._exit(code)

    def _beat(self) -> None:
        """Called some times a second."""


class Forwarder(Listener):
    """In the supervisor: tells the ranks of this machine, and ends those that a failed rank left behind."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._pids: MutableSequence[int] = []
        self._told: set[int] = set()
        self._missed: float | None = None

    def follow(self, pids: MutableSequence[int]) -> None:
        """`pids`: shared with the ranks, each of which writes its own, and 0 when it has ended well."""
        self._told, self._missed, self._pids = set(), None, pids

    def _beat(self) -> None:
        for pid in filter(None, self._pids):
            try:
                asked = self.asked and pid not in self._told
                os.kill(pid, signal.SIGUSR1 if asked else 0)
                if asked:
                    self._told.add(pid)
            except ProcessLookupError:
                self._missed = self._missed or time.monotonic()
        if self._missed is not None and time.monotonic() > self._missed + LEFT_BEHIND:
            self._kill()

    def _leave(self, code: int) -> None:
        """The launcher misses the ranks, and the command ends with `code`."""
        self._kill()

    def _kill(self) -> None:
        for pid in filter(None, self._pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
