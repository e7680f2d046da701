"""A training that keeps its state resumes on another layout as if nothing had happened; and looks at held-out data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoints
from cuboid.checkpoint.verify import verify
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.training.run_folder import prepare_folder
from tests.matrix import rest
from tests.training.cases import short_run


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_training_goes_on_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    common = ("training.precision=float64", "learning_rate.schedule=constant", "checkpoint.every=2")
    whole = short_run("dp=1", str(tmp_path / "whole"), *common, "training.steps=7")
    pool.run("tests.training.cases:train_rank", (whole,), ranks=1)
    first = short_run("dp=2,tp=2", str(tmp_path / "parts"), *common, "training.steps=5")
    pool.run("tests.training.cases:train_rank", (first,), ranks=4)
    # As if it had been killed after a row of a step that no checkpoint holds.
    last = rows(tmp_path / "parts")[-1]
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "step": 6, "loss": 0.0}) + '\n{"step": 7, "lo')
    second = short_run("dp=2,pp=2,zero=3,schedule=zbv", str(tmp_path / "parts"), *common, "training.steps=7")
    pool.run("tests.training.cases:train_rank", (second,), ranks=4)
    expected, seen = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in seen] == list(range(1, 8))
    assert [row["loss"] for row in seen] == pytest.approx([row["loss"] for row in expected], rel=1e-9)
    assert [path.name for path in checkpoints(tmp_path / "parts" / "checkpoints")] == ["step-00000006", "step-00000007"]


def test_a_damaged_checkpoint_is_passed_over_and_written_anew(pool: Pool, tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path), "training.steps=4", "checkpoint.every=2")
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    victim = tmp_path / "checkpoints" / "step-00000004" / "data-00000.bin"
    content = bytearray(victim.read_bytes())
    content[7] ^= 1
    victim.write_bytes(content)
    before = [row["loss"] for row in rows(tmp_path)]
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    assert [row["loss"] for row in rows(tmp_path)] == before
    assert verify(victim.parent).step == 4


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("training.global_batch=16", "training.global_batch=16 is not 8"),
        ("model.layers=3", "model is not that"),
        ("data.source=synthetic", "data is not that"),
    ],
)
def test_another_training_cannot_go_on(tmp_path: Path, override: str, field: str) -> None:
    prepare_folder(short_run("dp=1", str(tmp_path)))
    with pytest.raises(UserError, match=field):
        prepare_folder(short_run("dp=1", str(tmp_path), override))
    prepare_folder(short_run("dp=2,tp=2", str(tmp_path), "training.steps=40"))


@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2", "cp=4", *rest("pp=2,schedule=interleaved"), "dp=2,pp=2,schedule=zbv,zero=3"]
)
def test_the_loss_on_held_out_data_does_not_depend_on_the_layout(pool: Pool, tmp_path: Path, layout: str) -> None:
    common = ("training.precision=float64", "training.steps=2", "evaluation.every=2", "evaluation.batches=2")
    common += ("data.validation_fraction=0.1",)
    results = []
    for name in ("dp=1", layout):
        run = short_run(name, str(tmp_path / name), *common)
        pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size)
        first, last = rows(tmp_path / name)
        assert "validation_loss" not in first
        results.append(last["validation_loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-9)
