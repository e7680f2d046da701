"""The bubble of a real pipeline whose stages take known times is the simulated one, and the report says how far off."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.report.collect import collect
from cuboid.report.measured import kept_steps, measure
from cuboid.report.source import open_source
from cuboid.schedule.make import make_schedule
from cuboid.schedule.simulate import simulate
from tests.report.cases import make_run
from tests.report.slowed import COSTS


def test_the_measured_bubble_is_the_simulated_one(pool: Pool, tmp_path: Path) -> None:
    run = make_run(tmp_path, "pp=3", 4, "output.keep_timing=true", "training.global_batch=6")
    pool.run("tests.report.slowed:slowed_steps", (run,), ranks=3)
    source = open_source(tmp_path)
    schedule = make_schedule("1f1b", 3, 6)
    truth = simulate(schedule, COSTS)
    steps = [step for number in kept_steps(source) if (step := measure(source, schedule, [0, 1, 2], number))]
    assert len(steps) == 4
    for step in steps:
        for rank, lane in step.lanes.items():
            waits = step.collectives[rank]
            assert "all-reduce" in {wait.kind for wait in waits}, "the loss is summed over all ranks"
            assert all(wait.start <= wait.end for wait in waits)
            assert max(wait.end for wait in waits) >= lane[-1].end, "on the clock of the actions, after the last"
    # The machine may be busy with something else in any one of them.
    quickest = min(steps, key=lambda step: step.makespan)
    assert quickest.makespan == pytest.approx(truth.makespan, rel=0.15)
    assert quickest.bubble == pytest.approx(truth.bubble_fraction, rel=0.15)
    tracks = {track["id"]: track for track in collect(source, with_search=False)["timeline"]["tracks"]}
    assert tracks["replayed"]["bubble"] == pytest.approx(tracks["measured-typical"]["bubble"], rel=0.15)
