"""How long something takes while everybody else is busy too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WINDOWS = 4


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Seconds of one action, as the mean over each of a few windows."""

    windows: tuple[float, ...]
    """By the device's clock; on a CPU those for which the process had a core."""
    shares: tuple[float, ...]
    """On a CPU how much of a core it had, else 1."""


def timed(action: Callable[[], object], seconds: float, device: torch.device) -> Timing:
    """Windows that together take about `seconds`.

    Ranks share cores with one another, and a busy machine shares them with strangers: how long an action keeps a core
    hardly varies, how long it waits for one varies wildly and is the same for all actions. So they are told apart."""
    for _ in range(2):  # the first call may pay for libraries and for memory, and says nothing
        start = _now(device)
        action()
        synchronize(device)
        clock, busy = (now - then for now, then in zip(_now(device), start, strict=True))
    if clock > seconds:
        return _timing([(clock, busy, 1)])
    window = seconds / WINDOWS
    # The clock is read twenty times a window; a device works through a whole batch without a word from the host.
    batch = max(1, int(window / 20 / max(clock, 1e-7)))
    found = []
    for _ in range(WINDOWS):
        start, count = _now(device), 0
        while not count or time.perf_counter() - start[0] < window:
            for _ in range(batch):
                action()
            synchronize(device)
            count += batch
        clock, busy = (now - then for now, then in zip(_now(device), start, strict=True))
        found.append((clock, busy, count))
    return _timing(found)


def _now(device: torch.device) -> tuple[float, float]:
    clock = time.perf_counter()
    return clock, clock if device.type == "cuda" else time.process_time()


def _timing(found: list[tuple[float, float, int]]) -> Timing:
    windows = tuple(max(busy, 1e-9) / count for _, busy, count in found)
    return Timing(windows, tuple(min(busy / clock, 1.0) for clock, busy, _ in found))
