"""The best learning rate at several widths, by recipe of `model.initialization`: mup keeps it, others move it.

    python benchmarks/learning_rates.py                                           # widths 256 and 1,024 on a CPU
    python benchmarks/learning_rates.py --widths 256 1024 4096 --seeds 2 --margin 2 --device cuda --precision bf16
    python benchmarks/learning_rates.py --json --picture rates.svg                # every mean; curves as a picture

A Llama of two layers with heads of 64 numbers, on the source of Python's standard library by bytes. Learning rates are
powers of two. The search starts from a guess and measures outwards until there are `--margin` rates on both sides of
the best; a rate's loss is the mean over the last steps and over seeds, and all rates see the same batches."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import start_step

Losses = dict[int, float]
"""Exponent of two of a learning rate -> loss."""
GUESS = -9
HEAD_DIM = 64
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def make_run(options: argparse.Namespace, recipe: str, width: int, exponent: int, seed: int) -> Run:
    heads = width // HEAD_DIM
    return build_run(
        {
            "model": {
                "name": f"{recipe}-{width}",
                "hidden": width,
                "layers": options.layers,
                "heads": heads,
                "kv_heads": math.gcd(heads, 4),
                "ffn": width,
                "vocab": 259,
                "initialization": recipe,
            },
            "layout": f"micro_batch={options.batch}",
            "training": {
                "steps": options.steps,
                "global_batch": options.batch,
                "sequence": options.sequence,
                "seed": seed,
                "precision": options.precision,
                "device": options.device,
                "compile": "off",  # dozens of short runs, and each would compile anew
            },
            "learning_rate": {"peak": 2.0**exponent, "schedule": "constant", "warmup_steps": options.warmup},
        }
    )


def mean_loss(options: argparse.Namespace, recipe: str, width: int, exponent: int, seed: int) -> float:
    """Over the last steps; infinite where it diverged."""
    return loss_of_last(make_run(options, recipe, width, exponent, seed), options)


def loss_of_last(run: Run, options: argparse.Namespace) -> float:
    """The mean over the last steps of a run; infinite where it diverged."""
    device = torch.device(options.device)
    engine = build_engine(run, 0, device)
    optimizer, source = Optimizer(engine, run.optimizer), make_source(run)
    losses = []
    for step in range(options.steps):
        rate = learning_rate(run.learning_rate, step, options.steps)
        pending = start_step(engine, optimizer, micro_batches(source, run, step, 0, device), rate)
        if step >= options.steps - options.last:
            losses.append(pending)
    mean = statistics.fmean(pending.result().loss for pending in losses)
    return mean if math.isfinite(mean) else math.inf


def sweep(options: argparse.Namespace, recipe: str, width: int, guess: int) -> Losses:
    """From the guess outwards, until the best rate has enough others on both sides."""
    found: Losses = {}
    wanted = {guess}
    while wanted:
        for exponent in sorted(wanted):
            runs = [mean_loss(options, recipe, width, exponent, seed) for seed in range(options.seeds)]
            found[exponent] = statistics.fmean(runs)
            if not options.json:
                print(f"  {recipe} {width}  2^{exponent}  {found[exponent]:.3f}", flush=True)
        best = best_of(found)
        wanted = {best + offset for offset in range(-options.margin, options.margin + 1)} - found.keys()
    return found


def best_of(losses: Losses) -> int:
    return min(losses, key=lambda exponent: losses[exponent])


def table(found: dict[tuple[str, int], Losses]) -> str:
    exponents = sorted({exponent for losses in found.values() for exponent in losses})
    lines = [
        "| recipe | width | best | " + " | ".join(f"2^{exponent}" for exponent in exponents) + " |",
        "|---|---|---|" + "---|" * len(exponents),
    ]
    for (recipe, width), losses in found.items():
        best = best_of(losses)
        cells = [f"{losses[exponent]:.3f}" if exponent in losses else "" for exponent in exponents]
        cells = [f"**{cell}**" if exponent == best else cell for exponent, cell in zip(exponents, cells, strict=True)]
        lines.append(f"| {recipe} | {width:,} | 2^{best} = {2.0**best:.1e} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: dict[tuple[str, int], Losses]) -> Iterable[str]:
    for recipe in dict.fromkeys(recipe for recipe, _ in found):
        best = {width: best_of(losses) for (name, width), losses in found.items() if name == recipe}
        spread = max(best.values()) - min(best.values())
        yield f"{recipe}: the best learning rates of widths {', '.join(map(str, best))} lie a factor {2**spread} apart"


def picture(found: dict[tuple[str, int], Losses], path: Path) -> None:
    """One panel for each recipe, one curve for each width."""
    recipes = list(dict.fromkeys(recipe for recipe, _ in found))
    widths = list(dict.fromkeys(width for _, width in found))
    exponents = sorted({exponent for losses in found.values() for exponent in losses})
    finite = [loss for losses in found.values() for loss in losses.values() if math.isfinite(loss)]
    low, high = min(finite), min(max(finite), 1.5 * min(finite))
    panel, height = 320, 260

    def place(number: int, exponent: int, loss: float) -> tuple[float, float]:
        across = (exponent - exponents[0]) / max(1, exponents[-1] - exponents[0])
        return 50 + number * panel + across * (panel - 70), height - 40 - (loss - low) / (high - low) * (height - 80)

    parts = []
    for number, recipe in enumerate(recipes):
        parts.append(f'<text x="{50 + number * panel}" y="20" font-weight="bold">{recipe}</text>')
        for exponent in exponents[::2]:
            x, _ = place(number, exponent, low)
            parts.append(f'<text x="{x:.0f}" y="{height - 15}" text-anchor="middle">2^{exponent}</text>')
        for loss in (low, (low + high) / 2, high):
            _, y = place(number, exponents[0], loss)
            parts.append(f'<text x="{44 + number * panel}" y="{y:.0f}" text-anchor="end">{loss:.2f}</text>')
        for colour, width in zip(itertools.cycle(COLOURS), widths, strict=False):
            losses = found.get((recipe, width), {})
            points = [place(number, exponent, loss) for exponent, loss in sorted(losses.items()) if loss <= high]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            x, y = place(number, best_of(losses), min(losses.values()))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    for row, (colour, width) in enumerate(zip(itertools.cycle(COLOURS), widths, strict=False)):
        parts.append(f'<text x="{60 + 60 * row}" y="38" fill="{colour}">{width:,}</text>')
    size = f'width="{panel * len(recipes) + 20}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="multiples of 64")
    parser.add_argument("--recipes", nargs="+", default=["mup", "megatron"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--last", type=int, default=20, help="steps whose mean counts")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--margin", type=int, default=1, help="rates measured on both sides of the best")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    found: dict[tuple[str, int], Losses] = {}
    for recipe in options.recipes:
        guess = GUESS
        for width in options.widths:
            found[recipe, width] = sweep(options, recipe, width, guess)
            guess = best_of(found[recipe, width])
    if options.picture:
        picture(found, options.picture)
    if options.json:
        rows = [
            {"recipe": recipe, "width": width, "best": 2.0 ** best_of(losses), "losses": losses}
            for (recipe, width), losses in found.items()
        ]
        print(json.dumps(rows))
        return
    print(table(found))
    print(*verdicts(found), f"{time.monotonic() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
