"""A forward and a backward pass that run together: while one waits for a collective the other computes (DualPipe).

Both passes are ordinary code. Wherever one has issued a collective and would wait for it, it hands over; the other runs
until it does the same. Only one runs at a time, so the order of all calls is fixed by the model alone and is the same
on every rank, as collectives of one group must be. Kernels of both go to one stream: what the second pass computes is
queued before the first one's wait, and so runs during the transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class DualPipePair:
    def __init__(self) -> None:
        self.active = False
        self.carried: list[tuple[object, str]] = []
        """(object, attribute) that each pass sees as it left it, or as it was before both, whatever the other does."""
        self._running = 0
        self._ended = [False, False]
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))

    def run(self, first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """`second` runs in a thread of its own; an error of either is raised here when both have ended."""
        errors: list[BaseException] = []
        before = self._carried()
        self.active, self._running, self._ended = True, 0, [False, False]

        def one(side: int, work: Callable[[], None]) -> None:
            self._may_run[side].acquire()
            try:
                if side == 1:
                    self._restore(before)
                    if device.type == "cuda":  # a thread begins with the first one
                        torch.cuda.set_device(device)
                work()
            except BaseException as error:
                errors.append(error)
            self._ended[side] = True
            self._running = 1 - side
            self._may_run[1 - side].release()

        helper = threading.Thread(target=one, args=(1, second), name="overlapped backward")
        helper.start()
        self._may_run[0].release()
        one(0, first)
        helper.join()
        for semaphore in self._may_run:  # what the side that ended last has released
            while semaphore.acquire(blocking=False):
                pass
        self.active = False
        if errors:
            raise errors[0]

    def hand_over(self) -> None:
        """Called by a pass that would wait now. Returns when the other pass hands over in turn, or has ended."""
        if not self.active or self._ended[1 - self._running]:
            return
        kept = self._carried()
        side = self._running
        self._running = 1 - side
        self._may_run[1 - side].release()
        self._may_run[side].acquire()
        self._restore(kept)

    def _carried(self) -> list[Any]:
        return [getattr(owner, name) for owner, name in self.carried]

    def _restore(self, values: list[Any]) -> None:
        for (owner, name), value in zip(self.carried, values, strict=True):
            setattr(owner, name, value)
