"""What keeping documents apart costs, and what assigning them to replicas by their work gains.

    python benchmarks/packing.py gpu                     1B × 2 × 8,192 on one GPU: steps plain and with documents
    python benchmarks/packing.py gpu --shape 8B-16L --micro-batch 1
    python benchmarks/packing.py kernels                 attention alone, forward and backward
    python benchmarks/packing.py cpu                     sequences assigned in order and by work, four ranks
    python benchmarks/packing.py gpu --shape tiny --sequence 256 --micro-batch 2 --vocabulary 500 --device cpu

`gpu` trains one model in one process; its steps see whole sequences, documents of long-tailed lengths and documents of
uniform lengths in turn, so that all have the same card at the same temperature. FLOPs are 6 per parameter and token
without the embedding, and 12 per layer, width and pair of a query and a key that it sees: documents have fewer pairs,
so what is compared is FLOP/s.

`cpu` trains on dp=4, with ZeRO 1 and 2; each step is taken with its sequences assigned in order and then by work.
Documents have long-tailed lengths. What it prints are seconds of a step, and processor seconds of its busiest rank; the
ratio of the former means something only where each rank has a core of its own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from h200 import SHAPES, VOCABULARY
from torch import Tensor

from cuboid.data.build import BuildRequest, build
from cuboid.data.loader import assigned, micro_batches
from cuboid.data.source import make_source
from cuboid.kernels.pinned_memory import to_device
from cuboid.launch.pool import Pool
from cuboid.model.attention_operation import attention_mix
from cuboid.model.batch import Documents, Edges, MicroBatch
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.cuda_graphs import make_passes
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import PendingStep, run_passes, start_step, train_step

SIDES = ("plain", "long-tailed", "uniform")
SHAPES = {**SHAPES, "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}}


def drawn_ids(side: str, sequences: int, length: int, seed: int) -> Tensor | None:
    """Documents one after another, cut into sequences; None: nobody says where they begin."""
    if side == "plain":
        return None
    generator, tokens = np.random.default_rng(seed), sequences * length
    if side == "long-tailed":  # half of them below a sixteenth of a sequence, half of all tokens in ones above a half
        lengths = generator.lognormal(np.log(length / 16), 1.3, size=tokens)
    else:
        lengths = generator.uniform(1, length / 2, size=tokens)
    lengths = np.clip(lengths, 1, length).astype(np.int64)
    ids = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
    return torch.from_numpy(ids).view(sequences, length)


def pairs_of(ids: Tensor | None, sequences: int, length: int) -> int:
    """Of queries and keys that they see."""
    lengths = torch.tensor([length] * sequences) if ids is None else Documents(ids).lengths
    return int((lengths * (lengths + 1) // 2).sum())


def flops(run: Run, pairs: int) -> float:
    """Of a step."""
    model = run.model
    linear = 6 * (model.parameters - model.vocab * model.hidden) * run.training.global_batch * run.training.sequence
    return linear + 12 * model.layers * model.heads * model.head_dim * pairs


def batch_of(ids: Tensor | None, run: Run, seed: int, device: torch.device) -> list[MicroBatch]:
    """Random letters, as in h200.py."""
    generator = torch.Generator().manual_seed(seed)
    shape = (run.layout.micro_batch, run.training.sequence + 1)
    tokens = torch.randint(97, 123, shape, generator=generator)
    tokens, labels = (to_device(x.contiguous(), device) for x in (tokens[:, :-1], tokens[:, 1:]))
    return [MicroBatch(tokens, labels, ids)]


def steps(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    table = {
        "model": {**SHAPES[options.shape], "family": "llama", "vocab": options.vocabulary, "rope_theta": 500000.0},
        "layout": f"micro_batch={options.micro_batch}",
        "training": {
            "global_batch": options.micro_batch,
            "sequence": options.sequence,
            "precision": "bf16" if device.type == "cuda" else "float32",
            "device": device.type,
            "compile": "on",
        },
        "data": {"source": "synthetic", "attention_within_documents": True, "positions_within_documents": True},
    }
    run = build_run(table, options.set)
    begin = time.perf_counter()
    engine = build_engine(run, 0, device)
    optimizer = Optimizer(engine, run.optimizer)
    passes = make_passes(engine, optimizer, partial(run_passes, engine))
    # In the first round kernels are compiled; of every run of steps of one side the first is let go.
    order = [side for _ in range(options.rounds + 1) for side in SIDES for _ in range(options.steps)]
    begun: list[tuple[str, float, PendingStep]] = []
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    compiled = 0.0
    clock = time.perf_counter()
    for step, side in enumerate(order):
        ids = drawn_ids(side, options.micro_batch, options.sequence, step)
        work = flops(run, pairs_of(ids, options.micro_batch, options.sequence))
        batches = batch_of(ids, run, step, device)
        begun.append((side, work, start_step(engine, optimizer, batches, 1e-4, passes=passes)))
        if step + 1 == len(SIDES) * options.steps:
            begun[-1][2].result()
            compiled = time.perf_counter() - begin
        if device.type == "cpu" or step == 0:  # as the trainer does: on a GPU one step is started while one computes
            begun[-1][2].result()
        else:
            begun[-2][2].result()
        now = time.perf_counter()
        if device.type == "cpu" and len(begun) > len(SIDES) * options.steps:
            seconds[side].append(now - clock)
            speeds[side].append(work / (now - clock))
        clock = now
    loss = begun[-1][2].result().loss
    for before, (side, work, pending) in pairwise(begun[len(SIDES) * options.steps - 1 :]):
        taken = pending.seconds_after(before[2])
        if taken is not None and before[0] == side:
            seconds[side].append(taken)
            speeds[side].append(work / taken)
    tokens = options.micro_batch * options.sequence
    plain = statistics.median(speeds["plain"])
    for side in SIDES:
        row: dict[str, Any] = {
            "shape": f"{options.shape} × {options.micro_batch} × {options.sequence}",
            "side": side,
            "tokens_per_second": tokens / statistics.median(seconds[side]),
            "tflops": statistics.median(speeds[side]) / 1e12,
            "flops_of_plain": statistics.median(np.multiply(speeds[side], seconds[side])) / _of_plain(run),
            "speed_per_flop": statistics.median(speeds[side]) / plain,
            "step_seconds": seconds[side],
        }
        print(json.dumps(row), flush=True)
    print(json.dumps({"loss": loss, "seconds_until_compiled": compiled, "torch": torch.__version__}), flush=True)


def _of_plain(run: Run) -> float:
    return flops(run, pairs_of(None, run.training.global_batch, run.training.sequence))


def kernels(options: argparse.Namespace) -> None:
    """Attention alone: the operation with documents beside torch's own of whole sequences."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for heads, shared, width in ((32, 8, 64), (32, 8, 128)) if device.type == "cuda" else ((4, 2, 16),):
        shape = (options.micro_batch, options.sequence)
        sizes = (heads, shared, shared)
        inputs = [torch.randn(*shape, n, width, device=device, dtype=dtype, requires_grad=True) for n in sizes]
        gradient = torch.randn(*shape, heads, width, device=device, dtype=dtype)
        for side in SIDES:
            ids = drawn_ids(side, *shape, 0)
            edges = None if ids is None else Documents(ids).edges(device)
            forward = partial(_plain, *inputs) if edges is None else partial(attention_mix, *inputs, edges)
            work = 4 * heads * width * pairs_of(ids, *shape)
            _told("ours", side, heads, width, work, forward, inputs, gradient, device)
            if options.cudnn and edges is not None:
                _cudnn(side, heads, width, work, inputs, gradient, edges, options.sequence)


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def _told(
    kind: str,
    side: str,
    heads: int,
    width: int,
    work: float,
    forward: Any,
    inputs: list[Tensor],
    gradient: Tensor,
    device: torch.device,
) -> None:
    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    with torch.no_grad():
        once = timed(forward, device)
    twice = timed(both, device)
    told = {"kind": kind, "side": side, "heads": heads, "width": width, "forward_ms": 1e3 * once}
    told |= {"backward_ms": 1e3 * (twice - once), "forward_tflops": work / once / 1e12}
    print(json.dumps({**told, "backward_tflops": 2.5 * work / (twice - once) / 1e12}), flush=True)


def _cudnn(
    side: str,
    heads: int,
    width: int,
    work: float,
    inputs: list[Tensor],
    gradient: Tensor,
    edges: Edges,
    longest: int,
) -> None:
    """cuDNN's kernel for documents, with room for more of them than there are, so that it plans once."""
    device = gradient.device
    with torch.no_grad():
        query, key, value = (x.flatten(0, 1) for x in inputs)
        outer = gradient.flatten(0, 1)
    for most in (int(edges.sizes[0]), 256):
        places = edges.places[: most + 1].contiguous()
        room = int(edges.sizes[1]) if most != 256 else longest
        start = time.perf_counter()
        try:
            with torch.no_grad():
                call = partial(
                    torch.ops.aten._cudnn_attention_forward,
                    *(query, key, value, None, places, places, room, room, True, 0.0, True, False),
                    scale=width**-0.5,
                )
                seen, sums, *_, seed, offset, _ = call()
                torch.cuda.synchronize()
                planned = time.perf_counter() - start
                expected = attention_mix(*inputs, edges).flatten(0, 1)
                error = float((seen - expected).abs().max())
                once = timed(call, device)
                told = {"kind": f"cudnn, {most} documents", "side": side, "heads": heads, "width": width}
                told |= {"planning_s": planned, "error": error, "forward_ms": 1e3 * once}
                print(json.dumps({**told, "forward_tflops": work / once / 1e12}), flush=True)
                back = partial(
                    torch.ops.aten._cudnn_attention_backward,
                    *(outer, query, key, value, seen, sums, seed, offset, None, places, places, room, room, 0.0, True),
                    scale=width**-0.5,
                )
                back()
                taken = timed(back, device)
                told = {"backward_ms": 1e3 * taken, "backward_tflops": 2.5 * work / taken / 1e12}
                print(json.dumps({"kind": f"cudnn, {most} documents", "side": side, **told}), flush=True)
        except Exception as error:
            print(json.dumps({"kind": f"cudnn, {most} documents", "failed": str(error)[:300]}), flush=True)


RANKS = 4


def cpu(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder, Pool() as pool:
        store = letters_store(Path(folder), options)
        for layout in (f"dp={RANKS},zero=1", f"dp={RANKS},zero=2"):
            table = {
                "model": {**CPU_SHAPE, "family": "llama", "vocab": 257},
                "layout": layout,
                "training": {
                    "global_batch": RANKS * options.per_rank,
                    "sequence": options.sequence,
                    "device": "cpu",
                    "steps": options.rounds,
                },
                "data": {"source": store, "attention_within_documents": True, "positions_within_documents": True},
            }
            told = pool.run("packing:taken", (build_run(table, options.set),), ranks=RANKS, timeout=600)
            lengths = {name: getattr(options, name) for name in ("median", "sigma", "seed")}
            row: dict[str, Any] = {"layout": layout, "cores": os.cpu_count(), "lengths": lengths}
            for kind in KINDS:
                steps = list(zip(*(rank[kind] for rank in told), strict=True))
                row[kind] = {
                    "step_seconds": statistics.median(ranks[0][0] for ranks in steps),
                    "busiest_rank_seconds": statistics.median(max(own for _, own in ranks) for ranks in steps),
                }
            row["ratios"] = {name: row["order"][name] / row["work"][name] for name in row["work"]}
            imbalance = told[0]["imbalance"]
            row["planned"] = sum(in_order for in_order, _ in imbalance) / sum(by_work for _, by_work in imbalance)
            print(json.dumps(row), flush=True)


KINDS = ("order", "work")
CPU_SHAPE = {"hidden": 64, "layers": 1, "heads": 8, "kv_heads": 4, "ffn": 128}


def letters_store(folder: Path, options: argparse.Namespace) -> str:
    """Of 512 sequences. By default half of all documents are below a 64th of a sequence, a tenth of all tokens in some
    that are longer than one; with `--median 256 --sigma 2` a quarter of them."""
    sequence = options.sequence
    drawn = np.random.default_rng(options.seed).lognormal(np.log(sequence / options.median), options.sigma, 200_000)
    lengths = [max(2, int(each)) for each in drawn]
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 512 * sequence))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": "a" * (n - 1) + " "}) + "\n" for n in lengths))
    build(BuildRequest(sources=(str(folder / "text.jsonl"),), output=folder / "store", workers=1))
    return str(folder / "store")


def taken(rank: int, run: Run) -> dict[str, list[tuple[float, float]]]:
    """Of each step, by how sequences are assigned: its seconds, and the processor's on this rank."""
    device = torch.device("cpu")
    engine = build_engine(run, rank, device)
    optimizer, source = Optimizer(engine, run.optimizer), make_source(run)
    runs = {kind: replace(run, data=replace(run.data, assignment=kind)) for kind in KINDS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (*KINDS, "imbalance")}
    for step in range(run.training.steps):
        for kind, each in runs.items():
            all_reduce(torch.zeros(1), engine.groups.world)
            wall, own = time.perf_counter(), time.process_time()
            batches = micro_batches(source, each, step, engine.groups.coordinates.dp, device)
            train_step(engine, optimizer, batches, 1e-4)
            if step:  # the first one warms up
                found[kind].append((time.perf_counter() - wall, time.process_time() - own))
        chosen = assigned(source, runs["work"], step)
        assert chosen is not None
        found["imbalance"].append((chosen.in_order, chosen.imbalance))
    return found


def timed(call: Any, device: torch.device, repeats: int = 10) -> float:
    """Seconds of one call, the median."""
    call()
    taken = []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1e3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("gpu", "kernels", "cpu"))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1B")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--per-rank", type=int, default=8, help="cpu: sequences of a step")
    parser.add_argument("--seed", type=int, default=0, help="cpu: of the lengths of documents, which are lognormal")
    parser.add_argument("--median", type=int, default=64, help="cpu: such a part of a sequence is their median")
    parser.add_argument("--sigma", type=float, default=1.5, help="cpu: deviation of their logarithms")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=4, help="of each side in a row")
    parser.add_argument("--rounds", type=int, help="of all sides, after the one that compiles: 3; steps of cpu: 8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cudnn", action="store_true", help="kernels: cuDNN's for documents too")
    parser.add_argument("--set", action="append", default=[], help="change a field of the run")
    options = parser.parse_args()
    options.rounds = options.rounds or (8 if options.mode == "cpu" else 3)
    {"cpu": cpu, "gpu": steps, "kernels": kernels}[options.mode](options)


if __name__ == "__main__":
    main()
