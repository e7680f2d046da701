"""Waiting for a core is told apart from keeping one."""

import time

import torch

from cuboid.probe.kernels import WINDOWS, timed


def test_sleeping_keeps_no_core() -> None:
    found = timed(lambda: time.sleep(0.01), 0.2, torch.device("cpu"))
    assert len(found.windows) == len(found.core_fractions) == WINDOWS
    assert max(found.windows) < 0.01
    assert max(found.core_fractions) < 0.9


def test_what_takes_longer_than_there_is_time_is_timed_once_when_warm() -> None:
    calls: list[int] = []

    def slow_at_first() -> None:
        calls.append(1)
        end = time.process_time() + (0.2 if len(calls) == 1 else 0.02)
        while time.process_time() < end:
            pass

    found = timed(slow_at_first, 0.001, torch.device("cpu"))
    assert len(calls) == 2 and len(found.windows) == 1
    assert found.windows[0] < 0.2
