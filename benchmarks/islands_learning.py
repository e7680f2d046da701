"""What islands learn beside data parallelism, at equal tokens.

    python benchmarks/islands.py learning --steps 200                                  # dp, two and four islands
    python benchmarks/islands.py learning --model 11M --seeds 3 --jobs 9 --json rows.jsonl
    python benchmarks/islands.py learning --model 300M --device cuda --precision bf16 --vocab 512 --together
    python benchmarks/islands.py learning --table rows.jsonl --picture docs/pictures   # as docs/islands.md has it

As the literature compares: all take equally many optimizer steps, and data parallelism's batch is that of all islands
together, so each step sees the same sequences. The loss is that of held-out text with the last weights, which
all islands have in common. Islands are in one process and take turns between rounds, with the engine's own
passes, update, rounding and times of rounds. The text is the source of Python's standard library by bytes. Every case
and seed has a process of its own, `--jobs` at a time, or with `--together` all have one, which compiles once; each
prints a line of JSON.

With `--one-job-steps 256` islands begin after so many steps of data parallelism, as in the literature.

A case is `dp` or a number of islands, and settings that are its own: `--cases "dp; 4; 4 islands.bits=32"`."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from islands_jobs import options_of, rows_of, tell
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import Source, make_source, make_validation_source
from cuboid.islands.wire import decode, encode
from cuboid.model.batch import MicroBatch
from cuboid.parallel.parallelize import Engine, build_engine, draw_weights
from cuboid.spec.islands import BLOCK, fragments_of
from cuboid.spec.run import Run, build_run
from cuboid.training.cuda_graphs import make_passes
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, evaluate, run_passes, start_step

MODELS = {
    "tiny": {"layers": 2, "hidden": 64, "ffn": 176, "heads": 2, "kv_heads": 2},
    "11M": {"layers": 6, "hidden": 384, "ffn": 1024, "heads": 6, "kv_heads": 6},
    "300M": {"layers": 11, "hidden": 1536, "ffn": 4096, "heads": 12, "kv_heads": 12},
}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Of Student's distribution, by number of seeds."""
ISLANDS = str(Path(__file__).with_name("islands.py"))
CURVE = 40
"""Points of a curve of losses."""


def run_of(options: argparse.Namespace, seed: int, count: int, own: list[str]) -> Run:
    """Of which each step takes what one micro-batch has; the batches are put together here."""
    model = {**MODELS[options.model], "family": "llama", "vocab": options.vocab, "rope_theta": 10000.0}
    table = {
        "model": model,
        "layout": f"micro_batch={options.micro_batch}",
        "data": {"source": "python-stdlib", "validation_fraction": 0.02},
        "training": {
            "steps": options.steps,
            "seed": seed,
            "global_batch": options.micro_batch,
            "sequence": options.sequence,
            "precision": options.precision,
            "device": options.device,
        },
        "learning_rate": {"peak": options.peak, "warmup_steps": options.steps // 20},
        "islands": {"count": count, "every": 32, "bits": 8},
    }
    return build_run(table, [*options.set, *own])


class InTurn:
    """Islands that share an engine: what each has of its own is kept while another one trains."""

    def __init__(self, run: Run, islands: int, engine: Engine | None = None) -> None:
        """`engine`: compiled for another case of the same model."""
        self.run, self.spec = run, run.islands
        if engine is None:
            engine = build_engine(run, 0, torch.device(run.training.device))
        else:
            object.__setattr__(engine, "run", run)
            draw_weights(engine)
        self.engine = engine
        self.optimizer = Optimizer(self.engine, run.optimizer)
        self._passes = make_passes(self.engine, self.optimizer, partial(run_passes, self.engine))
        self._loaded = 0
        self._kept: list[list[list[Tensor]]] = [self._state() for _ in range(islands)] if islands > 1 else [[]]
        self.source: Source = make_source(run)

    def _shards(self) -> Iterator[Any]:
        for unit in self.engine.units:
            yield from unit.optimizer_shards()

    def _state(self) -> list[list[Tensor]]:
        return [
            [shard.master.clone(), *(each.clone() for each in self.optimizer.state_of(shard).values())]
            for shard in self._shards()
        ]

    def put_away(self) -> None:
        """Whatever the engine has learned is kept under its island."""
        for shard, kept in zip(self._shards(), self._kept[self._loaded], strict=False):
            for into, tensor in zip(kept, (shard.master, *self.optimizer.state_of(shard).values()), strict=True):
                into.copy_(tensor)

    def take_up(self, island: int, steps: int) -> None:
        self._loaded = island
        for shard, (master, *moments) in zip(self._shards(), self._kept[island], strict=False):
            shard.set_master(master)
            for into, tensor in zip(self.optimizer.state_of(shard).values(), moments, strict=True):
                into.copy_(tensor)
        if self._kept[island]:
            self.optimizer.set_steps_taken(steps)
        for unit in self.engine.units:
            unit.publish()

    def share(self) -> None:
        """All islands begin with what the engine has learned so far."""
        self._kept = [self._state() for _ in self._kept]

    def masters(self, island: int) -> dict[str, Tensor]:
        return {shard.part.name: kept[0] for shard, kept in zip(self._shards(), self._kept[island], strict=True)}

    def train(self, step: int, first: int, count: int) -> PendingStep:
        """A step on so many micro-batches."""
        batches: list[MicroBatch] = []
        for each in range(first, first + count):
            batches += micro_batches(self.source, self.run, each, 0, self.engine.device)
        rate = learning_rate(self.run.learning_rate, step, self.run.training.steps)
        return start_step(self.engine, self.optimizer, batches, rate, passes=self._passes)

    def held_out(self, batches: int) -> float:
        source, _ = make_validation_source(self.run)
        own = (micro_batches(source, self.run, each, 0, self.engine.device) for each in range(batches))
        found = evaluate(self.engine, own)
        assert found is not None
        return found


class Outer:
    """What the islands agree on, as the engine keeps it, on the device."""

    def __init__(self, turns: InTurn, islands: int) -> None:
        self._turns, self._spec, self._count = turns, turns.spec, islands
        self.weights = {name: x.clone() for name, x in turns.masters(0).items()}
        self._momentum = {name: torch.zeros_like(x) for name, x in self.weights.items()}
        self._errors = [{name: torch.zeros_like(x) for name, x in self.weights.items()} for _ in range(islands)]
        self._fragments = [
            [each.name for each in fragment.tensors] for fragment in fragments_of(turns.run.model, turns.spec.fragments)
        ]

    def step(self, round_: int) -> None:
        rate, momentum = self._spec.outer_optimizer(round_)
        for name in self._fragments[self._spec.fragment_of(round_)]:
            outer, mean = self.weights[name], torch.zeros_like(self.weights[name])
            for island in range(self._count):
                moved = outer - self._turns.masters(island)[name] + self._errors[island][name]
                blocks = torch.nn.functional.pad(moved.flatten(), (0, -moved.numel() % BLOCK)).view(-1, BLOCK)
                arrived = decode(encode(blocks, self._spec.bits), self._spec.bits, moved.dtype)
                arrived = arrived.flatten()[: moved.numel()].view_as(moved)
                if self._spec.bits < 16:
                    self._errors[island][name] = moved - arrived
                mean += arrived / self._count
            self._momentum[name].mul_(momentum).add_(mean)
            outer.sub_((self._momentum[name] * momentum).add_(mean), alpha=rate)

    def apply(self, round_: int, at_once: bool) -> None:
        mix = 1.0 if at_once else self._spec.mix
        for name in self._fragments[self._spec.fragment_of(round_)]:
            for island in range(self._count):
                self._turns.masters(island)[name].lerp_(self.weights[name], mix)


def train(
    options: argparse.Namespace, seed: int, case: str, engine: Engine | None = None
) -> tuple[dict[str, Any], Engine]:
    """One case: rows of the same seed have the same first weights and see the same text."""
    word, *own = case.split()
    count = 1 if word == "dp" else int(word)
    run = run_of(options, seed, count, own)
    turns = InTurn(run, count, engine)
    begin = time.perf_counter()
    losses = _as_one_job(turns, options, options.steps) if count == 1 else _islands(turns, options, count)
    if options.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    width = max(1, len(losses) // CURVE)
    row = {
        "case": case,
        "seed": seed,
        "model": options.model,
        "parameters": run.model.parameters,
        "steps": options.steps,
        "batch": options.batch,
        "sequence": options.sequence,
        "tokens": options.steps * options.batch * options.sequence,
        "settings": options.set,
        "peak": run.learning_rate.peak,
        "held_out": turns.held_out(options.evaluate),
        "seconds": round(seconds, 1),
        "curve": [round(statistics.fmean(losses[place : place + width]), 4) for place in range(0, len(losses), width)],
    }
    return row, turns.engine


def _as_one_job(turns: InTurn, options: argparse.Namespace, steps: int) -> list[float]:
    """By data parallelism."""
    whole = options.batch // options.micro_batch
    begun = [turns.train(step, step * whole, whole) for step in range(steps)]
    return [each.result().loss for each in begun]


def _islands(turns: InTurn, options: argparse.Namespace, count: int) -> list[float]:
    """The mean of all islands at each step."""
    spec, steps = turns.spec, options.steps
    own = options.batch // options.micro_batch // count
    losses = [*_as_one_job(turns, options, options.one_job_steps), *[0.0] * (steps - options.one_job_steps)]
    turns.share()
    outer = Outer(turns, count)
    flying: list[int] = []
    done = options.one_job_steps
    while done < steps:
        stop = done + 1
        while (
            stop < steps
            and not spec.rounds_due(stop, steps)
            and not any(spec.applied(each, steps) == stop for each in flying)
        ):
            stop += 1
        for island in range(count):
            turns.take_up(island, done)
            first = [(step * count + island) * own for step in range(done, stop)]
            begun = [turns.train(step, place, own) for step, place in zip(range(done, stop), first, strict=True)]
            for step, each in zip(range(done, stop), begun, strict=True):
                losses[step] += each.result().loss / count
            turns.put_away()
        done = stop
        due = list(spec.rounds_due(done, steps))
        for before in (True, False):
            while flying and spec.applied(flying[0], steps) <= done:
                round_ = flying.pop(0)
                outer.apply(round_, spec.applied(round_, steps) == spec.due(round_, steps))
            for round_ in due if before else ():
                outer.step(round_)
                flying.append(round_)
    turns.take_up(0, steps)
    return losses


# Many cases, and what came of them.


def start(options: argparse.Namespace, cases: list[str]) -> list[dict[str, Any]]:
    jobs = jobs_of(options, cases)
    if options.together:
        return together(options, jobs)
    environment = {"OMP_NUM_THREADS": str(options.threads), **os.environ}

    def one(job: tuple[str, int]) -> dict[str, Any] | None:
        case, seed = job
        command = [sys.executable, ISLANDS, "learning", *options.words, "--one", json.dumps([case, seed])]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = [json.loads(line[4:]) for line in ended.stdout.splitlines() if line.startswith("ROW ")]
        if not found:
            print(f"{case} of seed {seed}: exit code {ended.returncode}\n{ended.stderr[-2000:]}", flush=True)
            return None
        tell(found[0], options.json)
        return dict(found[0])

    with ThreadPoolExecutor(options.jobs) as pool:
        return [row for row in pool.map(one, jobs) if row is not None]


def jobs_of(options: argparse.Namespace, cases: list[str]) -> list[tuple[str, int]]:
    return [(case, seed) for seed in range(options.first_seed, options.first_seed + options.seeds) for case in cases]


def together(options: argparse.Namespace, jobs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    rows, engine = [], None
    for case, seed in jobs:
        row, engine = train(options, seed, case, engine)
        tell(row, options.json)
        rows.append(row)
        gc.collect()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | seeds | held-out loss | over dp, % | by seed |", "|---|---|---|---|---|"]
    plain = {row["seed"]: row["held_out"] for row in rows if row["case"].split()[0] == "dp"}
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["seed"]: row["held_out"] for row in rows if row["case"] == case}
        over = [100 * (own[seed] / plain[seed] - 1) for seed in sorted(own.keys() & plain.keys())]
        mean = f"{statistics.fmean(over):+.2f}" if over else ""
        if len(over) in T_95:
            mean += f" ± {T_95[len(over)] * statistics.stdev(over) / math.sqrt(len(over)):.2f}"
        by_seed = ", ".join(f"{each:+.2f}" for each in over)
        lines.append(f"| {case} | {len(own)} | {statistics.fmean(own.values()):.4f} | {mean} | {by_seed} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Losses of training over steps, a line for each case and seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row["model"] for row in rows):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        some = [row for row in rows if row["model"] == model]
        for place, case in enumerate(dict.fromkeys(row["case"] for row in some)):
            for number, row in enumerate(row for row in some if row["case"] == case):
                width = row["steps"] / len(row["curve"])
                steps = [(each + 0.5) * width for each in range(len(row["curve"]))]
                label = case if number == 0 else None
                axes.plot(steps, row["curve"], color=f"C{place}", linewidth=1, label=label)
        axes.set(xlabel="step", ylabel="loss", yscale="log", title=f"{model}, interval 32, 8 bits")
        axes.legend()
        axes.grid(alpha=0.3, which="both")
        figure.tight_layout()
        figure.savefig(folder / f"islands-{model}.svg")
        pyplot.close(figure)


def main(words: list[str]) -> None:
    numbers = {"steps": 200, "batch": 16, "micro-batch": 4, "sequence": 128, "vocab": 320, "peak": 1e-3}
    numbers |= {"seeds": 1, "first-seed": 0, "jobs": 1, "threads": 1, "evaluate": 64, "one-job-steps": 0}
    parser = options_of(__doc__, numbers)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--cases", default="dp; 2; 4")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--picture", help="draw the curves into this folder")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.words = words
    if options.one:
        case, seed = json.loads(options.one)
        print("ROW " + json.dumps(train(options, seed, case)[0]), flush=True)
        return
    if options.table:
        rows = rows_of(options.table)
    else:
        rows = start(options, [each.strip() for each in options.cases.split(";")])
    print(table(rows))
    if options.picture:
        draw(rows, Path(options.picture))
