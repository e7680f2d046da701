"""How long something takes while everybody else is busy too."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WINDOWS = 4


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(action: Callable[[], object], seconds: float, device: torch.device) -> tuple[float, ...]:
    """Seconds of one action, as the mean over each of a few windows that together take about `seconds`.

    Means, because a rank that shares its core runs for milliseconds and then waits as long for the others: of short
    actions most would look as quick as on a free core."""
    for _ in range(2):  # the first call may pay for libraries
        start = time.perf_counter()
        action()
        synchronize(device)
        once = time.perf_counter() - start
        if once > seconds:
            return (once,)
    window = seconds / WINDOWS
    # The clock is read twenty times a window; a device works through a whole batch without a word from the host.
    batch = max(1, int(window / 20 / max(once, 1e-7)))
    found = []
    for _ in range(WINDOWS):
        start, count = time.perf_counter(), 0
        while not count or time.perf_counter() - start < window:
            for _ in range(batch):
                action()
            synchronize(device)
            count += batch
        found.append((time.perf_counter() - start) / count)
    return tuple(found)
