"""Ranks that hang and ranks that are killed, in real trainings: python benchmarks/hangs.py [--seed 1] [--json]

Every training meets one fault after another, each on another rank and at another place, and must come to its end by
itself. Told are: how long a hang takes to be found, beside the limit the run had learned; whether the report names the
right rank; and how long after a kill, or after a hang was found, the first step is done again. Then what heartbeats
cost: how many notes a step makes, how long one takes, and the share of the step that is."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from cuboid.launch.pool import Pool
from cuboid.resilience.faults import STRUCK, Fault
from cuboid.spec.run import Run, build_run
from cuboid.telemetry.heartbeat import CHANGES, HEARTBEAT, Heartbeat

FIRST, APART = 6, 6
"""The step of the first fault, and steps between two: enough to learn how long a step takes, and all with a save."""
FIELDS = [
    "training.global_batch=4",
    "training.sequence=16",
    "training.device=cpu",
    "checkpoint.every=2",
    "resilience.hang_floor_seconds=2",
    "resilience.setup_seconds=60",
    "evaluation.every=1",
    "evaluation.batches=1",
    "data.validation_fraction=0.1",
]
ALWAYS = ["data", "forward", "backward", "gradients", "update", "evaluation", "save", "all-reduce"]


@dataclass(frozen=True)
class Job:
    layout: str
    places: list[str]
    model: str = "tiny-llama"


JOBS = [
    Job("dp=4", ALWAYS),
    Job("dp=2,tp=2", [*ALWAYS, "all-gather", "reduce-scatter"]),
    Job("dp=2,pp=2", [*ALWAYS, "message", "set-up"]),
    Job("dp=4,zero=3", [*ALWAYS, "all-gather", "reduce-scatter"]),
    Job("dp=2,cp=2", [*ALWAYS, "shift"]),
    Job("dp=2,tp=2,ep=4", [*ALWAYS, "all-to-all"], "tiny-mixtral"),
]


@dataclass(frozen=True)
class Found:
    """What became of one fault."""

    layout: str
    fault: Fault
    seconds: float | None
    """From the fault until it was found; None: it was not, or it was a kill."""
    limit: float
    named: list[int]
    again: float
    """From the kill, or from when a hang was found, until the first step after it was done."""
    sentence: str = ""


def train(folder: Path, job: Job, faults: list[Fault], steps: int) -> int:
    text = "; ".join(
        f"{fault.kind} rank={fault.rank} step={fault.step} at={fault.at.replace(' ', '_')}" for fault in faults
    )
    fields = [*FIELDS, f"training.steps={steps}", f"output.folder={folder}"]
    settings = [argument for field in fields for argument in ("--set", field)]
    command = ["-m", "cuboid.cli.main", "train", "--model", job.model, "--layout", job.layout, "--inject", text]
    finished = subprocess.run([sys.executable, *command, *settings], capture_output=True, text=True, timeout=1800)
    if finished.returncode:
        print(finished.stderr, file=sys.stderr)
    return finished.returncode


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def judge(folder: Path, job: Job, faults: list[Fault]) -> list[Found]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reports = [read(path) for path in sorted(folder.glob("hang-*/report.json"))]
    found = []
    for number, fault in enumerate(faults, 1):
        mark = folder / STRUCK.replace("*", f"{number:02d}")
        if not mark.exists():
            print(f"{job.layout}: rank {fault.rank} never came to {fault.at} in step {fault.step}", file=sys.stderr)
            continue
        struck = read(mark)["time"]
        later = [report for report in reports if report["time"] > struck]
        report = min(later, key=lambda one: one["time"]) if later and fault.kind != "kill" else None
        since = struck if report is None else report["time"]
        again = min(row["time"] for row in rows if row["time"] > since) - since
        if report is None:
            found.append(Found(job.layout, fault, None, 0.0, [], again))
            continue
        seconds = report["time"] - struck
        found.append(
            Found(job.layout, fault, seconds, report["limit_seconds"], report["culprits"], again, report["sentence"])
        )
    false_alarms = len(reports) - sum(one.seconds is not None for one in found)
    if false_alarms:
        print(f"{job.layout}: {false_alarms} reports of hangs that were none", file=sys.stderr)
    return found


def campaign(draw: random.Random, job: Job, kinds: list[str], count: int) -> list[Found]:
    places = draw.sample(job.places, min(count, len(job.places)))
    faults = [
        Fault(draw.choice(kinds), draw.randrange(4), FIRST + APART * index, place)  # type: ignore[arg-type]
        for index, place in enumerate(places)
    ]
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        code = train(folder, job, faults, FIRST + APART * len(faults))
        assert code == 0, f"{job.layout} did not come to its end: {faults}"
        return judge(folder, job, faults)


def steps_of(rank: int, run: Run) -> tuple[int, float]:
    """Notes and seconds of a step, of one rank."""
    import torch

    from cuboid.training.trainer import Trainer

    trainer = Trainer(run, rank, torch.device("cpu"), True)
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for callback in trainer.callbacks:
            stack.enter_context(callback)
        for _ in range(5):
            trainer._start_step()
        notes, begin = HEARTBEAT.words[CHANGES], time.perf_counter()
        for _ in range(20):
            trainer._start_step()
        return (HEARTBEAT.words[CHANGES] - notes) // 20, (time.perf_counter() - begin) / 20


def note_seconds() -> float:
    """The least of many trials: what it costs when nobody else runs."""
    heartbeat, best = Heartbeat(), 1.0
    track = heartbeat.track("data", (0, 1))
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(100):
            with track.collective("all-reduce"):
                pass
        best = min(best, (time.perf_counter() - begin) / 200)
    return best


def overhead() -> list[dict[str, Any]]:
    result = []
    with Pool() as pool:
        for layout in ("dp=4", "dp=2,tp=2", "dp=2,pp=2", "dp=4,zero=3"):
            with TemporaryDirectory() as folder:
                table = {"model": "tiny-llama", "layout": layout, "output": {"folder": folder}}
                run = build_run(table, ["training.global_batch=8", "training.sequence=128", "training.device=cpu"])
                notes, seconds = pool.run("benchmarks.hangs:steps_of", (run,), ranks=4)[0]
                share = notes * note_seconds() / seconds
                result.append({"layout": layout, "notes": notes, "step_seconds": seconds, "share": share})
    return result


def summarize(hangs: list[Found], kills: list[Found]) -> dict[str, Any]:
    ratios = [one.seconds / one.limit for one in hangs if one.seconds is not None]
    right = [one for one in hangs if one.named == [one.fault.rank]]
    again, after_hang = [one.again for one in kills], [one.again for one in hangs]
    return {
        "hangs": len(hangs),
        "found": len(ratios),
        "named": len(right),
        "detection_over_limit": {"median": median(ratios), "worst": max(ratios)},
        "limit_seconds": {"median": median(one.limit for one in hangs), "longest": max(one.limit for one in hangs)},
        "hang_found_to_step": {"median": median(after_hang), "worst": max(after_hang)},
        "kills": len(kills),
        "kill_to_step": {"median": median(again), "worst": max(again)} if again else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hangs", type=int, default=8, help="in each of the six layouts")
    parser.add_argument("--kills", type=int, default=4, help="in each of the six layouts")
    parser.add_argument("--layouts", type=int, default=len(JOBS), help="how many of them")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    hangs: list[Found] = []
    kills: list[Found] = []
    for job in JOBS[: arguments.layouts]:
        if arguments.hangs:
            hangs += campaign(draw, job, ["hang", "spin", "stop"], arguments.hangs)
        if arguments.kills:
            kills += campaign(draw, job, ["kill"], arguments.kills)
        for one in [*hangs, *kills]:
            if one.layout == job.layout and not arguments.json:
                waited = "" if one.seconds is None else f"{one.seconds:.2f} s of {one.limit:.2f}, named {one.named}, "
                place = f"{one.fault.kind} rank {one.fault.rank} at {one.fault.at}"
                print(f"{one.layout}  {place}: {waited}again after {one.again:.2f} s  {one.sentence}", flush=True)
    summary = summarize(hangs, kills) | {"heartbeats": overhead(), "note_microseconds": 1e6 * note_seconds()}
    print(json.dumps(summary, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
