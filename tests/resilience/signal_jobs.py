"""Jobs on the ranks of the pool that are sent real signals."""

from __future__ import annotations

import os
import signal
import time

import torch

from cuboid.resilience.preemption import Listener
from cuboid.spec.run import Run
from cuboid.training.trainer import Outcome, train


def train_signalled(rank: int, run: Run, target: int, call: int) -> tuple[Outcome, int]:
    """Train; `target` is sent SIGTERM when it looks for the `call`-th time whether it was asked to stop: after set-up,
    before each step, after each batch of an evaluation and after each save. Returns also how often it looked."""
    looked = 0
    with Listener(run) as signals:

        def asked() -> bool:
            nonlocal looked
            looked += 1
            if rank == target and looked == call:
                os.kill(os.getpid(), signal.SIGTERM)
                while not signals.asked:  # the thread that listens needs a moment
                    time.sleep(0.001)
            return signals.asked

        outcome = train(run, rank, torch.device("cpu"), quiet=True, asked=asked)
    return outcome, looked
