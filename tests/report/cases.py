"""Runs' folders as a training leaves them, with numbers chosen so that what a report says of them can be worked out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, simulate
from cuboid.spec.run import Run, build_run, dump_run

SETTINGS = ["training.global_batch=8", "training.sequence=16", "training.device=cpu"]


def make_run(folder: Path, layout: str = "dp=2,pp=2", steps: int = 3, *settings: str) -> Run:
    table = {"model": "tiny-llama", "layout": layout}
    run = build_run(table, [*SETTINGS, f"training.steps={steps}", f"output.folder={folder}", *settings])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(dump_run(run))
    return run


def row(step: int, **changes: Any) -> dict[str, Any]:
    found = {
        "step": step,
        "loss": 6.0 - step / 10,
        "gradient_norm": 1.0 + step,
        "learning_rate": 1e-3 * step,
        "tokens": 128,
        "labelled_tokens": 128,
        "seconds": 0.5 * step,
        "tokens_per_second": 256 / step,
        "finite": True,
        "time": 1000.0 + 10 * step,
    }
    return found | changes


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))


def write_timing(run: Run, costs: StageCosts, skew: dict[int, float] | None = None, step: int = 2) -> None:
    """Times of one step as if every stage took exactly its cost and messages 1 ms; each rank's clock is off by its
    skew, and with one each is a host of its own."""
    layout = run.layout
    schedule = make_schedule(layout.schedule, layout.pp, run.micro_batches, layout.vpp)
    timeline = simulate(schedule, costs, 1e-3)
    stride = layout.world_size // layout.pp
    for rank in range(layout.world_size):
        own = [event for event in timeline.events if event.rank == rank // stride]
        actions, free = [], 0.0
        shift = (skew or {}).get(rank, 0.0)
        for event in own:
            actions.append([str(event.action), *(moment + shift for moment in (free, event.start, event.end))])
            free = event.end
        told = {"step": step, "seconds": 1.0, "host": f"host{rank if skew else 0}", "clock": 0.0, "actions": actions}
        wait = ["all-reduce", "data", timeline.makespan + shift, timeline.makespan + 0.25 + shift]
        write_rows(Path(run.output.folder) / f"timing-{rank:05d}.jsonl", [{**told, "collectives": [wait]}])


def write_memory(run: Run, rank: int, peak: int) -> None:
    told = {"measured": "allocated", "device": "NVIDIA H200", "host": "a", "peak": peak, "before": 0}
    parts = {"weights": 100, "gradients": 200, "optimizer": 300}
    write_rows(Path(run.output.folder) / f"memory-{rank:05d}.jsonl", [{"step": 1, **told, **parts}])
