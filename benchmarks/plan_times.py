"""CPU seconds and memory of `cuboid plan`, imports included, for every model of the catalog from 8 to 98,304
accelerators: `python benchmarks/plan_times.py [--models deepseek-v3,gpt2] [--accelerator h100] [--json]`.

Each question is a process of its own. A question without an answer ("too small") counts like any other.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from cuboid.spec.load import catalog_models
from cuboid.spec.model import load_model

SIZES = (8, 64, 512, 4096, 9216, 16384, 98304)
MOST_SECONDS, MOST_MB = 2.0, 500.0


@dataclass(frozen=True)
class Taken:
    """What one answer took."""

    model: str
    cluster: str
    global_batch: int
    seconds: float
    """Of the processor, in user and system mode."""
    megabytes: float
    """Most that the process held."""
    answered: bool


def ask(model: str, cluster: str, global_batch: int, sequence: int) -> Taken:
    """One question in a process of its own."""
    options = ["--global-batch", str(global_batch), "--seq", str(sequence), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cuboid.cli.main", "plan", model, cluster, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 2):
        raise SystemExit(f"cuboid plan {model} {cluster} {' '.join(options)} ended with {code}")
    return Taken(model, cluster, global_batch, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, code == 0)


def main() -> None:
    """Asks, and prints the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names with commas between them; default: all of the catalog")
    parser.add_argument("--accelerator", default="h100")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--json", action="store_true", help="print every question as a line of JSON")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else list(catalog_models())
    found = []
    for name in names:
        model = load_model(name)
        sequence = min(4096, model.max_positions) if model.positions == "learned" else 4096
        for size in map(int, options.sizes.split(",")):
            for global_batch in {1024, max(size, 1024) if size <= 16384 else 15360}:
                found.append(ask(name, f"{options.accelerator}x{size}", global_batch, sequence))
                if options.json:
                    print(json.dumps(asdict(found[-1])), flush=True)
    slowest, fullest = max(found, key=lambda each: each.seconds), max(found, key=lambda each: each.megabytes)
    late = [each for each in found if each.seconds > MOST_SECONDS or each.megabytes > MOST_MB]
    print(f"{len(found)} questions of {len(names)} models, {sum(each.answered for each in found)} with an answer")
    print(f"slowest: {slowest.seconds:.2f} CPU s, {slowest.model} on {slowest.cluster}, batch {slowest.global_batch}")
    print(f"fullest: {fullest.megabytes:.0f} MB, {fullest.model} on {fullest.cluster}, batch {fullest.global_batch}")
    print(f"beyond {MOST_SECONDS:g} CPU s or {MOST_MB:g} MB: {len(late)}")


if __name__ == "__main__":
    main()
