"""What states in memory cost and save, beside those on disk: python benchmarks/memory_checkpoint.py [--json]

A state of half a gigabyte on four ranks, two to a "node" (a name, with a folder of its own): the time a training waits
for a save, how long the save takes behind its back, and how long it takes to load it again: from this node's
memory, from the other node's after this one lost its own, and from disk, cold. Then real trainings are killed with
SIGKILL: seconds from the kill to the first new step, and until the step that was killed is done again."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

from checkpoint import RANKS, build, drop_from_memory, gigabyte_run, together

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.memory.folder import forget, node_folder
from cuboid.checkpoint.memory.nodes import open_memory
from cuboid.checkpoint.memory.restore import MemoryRestore
from cuboid.checkpoint.memory.saver import MemorySaver
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import BackgroundSaver, Saver
from cuboid.launch.pool import Pool
from cuboid.parallel.coordination import open_coordination
from cuboid.resilience.goodput import failures
from cuboid.spec.run import Run, dump_run

NODES = "aabb"


def measure(rank: int, run: Run, rounds: int) -> dict[str, Any]:
    """Each round: save both ways, load all ways; what is timed is the slowest rank."""
    engine, optimizer = build(rank, run)
    group = open_coordination(600)
    place = locate(run.output.folder) / "checkpoints"
    memory = open_memory(run, rank, group, NODES[rank])
    savers: dict[str, BackgroundSaver] = {
        "disk": Saver(engine, optimizer, place, open_coordination(600)),
        "memory": MemorySaver(engine, optimizer, memory),
    }
    found: dict[str, list[float]] = {}

    def note(name: str, start: float) -> None:
        found.setdefault(name, []).append(together() - start)

    for number in range(rounds + 1):  # the first save makes the second slot, and is not counted
        for where, saver in savers.items():
            start = together()
            saver.save(number + 1)
            (report,) = saver.finish()
            assert not report.warning, report.warning
            note(f"{where} save", start)
            found.setdefault(f"{where} stall", []).append(max(group.gather(report.stall_seconds), default=0.0))
    step = rounds + 1
    for _ in range(rounds):
        start = together()
        assert resume(engine, optimizer, place / "none", group, True, MemoryRestore(memory, group, step)) == step
        note("own memory", start)
        if rank == 2:
            shutil.rmtree(node_folder(run, "b"))
            memory.folder.make_folder()
        start = together()
        assert resume(engine, optimizer, place / "none", group, True, MemoryRestore(memory, group, step)) == step
        note("other node's memory", start)
        if rank == 0:
            for path in Path(checkpoint_path(place, step).path).iterdir():
                drop_from_memory(path)
        start = together()
        assert resume(engine, optimizer, place, group, True) == step
        note("disk", start)
    for name in ("disk stall", "disk save", "memory stall", "memory save"):
        found[name] = found[name][1:]
    together()
    if rank in (0, 2):
        memory.folder.parent.remove()
    return {"bytes": savers["memory"]._bytes, "seconds": found}


def rows(run: Run) -> int:
    path = Path(run.output.folder) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(process: subprocess.Popen[bytes], happened: Any) -> float:
    while not happened():
        assert process.poll() is None, "the training ended"
        time.sleep(0.005)
    return time.perf_counter()


def kill_a_rank(run: Run, folder: Path, at: int) -> dict[str, float]:
    """Seconds after a rank of a training was killed at a step."""
    run = replace(run, output=replace(run.output, folder=str(folder)))
    file = folder.with_suffix(".toml")
    file.write_text(dump_run(run))
    command = [sys.executable, "-m", "cuboid.cli.main", "train", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait(process, lambda: rows(run) >= at)
        reached = rows(run)
        victims = [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if _group_of(path) == process.pid and b"forkserver" in _read(path / "cmdline")
        ]
        metrics = folder / "metrics.jsonl"
        before = metrics.stat().st_ino
        start = time.perf_counter()
        os.kill(max(victims), signal.SIGKILL)
        wait(process, lambda: metrics.stat().st_ino != before)  # rows of steps to be done again are gone
        kept = failures(folder)[0].checkpoint
        new = wait(process, lambda: rows(run) > kept)
        again = wait(process, lambda: rows(run) > reached)
        return {"steps lost": reached - kept, "first new step": new - start, "back where it was": again - start}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        forget(run)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _group_of(path: Path) -> int:
    fields = _read(path / "stat").rpartition(b")")[2].split()
    return int(fields[2]) if fields else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints on disk, in killed trainings")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that trainings end
    folder = Path(mkdtemp(prefix="cuboid-memory-"))
    run = gigabyte_run(str(folder / "run"))
    run = replace(run, data=replace(run.data, source="synthetic"))
    run = replace(run, model=replace(run.model, layers=3), checkpoint=replace(run.checkpoint, memory_every=1, keep=1))
    small = replace(run, model=replace(run.model, layers=2, hidden=256, ffn=704, vocab=1024, heads=4, kv_heads=4))
    specs = {
        "memory": replace(small.checkpoint, every=0, memory_every=1),
        "disk": replace(small.checkpoint, every=arguments.every, memory_every=0),
    }
    try:
        with Pool() as pool:
            measured = pool.run("memory_checkpoint:measure", (run, arguments.rounds), ranks=RANKS, timeout=1200)[0]
        killed: dict[str, list[dict[str, float]]] = {name: [] for name in specs}
        for number in range(arguments.rounds):  # side by side, just before a checkpoint on disk is due: the worst case
            for name, spec in specs.items():
                one = kill_a_rank(replace(small, checkpoint=spec), folder / f"{name}-{number}", 2 * arguments.every - 2)
                killed[name].append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {name: median(values) for name, values in measured["seconds"].items()}
    after = {name: {key: median(one[key] for one in each) for key in each[0]} for name, each in killed.items()}
    if arguments.json:
        print(json.dumps({"bytes": measured["bytes"], "seconds": measured["seconds"], "killed": killed}))
        return
    print(f"{measured['bytes'] / 1e9:.2f} GB on {RANKS} ranks, medians of {arguments.rounds}")
    for what in ("stall", "save"):
        memory, disk = seconds[f"memory {what}"], seconds[f"disk {what}"]
        print(f"{what}: {memory:.3f} s in memory, copy included, {disk:.3f} s on disk: {memory / disk:.2f} ×")
    for where in ("own memory", "other node's memory"):
        memory, disk = seconds[where], seconds["disk"]
        print(f"load: {memory:.3f} s from {where}, {disk:.3f} s from disk: {memory / disk:.2f} ×")
    for key in after["memory"]:
        memory, disk = after["memory"][key], after["disk"][key]
        ratio = f"{memory / disk:.2f} ×" if disk else ""
        print(f"after SIGKILL, {key}: {memory:.2f} from memory, {disk:.2f} from disk, {arguments.every} apart: {ratio}")


if __name__ == "__main__":
    main()
