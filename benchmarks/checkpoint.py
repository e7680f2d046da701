"""Speed of checkpoints beside the disk's own: python benchmarks/checkpoint.py [--folder DIR] [--json]

A state of a gigabyte on four ranks is saved and loaded; beside it, in every round, as many processes write and read as
many bytes of plain files in the same folder, as fast as the disk lets them. The best round counts on both sides. The
time a training waits for a save is taken with and without writing in the background."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from cuboid.checkpoint.folder import checkpoint_path, clear
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import Saver
from cuboid.launch.pool import Pool
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.run import Run, build_run
from cuboid.training.optimizer import Optimizer

RANKS = 4
CHUNK = 16 << 20
LEAST_SPEED, MOST_STALL = 0.6, 0.15


def gigabyte_run(folder: str) -> Run:
    """84 million parameters and two moments of each, in float32."""
    shape = ["model.layers=6", "model.hidden=1024", "model.ffn=2816", "model.heads=16", "model.kv_heads=16"]
    rest = ["model.vocab=4096", "training.sequence=8", f"training.global_batch={RANKS}", "training.device=cpu"]
    return build_run(
        {"model": "tiny-llama", "layout": f"dp={RANKS},zero=3"},
        [*shape, *rest, f"output.folder={folder}", "checkpoint.every=1", "training.steps=1000"],
    )


def drop_from_memory(path: Path) -> None:
    """So that reading means reading the disk; needs what is written to be on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def together() -> float:
    torch.distributed.barrier()
    return time.perf_counter()


def plain_files(rank: int, folder: str, count: int) -> tuple[float, float]:
    """Seconds to write `count` bytes to a file per rank and sync it, and to read it back from the disk."""
    path = Path(folder) / f"plain-{rank}"
    content = memoryview(torch.arange(count // 8, dtype=torch.int64).view(torch.uint8).numpy())
    start = together()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for position in range(0, count, CHUNK):
        os.write(handle, content[position : position + CHUNK])
    os.fsync(handle)
    os.close(handle)
    written = together() - start
    drop_from_memory(path)
    buffer = bytearray(CHUNK)
    start = together()
    handle = os.open(path, os.O_RDONLY)
    while os.readv(handle, [buffer]):
        pass
    os.close(handle)
    read = together() - start
    path.unlink()
    return written, read


def build(rank: int, run: Run) -> tuple[Engine, Optimizer]:
    engine = build_engine(run, rank, torch.device("cpu"))
    return engine, Optimizer(engine, run.optimizer)


def measure(rank: int, run: Run, rounds: int) -> dict[str, Any]:
    """Save and load `rounds` times each way, plain files between; one process group for all of it."""
    engine, optimizer = build(rank, run)
    place = locate(run.output.folder) / "checkpoints"
    savers = {}
    for asynchronous in (False, True):
        spec = replace(run.checkpoint, asynchronous=asynchronous, keep=1000)
        changed = replace(engine, run=replace(run, checkpoint=spec))
        savers[asynchronous] = Saver(changed, optimizer, place, open_coordination(600))
    count = len(savers[True]._own.content)
    found: dict[str, list[float]] = {name: [] for name in ("disk write", "disk read", "save", "load", "stall", "write")}
    step = 0
    for _ in range(rounds):
        write, read = plain_files(rank, run.output.folder, count)
        found["disk write"].append(write)
        found["disk read"].append(read)
        for asynchronous, saver in savers.items():
            step += 1
            start = together()
            saver.save(step)
            stall = together() - start
            (report,) = saver.finish()
            assert not report.warning, report.warning
            total = together() - start
            found["stall" if asynchronous else "save"].append(stall)
            found["write"] += [total] if asynchronous else []
        if rank == 0:
            for path in Path(checkpoint_path(place, step).path).iterdir():
                drop_from_memory(path)
        start = together()
        assert resume(engine, optimizer, place, quiet=True) == step
        found["load"].append(together() - start)
        if rank == 0:
            clear(place)
    return {"bytes": savers[True]._bytes, "seconds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; a folder of its own in the system's temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = mkdtemp(prefix="cuboid-checkpoint-", dir=arguments.folder)
    try:
        with Pool() as pool:
            measured = pool.run(
                "checkpoint:measure", (gigabyte_run(folder), arguments.rounds), ranks=RANKS, timeout=600
            )[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {name: min(seconds) for name, seconds in measured["seconds"].items()}
    size = measured["bytes"] / 1e9
    ratios = {
        "save": best["disk write"] / best["save"],
        "load": best["disk read"] / best["load"],
        "stall": best["stall"] / best["save"],
    }
    passed = min(ratios["save"], ratios["load"]) >= LEAST_SPEED and ratios["stall"] <= MOST_STALL
    if arguments.json:
        print(json.dumps({"gigabytes": size, "seconds": measured["seconds"], "ratios": ratios, "passed": passed}))
        return
    print(f"{size:.2f} GB on {RANKS} ranks, best of {arguments.rounds}")
    for name, disk in (("save", "disk write"), ("load", "disk read")):
        speed, own = size / best[name], size / best[disk]
        print(f"{name}: {speed:.2f} GB/s, the disk {own:.2f} GB/s: {ratios[name]:.2f} × (at least {LEAST_SPEED})")
    print(
        f"stall: {best['stall']:.3f} s in the background, {best['save']:.3f} s waiting: "
        f"{ratios['stall']:.3f} × (at most {MOST_STALL}); the background took {best['write']:.2f} s"
    )
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
