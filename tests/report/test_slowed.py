"""The bubble of a real pipeline whose stages take known times is the simulated one, and the report says how far off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.report.measured import MeasuredStep, kept_steps, measure
from cuboid.report.page import collect
from cuboid.report.source import open_source
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import Timeline, simulate
from tests.report.cases import make_run
from tests.report.slowed import scaled


@dataclass(frozen=True)
class Found:
    """What was measured of some steps, beside what it should be."""

    steps: list[MeasuredStep]
    truth: Timeline
    replayed: float
    typical: float

    @property
    def is_as_simulated(self) -> bool:
        quickest = min(self.steps, key=lambda step: step.makespan)
        pairs = [(quickest.makespan, self.truth.makespan), (quickest.bubble, self.truth.bubble_fraction)]
        return all(seen == pytest.approx(true, rel=0.15) for seen, true in [*pairs, (self.replayed, self.typical)])


def measured(pool: Pool, folder: Path, factor: float) -> Found:
    run = make_run(folder, "pp=3", 4, "output.keep_timing=true", "training.global_batch=6")
    pool.run("tests.report.slowed:slowed_steps", (run, factor), ranks=3)
    source, schedule = open_source(folder), make_schedule("1f1b", 3, 6)
    steps = [step for number in kept_steps(source) if (step := measure(source, schedule, [0, 1, 2], number))]
    tracks = {track["id"]: track for track in collect(source, with_search=False)["timeline"]["tracks"]}
    replayed, typical = (tracks[name]["bubble"] for name in ("replayed", "measured-typical"))
    return Found(steps, simulate(schedule, scaled(factor)), replayed, typical)


def test_the_measured_bubble_is_the_simulated_one(pool: Pool, tmp_path: Path) -> None:
    """What else the machine does disturbs a step by some milliseconds: the longer its stages take, the less that is."""
    for factor in (1, 2, 4, 8, 16):
        found = measured(pool, tmp_path / str(factor), factor)
        if found.is_as_simulated:
            break
    assert found.is_as_simulated, found
    assert len(found.steps) == 4
    for step in found.steps:
        for rank, lane in step.lanes.items():
            waits = step.collectives[rank]
            assert "all-reduce" in {wait.kind for wait in waits}, "the loss is summed over all ranks"
            assert all(wait.start <= wait.end for wait in waits)
            assert max(wait.end for wait in waits) >= lane[-1].end, "on the clock of the actions, after the last"
