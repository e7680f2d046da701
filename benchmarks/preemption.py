"""SIGTERM to one rank in every phase of a real training: what is saved, with which code it ends, how long that takes.

    python benchmarks/preemption.py [--layout dp=2,pp=2] [--rounds 3]

Each row is so many trainings, each signalled in another rank, started again after it, and compared with one that was
left alone: losses bit for bit."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cuboid.resilience.preemption import REQUEUE
from cuboid.spec.layout import Layout

STEPS = 12
PHASES = {
    "set-up": "at=set-up",
    "first step": "step=1 at=forward",
    "step, forward": "step=5 at=forward",
    "step, all-reduce": "step=5 at=all-reduce",
    "evaluation": "step=6 at=evaluation",
    "save": "step=4 at=save",
    "end": f"step={STEPS} at=finish",
}
FIELDS = (
    f"training.steps={STEPS}",
    "training.global_batch=8",
    "training.sequence=32",
    "training.device=cpu",
    "training.precision=float64",
    "checkpoint.every=4",
    "evaluation.every=6",
    "data.validation_fraction=0.1",
)


def train(folder: Path, layout: str, fault: str = "") -> tuple[int, str, float]:
    """Exit code, last line, and the time of the end."""
    settings = [word for field in (*FIELDS, f"output.folder={folder}") for word in ("--set", field)]
    inject = ["--inject", fault] if fault else []
    command = [sys.executable, "-m", "cuboid.cli.main", "train", "--layout", layout, *inject, *settings]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    lines = result.stdout.splitlines() or [""]
    return result.returncode, lines[-1] if result.returncode in (0, REQUEUE) else result.stderr, time.time()


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _is_right(phase: str, code: int, said: str, folder: Path) -> bool:
    """Before the first step there is nothing to save, and a run that is done has nothing to continue with."""
    if phase == "end":
        return code == 0
    saved = re.match(r"preempted: step (\d+) is saved", said)
    kept = (folder / f"checkpoints/step-{int(saved[1]):08d}").exists() if saved else "anything to save" in said
    return code == REQUEUE and kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp=2,pp=2")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ranks = Layout.parse(arguments.layout).world_size
    print("| SIGTERM in | trainings | saved and ended with 75 | went on bit for bit | signal to end, median (worst) |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch) / "alone"
        train(alone, arguments.layout)
        for number, (phase, place) in enumerate(PHASES.items()):
            right, same, seconds = 0, 0, []
            for turn in range(arguments.rounds):
                folder = Path(scratch) / f"{number}-{turn}"
                code, said, end = train(folder, arguments.layout, f"term rank={(number + turn) % ranks} {place}")
                seconds.append(end - json.loads((folder / "fault-01.json").read_text())["time"])
                right += _is_right(phase, code, said, folder)
                if code not in (0, REQUEUE):
                    print(said, file=sys.stderr)
                train(folder, arguments.layout)
                same += losses(folder) == losses(alone)
            middle, worst = statistics.median(seconds), max(seconds)
            rounds = arguments.rounds
            print(f"| {phase} | {rounds} | {right} | {same} | {middle:.1f} s ({worst:.1f} s) |", flush=True)


if __name__ == "__main__":
    main()
