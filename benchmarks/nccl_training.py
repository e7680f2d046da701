"""A training over real NCCL with all ranks on one GPU: killed at a random step, recovered, resumed on another layout.

    python benchmarks/nccl_training.py                  # needs a GPU; about four minutes
    python benchmarks/nccl_training.py --device cpu     # the same over gloo

Runs of `cuboid train`, tiny-llama in float64, so that losses can be compared to 1e-9:

1. 60 steps on one rank;
2. 50 steps on dp=2,tp=2,pp=2 with checkpoints; a random rank is killed at a random step, and the run recovers;
3. the folder of 2 resumed to step 60 on pp=4,dp=2,schedule=zbv;
4. a random rank hangs in the first step, and one in set-up, at the same time: each is named, with the seconds it took.

The exit code is 1 if a loss differs by more than 1e-9 or a hang names another rank."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LAYOUT, OTHER = "dp=2,tp=2,pp=2", "pp=4,dp=2,schedule=zbv"
STEPS, MORE, RANKS = 50, 60, 8


def train(folder: Path, device: str, *options: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "training.global_batch": 4,
        "training.sequence": 32,
        "training.precision": "float64",
        "training.device": device,
        "learning_rate.schedule": "constant",
        "output.folder": folder,
        "output.log_every": 10,
    }
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "cuboid.cli.main", "train", "examples/demo.toml", *changes, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def largest(found: dict[int, float], expected: dict[int, float]) -> float:
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())


def hang(folder: Path, device: str, rank: int, where: str) -> bool:
    begin = time.perf_counter()
    options = ("--layout", LAYOUT, "--set", "resilience.restarts=0", "--set", "training.steps=5")
    ended = train(folder, device, *options, "--inject", f"hang rank={rank} {where}")
    seconds = time.perf_counter() - begin
    named = re.search(r"rank (\d+) hangs[^\n]*", ended.stderr)
    kept = sorted(path.name for path in folder.glob("hang-*/*"))
    print(f"rank {rank} hangs ({where}): exit code {ended.returncode} after {seconds:.0f} s, kept {kept[:4]} …")
    print(f"  {named.group() if named else ended.stderr[-600:]}", flush=True)
    return named is not None and int(named.group(1)) == rank and ended.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="of the rank and the step")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 16)
    chosen = random.Random(seed)
    victim, step = chosen.randrange(RANKS), chosen.randrange(2, STEPS)
    good = True
    with tempfile.TemporaryDirectory(prefix="cuboid-") as place:
        folder = Path(place)

        def checked(name: str, run: str, *options: str) -> None:
            begin = time.perf_counter()
            ended = train(folder / run, arguments.device, *options)
            first = [line for line in ended.stdout.splitlines() if line.startswith("backend")]
            print(
                f"{name}: exit code {ended.returncode}, {time.perf_counter() - begin:.0f} s; {' '.join(first[:1])}",
                flush=True,
            )
            if ended.returncode:
                raise SystemExit(ended.stdout[-800:] + ended.stderr[-2000:])

        saves = ("--set", "checkpoint.every=10")
        checked("one rank", "whole", "--layout", "dp=1", "--set", f"training.steps={MORE}")
        expected = losses(folder / "whole")
        fault = ("--inject", f"kill rank={victim} step={step}")
        checked(
            f"rank {victim} killed in step {step} (seed {seed})",
            "killed",
            *("--layout", LAYOUT, "--set", f"training.steps={STEPS}"),
            *(*saves, *fault),
        )
        failures = (folder / "killed" / "failures.jsonl").read_text().splitlines()
        error = largest(losses(folder / "killed"), {step: loss for step, loss in expected.items() if step <= STEPS})
        print(f"  {len(failures)} failure noted, {STEPS} losses, largest difference {error:.1e}", flush=True)
        checked(f"resumed on {OTHER}", "killed", "--layout", OTHER, "--set", f"training.steps={MORE}", *saves)
        other = largest(losses(folder / "killed"), expected)
        print(f"  {MORE} losses, largest difference {other:.1e}", flush=True)
        good = len(failures) == 1 and max(error, other) <= 1e-9
        cases = [(chosen.randrange(RANKS), where) for where in ("step=1", "at=set-up")]
        with ThreadPoolExecutor() as both:
            hung = [both.submit(hang, folder / where, arguments.device, rank, where) for rank, where in cases]
        good = all(each.result() for each in hung) and good
    print("all as without the kill; every hang named" if good else "NOT as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
