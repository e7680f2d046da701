"""One real training whose hardware goes wrong in three ways: each is told, and the run continues by itself."""

from __future__ import annotations

import re
from pathlib import Path

from cuboid.launch.pool import Pool
from cuboid.resilience.bad_steps import bad_steps
from cuboid.resilience.goodput import failures
from tests.cli.command import SHORT, rows, run, train
from tests.training.cases import short_run

LAYOUT = "dp=3"


def test_a_flipped_bit_a_gradient_that_is_none_and_a_preemption(tmp_path: Path, pool: Pool) -> None:
    """The bit flips in step 5 and is found before the checkpoint after step 6 is written; the gradient is rolled back
    in step 8; SIGTERM comes while the last checkpoint but one is written."""
    fields = [
        *SHORT,
        "training.global_batch=6",
        "training.steps=12",
        "training.precision=float64",
        "model.layers=4",
        "checkpoint.every=3",
    ]
    watched = [*fields, "resilience.check_replicas_every=100", "resilience.bad_steps=rollback"]
    faults = "flip rank=2 step=5; nan rank=1 step=8; term rank=0 step=9 at=save"
    command = train("--layout", LAYOUT, "--inject", faults, fields=watched)
    preempted = run(command, tmp_path)
    folder = tmp_path / "runs/default"
    assert preempted.returncode == 75, preempted.stderr
    assert re.match(r"preempted: step (9|10) is saved, in ", preempted.stdout.splitlines()[-1])
    (failure,) = failures(folder)
    assert failure.checkpoint == 3 and failure.restarted
    assert failure.reason.startswith("after step 6 rank 2 holds other values of ")
    flipped, poisoned = bad_steps(folder)
    assert {tuple(one["ranks"]) for one in flipped["replicas"]} == {(2,)}
    assert (poisoned["step"], poisoned["batch"], poisoned["reason"]) == (8, 7, "gradient norm is not finite")
    assert [square == "nan" for square in poisoned["squared_norms"]] == [False, True, False]
    assert run(command, tmp_path).returncode == 0

    plain = ("learning_rate.peak=3e-4", "learning_rate.warmup_steps=0")
    clean = short_run(LAYOUT, str(tmp_path / "clean"), *fields, *plain)
    pool.run("tests.training.bad_step_jobs:train_without", (clean, [7]), ranks=3)
    found, expected = ([row["loss"] for row in rows(path / "metrics.jsonl")] for path in (folder, tmp_path / "clean"))
    assert found == expected and len(found) == 12
