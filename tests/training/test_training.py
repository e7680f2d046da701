"""The whole loop under different layouts: the same losses, all the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from tests.cli.command import run
from tests.training.cases import short_run

# Eight tensor ranks meet many times in each micro-batch, which is slow on few cores: theirs is the whole batch.
FEW = "training.steps=8"
LAYOUTS = ["dp=8", "dp=2,tp=2,pp=2", "dp=2,pp=2,zero=3,schedule=zbv"]


def losses(pool: Pool, folder: Path, layout: str, *overrides: str) -> list[float]:
    given = short_run(layout, str(folder), "learning_rate.schedule=constant", *overrides)
    returned = pool.run("tests.training.cases:train_rank", (given,), ranks=given.layout.world_size)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, given.training.steps + 1))
    assert set(returned) == {rows[-1]["loss"]}, "every rank knows the same last loss"
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return losses(pool, tmp_path_factory.mktemp("alone"), "dp=1")


def test_the_loss_falls(alone: list[float]) -> None:
    assert 5 < alone[0] < 6, "untrained: about the logarithm of the vocabulary"
    assert alone[-1] < alone[0] - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reaches_the_same_loss(pool: Pool, tmp_path: Path, alone: list[float], layout: str) -> None:
    found = losses(pool, tmp_path, layout, FEW)
    assert found[0] == pytest.approx(alone[0], rel=1e-6)
    assert found == pytest.approx(alone[:8], abs=1e-4)


def test_another_seed_is_another_training(pool: Pool, tmp_path: Path, alone: list[float]) -> None:
    found = losses(pool, tmp_path, "dp=1", "training.seed=1", "training.steps=2")
    assert abs(found[0] - alone[0]) > 1e-3


def test_twice_the_micro_batch_is_the_same_training(pool: Pool, tmp_path: Path, alone: list[float]) -> None:
    found = losses(pool, tmp_path, "dp=2,pp=2,micro_batch=2", FEW)
    assert found == pytest.approx(alone[:8], abs=1e-4)


IMPORTED = """
from cuboid.launch.pool import Pool
from tests.training.cases import short_run
with Pool() as pool:
    run = short_run("pp=2", "run", "training.steps=2", "checkpoint.every=2")
    print(*sorted(set.union(*pool.run("tests.training.cases:imported", (run,), ranks=2))))
"""


def test_a_rank_imports_next_to_nothing_of_its_own(tmp_path: Path) -> None:
    """Every rank would pay for it, before its first step. sympy alone takes most of a second."""
    done = run(["-c", IMPORTED], tmp_path)
    assert done.returncode == 0 and len(done.stdout.split()) < 20, done
