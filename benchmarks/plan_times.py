"""CPU seconds and memory of `cuboid plan`, imports included, for every model of the catalog from 8 to 98,304
accelerators, and which questions take more than 2 seconds or 500 MB:
`python benchmarks/plan_times.py [--models deepseek-v3,gpt2] [--accelerator h100] [--objective cost] [--json]`.
`--beside FOLDER`: each question is asked of that checkout too, right after, because seconds of the processor depend on
what else the machine does; answers that differ are named.

    python benchmarks/plan_times.py --claims       # three questions with their limits

`--claims`: nine groups (three kinds of 512 in three zones, with prices), 100,000 accelerators, llama3-405b on 16,384.
Each question is a process of its own. A question without an answer ("too small") counts like any other.
"""

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import cuboid
from cuboid.spec.load import catalog_models
from cuboid.spec.model import load_model

SIZES = (8, 64, 1000, 16384, 98304)
MOST_SECONDS, MOST_MB = 2.0, 500.0
HERE = Path(cuboid.__file__).parent.parent


@dataclass(frozen=True)
class Taken:
    """What one answer took."""

    model: str
    cluster: str
    global_batch: int
    seconds: float
    """Of the processor, in user and system mode, of all processes."""
    waited: float
    """Seconds by the clock."""
    megabytes: float
    """Most that the process held."""
    answered: bool
    answer: bytes
    before: float = 0.0
    """Seconds of the other checkout."""

    @property
    def line(self) -> str:
        """For a reader."""
        beside = f" ({self.before:.2f} beside)" if self.before else ""
        took = f"{self.seconds:.2f} CPU s{beside}, {self.megabytes:.0f} MB"
        return f"{took}: {self.model} on {self.cluster}, batch {self.global_batch}"


def ask(folder: Path, model: str, cluster: str, global_batch: int, options: list[str]) -> Taken:
    """One question in a process of its own."""
    given = [model, cluster, "--global-batch", str(global_batch), *options, "--json"]
    command = [sys.executable, "-m", "cuboid.cli.main", "plan", *given]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        answer = process.stdout.read() if process.stdout else b""
        _, status, usage = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
    if code not in (0, 2):
        raise SystemExit(f"cuboid plan {' '.join(given)} ended with {code}")
    seconds = usage.ru_utime + usage.ru_stime
    waited = time.perf_counter() - begin
    return Taken(model, cluster, global_batch, seconds, waited, usage.ru_maxrss / 1024, code == 0, answer)


KINDS = {"h100": (3.0, 1.5), "a100": (1.8, 0.8), "l40s": (1.0, 0.4)}
"""Of accelerators: prices on demand and spot."""
ZONES = ("us", "eu", "asia")


def nine_groups() -> str:
    """A cluster file of three kinds × 512 in three zones."""
    lines = []
    for zone in ZONES:
        for kind, (price, spot) in KINDS.items():
            lines += ["[[groups]]", f'name = "{zone}-{kind}"', f'site = "{zone}"', f'accelerator = "{kind}"']
            lines += ["nodes = 64", f"price = {price}", f"spot_price = {spot}", "life_hours = 40"]
    for first, second in combinations_with_replacement(ZONES, 2):
        rate, latency = (400, 0.1) if first == second else (10, 60)
        lines += ["[[links]]", f'between = ["{first}", "{second}"]']
        lines += [f"bandwidth_gbit = {rate}", f"latency_ms = {latency}"]
    return "\n".join(lines) + "\n"


def claims() -> None:
    """The questions that have limits of their own, in seconds by the clock."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nine.toml"
        path.write_text(nine_groups())
        sequence = ["--seq", "8192"]
        cost = [*sequence, "--tokens", "1e12", "--objective", "cost"]
        questions: list[tuple[float, str, str, int, list[str]]] = [
            (5.0, "llama3-8b", str(path), 2048, sequence),
            (5.0, "llama3-8b", str(path), 2048, cost),
            (3.0, "llama3-70b", "h100x100000", 4000, sequence),
            (2.0, "llama3-405b", "h100x16384", 2048, sequence),
        ]
        for limit, model, cluster, batch, given in questions:
            taken = ask(HERE, model, cluster, batch, given)
            print(f"at most {limit:g} s: {taken.waited:.2f} s, {taken.line}, {' '.join(given)}", flush=True)


def main() -> None:
    """Asks, and prints the worst and all that take too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names with commas between them; default: all of the catalog")
    parser.add_argument("--accelerator", default="h100")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--objective", default="time", choices=("time", "cost", "memory", "gpus"))
    parser.add_argument("--beside", type=Path, help="another checkout to ask the same")
    parser.add_argument("--json", action="store_true", help="print every question as a line of JSON")
    parser.add_argument("--claims", action="store_true", help="only the questions that have limits of their own")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else list(catalog_models())
    folders = [HERE, *([options.beside.resolve()] if options.beside else [])]
    for folder in folders:  # an installed program is compiled
        compileall.compile_dir(folder / "cuboid", quiet=2)
    if options.claims:
        claims()
        return
    found, different = [], []
    for name in names:
        model = load_model(name)
        sequence = min(4096, model.max_positions) if model.positions == "learned" else 4096
        for size in map(int, options.sizes.split(",")):
            even = 1024 if size < 1000 else size if size <= 16384 else 15360
            for global_batch in sorted({1024, even}):
                given = ["--seq", str(sequence), "--objective", options.objective]
                given += ["--tokens", "3e11", "--deadline", "30"] if options.objective == "gpus" else []
                cluster = f"{options.accelerator}x{size}"
                taken, *others = (ask(folder, name, cluster, global_batch, given) for folder in folders)
                if others:
                    different += [taken] if others[0].answer != taken.answer else []
                    taken = Taken(**{**vars(taken), "before": others[0].seconds})
                found.append(taken)
                if options.json:
                    print(json.dumps({**asdict(taken), "answer": len(taken.answer)}), flush=True)
    late = sorted((each for each in found if each.seconds > MOST_SECONDS), key=lambda each: -each.seconds)
    full = [each for each in found if each.megabytes > MOST_MB]
    print(f"{len(found)} questions of {len(names)} models, {sum(each.answered for each in found)} with an answer")
    print(f"all: {sum(each.seconds for each in found):.0f} CPU s", end="")
    print(f", {sum(each.before for each in found):.0f} beside" if options.beside else "")
    print(f"slowest: {max(found, key=lambda each: each.seconds).line}")
    print(f"fullest: {max(found, key=lambda each: each.megabytes).line}")
    for title, those in ((f"{MOST_SECONDS:g} CPU s", late), (f"{MOST_MB:g} MB", full), ("answers differ", different)):
        print(f"{'beyond ' if those is not different else ''}{title}: {len(those)}")
        for each in those:
            print(f"  {each.line}")


if __name__ == "__main__":
    main()
