"""A process that listens to signals and does nothing about what it hears; it needs no torch.

python tests/resilience/deaf.py GRACE_SECONDS
"""

from __future__ import annotations

import signal
import sys

from cuboid.resilience.preemption import Listener
from cuboid.spec.run import build_run

if __name__ == "__main__":
    table = {"model": "tiny-llama", "checkpoint": {"every": 1}}
    with Listener(build_run(table, [f"resilience.grace_seconds={sys.argv[1]}"])):
        print("listening", flush=True)
        signal.pause()  # as if inside a collective: no handler of Python runs here
