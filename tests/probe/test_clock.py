"""Waiting for a core is told apart from keeping one."""

import time

import torch

from cuboid.probe.clock import WINDOWS, timed


def test_sleeping_keeps_no_core() -> None:
    found = timed(lambda: time.sleep(0.01), 0.2, torch.device("cpu"))
    assert len(found.windows) == len(found.shares) == WINDOWS
    assert max(found.windows) < 0.01
    assert max(found.shares) < 0.9


def test_what_takes_longer_than_there_is_time_is_done_once() -> None:
    calls: list[int] = []
    found = timed(lambda: (calls.append(1), time.sleep(0.02)), 0.001, torch.device("cpu"))
    assert len(calls) == len(found.windows) == 1
