"""How Cuboid's defaults learn beside torchtitan's, in one run on one GPU: the same text, the same batches of tokens,
the same optimizer settings and learning rates, several seeds.

    python benchmarks/learning.py --peer .peers/vendor --json results.jsonl           # three shapes, three seeds
    python benchmarks/learning.py 1B --steps 600 --seeds 1 --rate 8e-4 --warmup 200   # Cuboid alone
    python benchmarks/learning.py tiny --steps 40 --device cpu                        # where there is no GPU
    python benchmarks/learning.py --table results.jsonl --picture docs/pictures       # as docs/learning.md has it

The text is the source of Python's standard library by bytes; every seed reads another part of it and draws other
weights. `--set name=value` changes Cuboid's side (a recipe of initialisation, balancing); `--even` gives every expert
the same number of tokens on both sides, which makes speeds comparable. Each side of a case has a process of its own.
A line of JSON for each case, side and seed; then a table: mean loss of steps 100 to 150 (of the last 50 where there are
fewer, or more than 200) with the 95 % interval over seeds, the busiest expert of the last steps over the mean one,
tokens/s. Then the difference of the two sides, seed by seed."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from h200 import SHAPES
from torch import Tensor

if TYPE_CHECKING:
    from cuboid.parallel.parallelize import Engine

CASES: dict[str, tuple[dict[str, Any] | str, list[str], int, int]] = {
    "tiny": ("tiny-llama", [], 4, 128),
    "tiny-qwen3-moe": ("tiny-qwen3-moe", [], 4, 128),
    "1B": ({**SHAPES["1B"], "family": "llama", "vocab": 128256, "rope_theta": 500000.0}, [], 1, 8192),
    "8B-16L": ({**SHAPES["8B-16L"], "family": "llama", "vocab": 128256, "rope_theta": 500000.0}, [], 1, 8192),
    "qwen3-30b-a3b-8L": ("qwen3-30b-a3b", ["model.layers=8"], 2, 4096),
    "deepseek-v3-4L": (
        "deepseek-v3",
        ["model.layers=4", "model.mixture.first_dense_layers=1", "model.mixture.experts=32"],
        2,
        4096,
    ),
}
"""What is trained, what is changed of it, sequences and length of a step."""
DEFAULT = ("1B", "8B-16L", "qwen3-30b-a3b-8L")
SEPARATOR = 256
LAST = 50
SIDES = ("peer", "cuboid")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Of Student's distribution, by number of seeds."""


def text(tokens: int) -> Tensor:
    """So many bytes of the standard library's sources, file after file in an order that is always the same."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    read = bytearray()
    separators = []
    for path in files:
        read += path.read_bytes()
        separators.append(len(read))
        read += b"\n"
        if len(read) >= tokens:
            break
    assert len(read) >= tokens, f"{len(read):,} bytes of text for {tokens:,} tokens; use fewer steps or seeds"
    found = torch.frombuffer(read, dtype=torch.uint8).to(torch.int64)
    found[separators] = SEPARATOR
    return found[:tokens]


def make_batches(case: str, steps: int, seeds: int) -> Tensor:
    """(steps of all seeds, sequences, length + 1)"""
    _, _, sequences, length = CASES[case]
    shape = (seeds * steps, sequences, length + 1)
    return text(math.prod(shape)).view(shape)


def rates_of(options: argparse.Namespace) -> list[float]:
    """A rise, and then either the peak for good or, as torchtitan's default has it, a line to zero."""
    steps, warmup = options.steps, options.warmup
    fall = (lambda step: (steps - step) / (steps - warmup)) if options.decay else (lambda step: 1.0)
    return [options.rate * min((step + 1) / warmup, 1.0 if step < warmup else fall(step)) for step in range(steps)]


def train(
    case: str,
    options: argparse.Namespace,
    batches: Tensor,
    rates: Sequence[float],
    report: Callable[[dict[str, Any]], None],
) -> None:
    from cuboid.parallel.parallelize import build_engine, draw_weights
    from cuboid.spec.run import build_run

    model, changes, sequences, length = CASES[case]
    device = torch.device(options.device)
    table = {
        "model": model,
        "layout": f"micro_batch={sequences}",
        "training": {
            "global_batch": sequences,
            "sequence": length,
            "precision": "bf16" if options.device == "cuda" else "float32",
            "device": options.device,
        },
    }
    if options.even:
        _even_loads()
    engine = None
    for number in range(options.first_seed, options.seeds):
        run = build_run(table, [*changes, f"training.seed={number}", *options.set])
        if engine is None:
            engine = build_engine(run, 0, device)
        else:
            object.__setattr__(engine, "run", run)  # compiled once for all seeds
            draw_weights(engine)
            if engine.balance is not None:
                engine.balance.restore([], 0)
        report({"seed": number, **_train_seed(engine, batches[number * len(rates) :], rates)})
        gc.collect()  # the optimizer's states and CUDA graphs, before the next seed makes its own


def _train_seed(engine: Engine, batches: Tensor, rates: Sequence[float]) -> dict[str, Any]:
    from cuboid.model.batch import MicroBatch
    from cuboid.training.cuda_graphs import make_passes
    from cuboid.training.optimizer import Optimizer
    from cuboid.training.step import PendingStep, run_passes, start_step

    run, device = engine.run, engine.device
    steps, settled = len(rates), _settled(len(rates))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    optimizer = Optimizer(engine, run.optimizer)
    passes = make_passes(engine, optimizer, partial(run_passes, engine))
    begun: list[PendingStep] = []
    results = []
    begin = 0.0
    for step, rate in enumerate(rates):
        if step == settled:
            wait()
            begin = time.perf_counter()
        both = batches[step].to(device)
        batch = MicroBatch(both[:, :-1].contiguous(), both[:, 1:].contiguous())
        begun.append(start_step(engine, optimizer, [batch], rate, passes=passes))
        if step:
            results.append(begun[-2].result())
    results.append(begun[-1].result())
    wait()
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "tokens_per_second": run.training.global_batch * run.training.sequence * (steps - settled) / seconds,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0,
    }
    if run.model.mixture is not None:
        routers = [result.routers for result in results if result.routers is not None]
        asked = torch.stack(routers)[..., : run.model.mixture.experts]
        row["busiest"] = (asked.amax(-1) / asked.mean(-1)).tolist()
        row["dead"] = int((asked[-50:].sum(0) == 0).sum())
    return row


def _even_loads() -> None:
    """Every expert the same number of tokens, as torchtitan's `--debug.moe_force_load_balance` does."""
    from cuboid.model.router import Router

    def choose(router: Router, scores: Tensor) -> Tensor:
        tokens, top_k = scores.shape[0], router.mixture.top_k
        return (torch.arange(tokens * top_k, device=scores.device) % router.mixture.experts).view(tokens, top_k)

    Router.choose = choose  # type: ignore[method-assign]


def _settled(steps: int) -> int:
    """The first step whose time counts."""
    return min(steps // 2, 50)


def run_side(case: str, side: str, options: argparse.Namespace) -> None:
    """In a process of its own: a line of JSON for each seed."""
    rates = rates_of(options)

    def report(row: dict[str, Any]) -> None:
        print("ROW " + json.dumps({"case": case, "side": side, **row}), flush=True)

    batches = make_batches(case, len(rates), options.seeds)
    if side == "peer":
        sys.path.insert(0, options.peer)
        import learning_peer

        sequence = CASES[case][3]
        settled = _settled(len(rates))
        seeds = range(options.first_seed, options.seeds)
        learning_peer.train(case, batches, seeds, rates, sequence, settled, options.even, report)
        sys.stdout.flush()
        os._exit(0)  # the peer's threads would keep the process
    train(case, options, batches, rates, report)


def judged(row: dict[str, Any]) -> float:
    """The loss that is compared: of steps 100 to 150 in a run of 150 or 200 steps, of the last 50 in a longer one."""
    losses = row["losses"]
    return statistics.mean(losses[100:150] if 150 <= len(losses) <= 200 else losses[-LAST:])


def difference(rows: list[dict[str, Any]], case: str) -> str:
    """Cuboid's loss less the peer's, seed by seed: both sides of a seed see the same batches."""
    sides = {side: {row["seed"]: row for row in rows if (row["case"], row["side"]) == (case, side)} for side in SIDES}
    seeds = sides["peer"].keys() & sides["cuboid"].keys()
    if not seeds:
        return ""
    found = [judged(sides["cuboid"][seed]) - judged(sides["peer"][seed]) for seed in sorted(seeds)]
    spread = f" ± {interval(found):.3f} (95 %)" if len(found) > 1 else ""
    seeds_text = ", ".join(f"{each:+.3f}" for each in found)
    return f"{case}: Cuboid's loss less torchtitan's {statistics.mean(found):+.3f}{spread}; by seed {seeds_text}"


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) in T_95 else math.nan


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | side | seeds | first loss | worst of the first 10 | loss | busiest expert, "
        "worst layer, last 10 steps | dead experts | tokens/s | GiB reserved |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        for side in SIDES:
            some = [row for row in rows if (row["case"], row["side"]) == (case, side)]
            if not some:
                continue
            lasts = [judged(row) for row in some]
            spread = f" ± {interval(lasts):.3f}" if len(lasts) > 1 else ""
            busiest = max((max(map(max, row["busiest"][-10:])) for row in some if row.get("busiest")), default=None)
            cells = [
                case,
                "torchtitan" if side == "peer" else "Cuboid",
                str(len(some)),
                f"{statistics.mean(row['losses'][0] for row in some):.2f}",
                f"{max(max(row['losses'][:10]) for row in some):.2f}",
                f"{statistics.mean(lasts):.3f}{spread}",
                "" if busiest is None else f"{busiest:.1f}",
                "" if busiest is None else str(max(row["dead"] for row in some)),
                f"{statistics.median(row['tokens_per_second'] for row in some):,.0f}",
                f"{max(row['reserved_gib'] for row in some):.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """One picture for each case: the loss of every seed, smoothed over ten steps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    for case in dict.fromkeys(row["case"] for row in rows):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for side, colour, name in (("peer", "#d95f02", "torchtitan"), ("cuboid", "#1b6ca8", "Cuboid")):
            for number, row in enumerate(row for row in rows if (row["case"], row["side"]) == (case, side)):
                losses = row["losses"]
                smooth = [statistics.mean(losses[max(0, step - 9) : step + 1]) for step in range(len(losses))]
                axes.plot(smooth, color=colour, linewidth=1.2, label=name if number == 0 else None)
        axes.set(xlabel="step", ylabel="loss, mean of ten steps", title=case)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(folder / f"learning-{case}.svg")
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="of those that are trained; each keeps its text")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--decay", action="store_true", help="fall to zero in a line after the warm-up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--peer", help="folder with torchtitan and what it imports")
    parser.add_argument("--json", help="append every row to this file")
    parser.add_argument("--table", help="print the table of this file, train nothing")
    parser.add_argument("--picture", help="draw the curves into this folder")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.cases[0], options.side, options)
        return
    if options.table:
        rows = [json.loads(line) for line in Path(options.table).read_text().splitlines()]
    else:
        rows = []
        for case in options.cases or DEFAULT:
            for side in ["peer"] * bool(options.peer) + ["cuboid"]:
                rows += _start(case, side, options)
    print(table(rows))
    print(*filter(None, (difference(rows, case) for case in dict.fromkeys(row["case"] for row in rows))), sep="\n")
    if options.picture:
        draw(rows, Path(options.picture))


def _start(case: str, side: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    words = [word for word in sys.argv[1:] if word not in (options.cases or [])]
    command = [sys.executable, __file__, case, "--side", side, *words]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    rows = [json.loads(line[4:]) for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    if len(rows) < options.seeds - options.first_seed:
        print(f"{case} {side}: exit code {ended.returncode}\n" + "\n".join(ended.stdout.splitlines()[-25:]))
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    main()
