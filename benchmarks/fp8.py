"""Training in fp8 beside bf16 on one GPU, on real text: speed, memory, and the curves of the loss.

    python benchmarks/fp8.py                                    # Llama 3 8B with 16 layers, 1 x 8192 tokens, 200 steps
    python benchmarks/fp8.py --shape tiny --steps 20            # on a CPU
    python benchmarks/fp8.py --kernels 25 --picture folder      # where the time goes; curves as folder/fp8.svg
    python benchmarks/fp8.py --shape 125M --sequence 1024 --micro-batch 4 --steps 300 --seeds 2 --together --last 50 \
        --precisions bf16,fp8-tensor,fp8-block                  # only losses: all of them side by side
    python benchmarks/fp8.py --shape qwen3-30b-a3b-4L --sequence 4096 --micro-batch 4 --steps 40 \
        --precisions bf16,fp8-block,fp8-experts                 # what fp8 for routed experts adds

The text is Python's own: its manual's topics and the sources of its standard library, in tokens of a vocabulary made of
it. Every precision has a process of its own and sees the same batches in the same order from the same initial weights.
Prints a line of JSON for each precision, and one that compares them: losses step by step with bf16 of the same seed."""

from __future__ import annotations

import argparse
import itertools
import json
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from h200 import SHAPES as GPU_SHAPES
from h200 import VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cuboid.data.build import BuildRequest, build
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, start_step

SHAPES = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 4096},
    **{name: {**shape, "vocab": VOCABULARY} for name, shape in GPU_SHAPES.items()},
    "125M": {**GPU_SHAPES["125M"], "vocab": 16384},
    "tiny-mixture": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 4096},
    "qwen3-30b-a3b-4L": {"vocab": 151936},
}
"""What a shape leaves out is that of its model in the catalog."""
MIXTURE = {"experts": 8, "top_k": 2, "expert_ffn": 64}
PRECISIONS = {
    "bf16": ["training.precision=bf16"],
    "fp8-tensor": ["training.precision=fp8", "training.fp8_scaling=tensor"],
    "fp8-row": ["training.precision=fp8", "training.fp8_scaling=row"],
    "fp8-block": ["training.precision=fp8", "training.fp8_scaling=block"],
    "fp8-experts": ["training.precision=fp8", "training.fp8_scaling=block", "training.fp8_experts=true"],
}
DENSE = "bf16,fp8-tensor,fp8-row,fp8-block"
COLOURS = dict(zip(PRECISIONS, ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"), strict=True))


def real_text(folder: Path, megabytes: float, vocabulary: int) -> str:
    """A store of documents in a vocabulary of their own."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    texts = list(pydoc_data.topics.topics.values())
    left = int(megabytes * 1e6)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 500 < len(text) < left:
            texts.append(text)
            left -= len(text)
    random.Random(0).shuffle(texts)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    words.train_from_iterator(texts, trainer)
    words.save(str(folder / "tokenizer.json"))
    store = folder / "store"
    build(BuildRequest(sources=(str(folder / "text.jsonl"),), output=store, tokenizer=str(folder / "tokenizer.json")))
    return str(store)


def make_run(options: argparse.Namespace, precision: str, store: str) -> Run:
    tiny, name = options.shape.startswith("tiny"), options.shape.removesuffix("-4L")
    sequence = options.sequence or (128 if tiny else 8192)
    model: dict[str, Any] | str = {**SHAPES[options.shape], "family": "llama", "rope_theta": 500000.0}
    if options.shape == "tiny-mixture":
        model = {**SHAPES[options.shape], "family": "mixtral", "mixture": MIXTURE}
    cut = []
    if name != options.shape:
        model, cut = name, ["model.layers=4"]
    return build_run(
        {
            "model": model,
            "layout": f"micro_batch={options.micro_batch}",
            "training": {
                "steps": options.steps,
                "global_batch": options.micro_batch * options.micro_batches,
                "sequence": sequence,
                "seed": options.seed,
            },
            "learning_rate": {"peak": options.rate, "warmup_steps": max(1, options.steps // 10)},
            "data": {"source": store},
        },
        [*cut, *PRECISIONS[precision], *options.set],
    )


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    steps = run.training.steps
    ends: list[float] = []
    losses: list[float] = []
    norms: list[float] = []
    before: PendingStep | None = None
    for step in range(steps):  # as the trainer does: one step is started while the one before computes
        rate = learning_rate(run.learning_rate, step, steps)
        now = start_step(engine, optimizer, micro_batches(source, run, step, 0, device), rate)
        for pending in [before] * (before is not None) + [now] * (step + 1 == steps):
            assert pending is not None
            result = pending.result()
            losses.append(result.loss)
            norms.append(result.gradient_norm)
        before = now
        ends.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(ends[steps // 2 :])][:-1]
    tokens = run.training.global_batch * run.training.sequence
    row = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "milliseconds": 1e3 * statistics.median(seconds),
        "compiled": engine.compiled,
        "losses": {step: round(losses[step], 4) for step in [*range(0, steps, 10), steps - 1]},
        "last_losses": statistics.mean(losses[-options.last :]),
        "largest_gradient_norm": max(norms[steps // 10 :]),
        "every_loss": [round(loss, 4) for loss in losses],
    }
    if device.type == "cuda":
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        if options.kernels:
            row["kernels"] = kernels(lambda: start_step(engine, optimizer, micro_batches(source, run, 0, 0, device), 0))
            row["kernels"] = row["kernels"][: options.kernels]
    return row


def kernels(step: Any, steps: int = 3) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of each kernel in a step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times = [
        (event.key[:120], round(event.self_device_time_total / 1e3 / steps, 3), event.count // steps)
        for event in profile.key_averages()
    ]
    return sorted(times, key=lambda row: -row[1])


def draw(rows: dict[str, dict[str, Any]], path: Path, title: str) -> None:
    """The curves, as smooth as a mean over five steps makes them."""
    curves = {}
    for name, row in rows.items():
        losses = row["every_loss"]
        curves[name] = [statistics.mean(losses[max(0, step - 4) : step + 1]) for step in range(len(losses))]
    steps = max(len(curve) for curve in curves.values())
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    width, height, left, top = 720, 360, 50, 30

    def place(step: int, loss: float) -> str:
        return f"{left + step / max(1, steps - 1) * width:.1f},{top + (high - loss) / (high - low) * height:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 80} {height + 80}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="{left}" y="18">{title}</text>'
    ]
    for index in range(6):
        loss = low + (high - low) * index / 5
        y = top + (high - loss) / (high - low) * height
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y + 4:.1f}">{loss:.2f}</text>')
        step = (steps - 1) * index // 5
        parts.append(f'<text x="{left + width * index / 5 - 8:.1f}" y="{top + height + 18}">{step}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        points = " ".join(place(step, loss) for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        text = f"{name} {rows[name]['last_losses']:.4f}"
        parts.append(f'<text x="{left + width - 150}" y="{top + 20 + 16 * index}" fill="{COLOURS[name]}">{text}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>\n"]))


def begin(precision: str, seed: int, store: str) -> subprocess.Popen[str]:
    """A precision in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", precision, "--store", store, "--seed", str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    lines = process.communicate()[0].strip().splitlines()
    if process.returncode or not lines:
        return {"failed": f"exit code {process.returncode}"}
    return dict(json.loads(lines[-1]))


def compare(rows: dict[tuple[str, int], dict[str, Any]], last: int) -> dict[str, Any]:
    """Each precision with bf16 of the same seed: times its speed, and differences of losses over the last steps."""
    found: dict[str, dict[str, Any]] = {}
    for (precision, seed), row in rows.items():
        base = rows.get(("bf16", seed))
        if base is None or precision == "bf16":
            continue
        pairs = zip(row["every_loss"][-last:], base["every_loss"][-last:], strict=True)
        apart = [one - other for one, other in pairs]
        entry = found.setdefault(precision, {"speed": [], "difference": [], "absolute": []})
        entry["speed"].append(row["tokens_per_second"] / base["tokens_per_second"])
        entry["difference"].append(statistics.mean(apart))
        entry["absolute"].append(statistics.mean(map(abs, apart)))
    return {
        name: {key: round(statistics.mean(each), 5) for key, each in entry.items()}
        | {"differences": [round(each, 5) for each in entry["difference"]]}
        for name, entry in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default=DENSE, help=f"commas between them, of {', '.join(PRECISIONS)}")
    parser.add_argument("--shape", choices=SHAPES, default="8B-16L")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence", type=int, default=0, help="tokens; left out: 8192, or 128 of the tiny shape")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-4, help="the highest learning rate")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of text")
    parser.add_argument("--seeds", type=int, default=1, help="of weights and order, each with every precision")
    parser.add_argument(
        "--together", action="store_true", help="those of a seed side by side on the GPU: speeds mean nothing"
    )
    parser.add_argument("--last", type=int, default=10, help="steps at the end whose losses are compared")
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to list, the longest first")
    parser.add_argument("--picture", type=Path, help="a folder for fp8.svg")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(make_run(options, options.one, options.store), options)))
        return
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = real_text(Path(folder), options.megabytes, min(16384, SHAPES[options.shape]["vocab"]))
        for seed in range(options.seeds):
            cases = [(name, seed) for name in options.precisions.split(",")]
            begun = {case: begin(*case, store) for case in cases} if options.together else {}
            for case in cases:
                row = end(begun.get(case) or begin(*case, store))
                shown = {key: value for key, value in row.items() if key != "every_loss"}
                print(json.dumps({"precision": case[0], "seed": seed, "shape": options.shape, **shown}), flush=True)
                if "failed" not in row:
                    rows[case] = row
            if options.seeds > 1:
                print(json.dumps({"so_far": compare(rows, options.last)}), flush=True)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({**compare(rows, options.last), "device": where, "torch": torch.__version__}))
    if options.picture and rows:
        title = f"Loss of {options.shape}, {options.steps} steps, mean of five; right: of the last {options.last}"
        draw({name: row for (name, seed), row in rows.items() if seed == 0}, options.picture / "fp8.svg", title)


if __name__ == "__main__":
    main()
