"""Bad steps are agreed on by all ranks, skipped or rolled back or reason to stop, and told with their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoints
from cuboid.checkpoint.manifest import read_manifest
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.resilience.bad_steps import bad_steps
from cuboid.training.trainer import Outcome
from tests.cli.command import rows
from tests.training.cases import short_run

FIELDS = ("training.precision=float64", "learning_rate.schedule=constant", "learning_rate.warmup_steps=0")
FIELDS += ("model.layers=2",)
JOB = "tests.training.bad_step_jobs:train_poisoned"


def losses(folder: Path) -> list[float | None]:
    return [row["loss"] for row in rows(folder / "metrics.jsonl")]


def test_a_bad_step_is_skipped_and_told(tmp_path: Path, pool: Pool) -> None:
    run = short_run("dp=2,pp=2", str(tmp_path), "training.steps=6", *FIELDS)
    outcomes: list[Outcome] = pool.run(JOB, (run, frozenset({3}), 2), ranks=4)
    assert len({outcome.loss for outcome in outcomes}) == 1
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] is None for row in metrics] == [False, False, False, True, False, False]
    assert metrics[3]["left_out"] == "loss is not finite" and not metrics[3]["finite"]
    (told,) = bad_steps(tmp_path)
    assert (told["step"], told["batch"], told["action"], told["loss"]) == (4, 3, "skip", "nan")
    assert len(told["squared_norms"]) == 4 and "nan" in told["squared_norms"]
    assert [sample["position"] for sample in told["samples"]] == list(range(24, 32))
    source, sample = make_source(run), told["samples"][0]
    origin = source.origin(24)
    assert origin is not None and sample["source"] == "python-stdlib"
    assert (sample["sample"], tuple(sample["documents"])) == (origin.sample, origin.documents)


def test_bad_steps_without_end_stop_the_run(tmp_path: Path, pool: Pool) -> None:
    run = short_run("dp=2", str(tmp_path), "training.steps=8", "resilience.most_bad_steps=2", *FIELDS)
    reason = r"^step 7 is bad \(loss is not finite\), as were 2 before it with no good one between, more than "
    with pytest.raises(UserError, match=reason + r"resilience\.most_bad_steps=2; run `cuboid replay .* --step 7` to"):
        pool.run(JOB, (run, frozenset({1, 4, 5, 6}), 1), ranks=2)
    assert [told["step"] for told in bad_steps(tmp_path)] == [2, 5, 6, 7]
    stopped = short_run("dp=2", str(tmp_path / "stop"), "training.steps=8", "resilience.bad_steps=stop", *FIELDS)
    with pytest.raises(UserError, match=r"^step 2 is bad \(loss is not finite\) and resilience\.bad_steps=stop; run"):
        pool.run(JOB, (stopped, frozenset({1}), 1), ranks=2)


def test_rolling_back_leaves_the_batch_out_for_good(tmp_path: Path, pool: Pool) -> None:
    """Batches 1 and 5 are bad: steps 2 and 6 roll back, to the beginning and to step 3. On another layout, where no
    batch is bad any more, the run continues without them."""
    fields = ("resilience.bad_steps=rollback", "checkpoint.every=3", *FIELDS)
    folder = tmp_path / "bad"
    run = short_run("dp=2,pp=2", str(folder), "training.steps=9", *fields)
    pool.run(JOB, (run, frozenset({1, 5}), 3), ranks=4)
    assert [(told["step"], told["batch"], told["skipped"]) for told in bad_steps(folder)] == [(2, 1, []), (5, 5, [1])]
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, 10))
    newest = checkpoints(folder / "checkpoints")[-1]
    manifest = read_manifest(newest)
    assert (manifest.step, manifest.updates, manifest.position) == (9, 9, 11 * 8)
    assert manifest.course == {"skipped": [1, 5]}
    pool.run(
        "tests.training.cases:train_rank", (short_run("tp=2", str(folder), "training.steps=12", *fields),), ranks=2
    )

    clean = short_run("dp=2,pp=2", str(tmp_path / "clean"), "training.steps=12", *fields)
    skipping = pool.run("tests.training.bad_step_jobs:train_without", (clean, [1, 5]), ranks=4)
    found, expected = losses(folder), losses(tmp_path / "clean")
    assert found[:9] == expected[:9], "bit for bit on the same layout"
    assert found == pytest.approx(expected, abs=1e-9) and found[-1] == pytest.approx(skipping[0], abs=1e-9)


def test_a_passing_fault_leaves_no_trace_and_a_lasting_one_is_skipped(tmp_path: Path, pool: Pool) -> None:
    """Batches 1 and 4 are bad once, batch 5 always: the run is that which skips batch 5 alone."""
    fields = ("training.steps=8", "checkpoint.every=3", *FIELDS)
    retried = short_run("dp=2,pp=2", str(tmp_path / "retried"), "resilience.bad_steps=retry", *fields)
    pool.run(JOB, (retried, frozenset({1, 4, 5}), 2, frozenset({1, 4})), ranks=4)
    told = bad_steps(tmp_path / "retried")
    assert [row["batch"] for row in told] == [1, 4, 5, 5] and {row["action"] for row in told} == {"retry"}
    skipped = short_run("dp=2,pp=2", str(tmp_path / "skipped"), *fields)
    pool.run(JOB, (skipped, frozenset({5}), 2), ranks=4)
    assert losses(tmp_path / "retried") == losses(tmp_path / "skipped")
    manifests = [read_manifest(checkpoints(tmp_path / each / "checkpoints")[-1]) for each in ("retried", "skipped")]
    files = [{name: told for name, told in each.files.items() if name.endswith(".bin")} for each in manifests]
    assert files[0] == files[1], "every parameter, moment and generator"


def test_a_spike_is_left_out_before_its_update(tmp_path: Path, pool: Pool) -> None:
    """Everything is the same token, but for some noise at the end: a resumed run remembers what is usual."""
    fields = ("resilience.spike_score=8", "resilience.spike_window=8", "checkpoint.every=20", *FIELDS)
    for steps in (20, 26):
        run = short_run("dp=2", str(tmp_path), f"training.steps={steps}", *fields)
        pool.run("tests.training.bad_step_jobs:train_on_noise", (run, 25), ranks=2)
    (told,) = bad_steps(tmp_path)
    assert told["step"] == 26 and told["reason"].startswith("loss ")
    metrics = rows(tmp_path / "metrics.jsonl")
    assert metrics[-1]["left_out"] == told["reason"] and metrics[-1]["finite"]
    manifest = read_manifest(checkpoints(tmp_path / "checkpoints")[-1])
    assert (manifest.step, manifest.updates) == (26, 25)
    assert manifest.course["losses"] == [row["loss"] for row in metrics[17:25]]
    assert json.loads(json.dumps(told)) == told


def test_an_overflow_in_fp16_is_no_bad_step_and_its_factor_is_kept(tmp_path: Path, pool: Pool) -> None:
    """Stopped in the middle, where the factor is not the first any more, and continued with: the numbers of a run that
    never stopped."""
    fields = ("training.precision=fp16", f"training.loss_scale={2.0**21}", "training.loss_scale_steps=3")
    fields += ("training.deterministic=true", "resilience.bad_steps=stop", "checkpoint.every=4", "training.steps=8")
    fields += ("learning_rate.schedule=constant", "data.source=synthetic", "training.global_batch=2", "model.layers=1")

    def trained(name: str, *changes: str) -> list[dict[str, object]]:
        run = short_run("dp=2", str(tmp_path / name), *fields, *changes)
        pool.run("tests.training.cases:train_rank", (run,), ranks=2)
        return rows(tmp_path / name / "metrics.jsonl")

    whole = trained("whole")
    trained("part", "training.steps=4")
    again = trained("part")
    assert not bad_steps(tmp_path / "whole")
    seen = [(row["loss"], row["gradient_norm"], row["loss_scale"], row["overflows"]) for row in whole]
    assert seen == [(row["loss"], row["gradient_norm"], row["loss_scale"], row["overflows"]) for row in again]
    overflowed = [bool(row.get("overflowed")) for row in whole]
    assert overflowed[0] and not overflowed[-1]
    assert whole[-1]["overflows"] == sum(overflowed)
    assert all("left_out" not in row for row in whole)
