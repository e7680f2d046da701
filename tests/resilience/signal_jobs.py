"""Jobs on the ranks of the pool, and programs of their own, that are sent real signals."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from cuboid.resilience.preemption import Listener
from cuboid.spec.run import Run, build_run
from cuboid.train.trainer import Outcome, train


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


def deaf(grace: str) -> None:
    """A process that listens and does nothing about what it hears."""
    run = build_run({"model": "tiny-llama", "checkpoint": {"every": 1}}, [f"resilience.grace_seconds={grace}"])
    with Listener(run):
        print("listening", flush=True)
        signal.pause()  # as if inside a collective: no handler of Python runs here


if __name__ == "__main__":
    deaf(sys.argv[1])
