"""On the same layout a training continues bit for bit: losses, parameters, moments, random generators."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.training.bit_identical import differences, four_steps

LAYOUTS = [
    "dp=1",
    "dp=2,zero=2",
    "dp=4,zero=3,shard=2",
    "tp=2,dp=2,zero=1",
    "pp=2,dp=2,schedule=zbv,zero=3",
    *rest("dp=2", "dp=2,zero=1", "pp=2,tp=2,schedule=interleaved"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path, layout: str) -> None:
    precision = "bf16" if "zero=3" in layout else "float32"
    found = differences(
        layout,
        tmp_path,
        lambda run: pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size),
        f"training.precision={precision}",
    )
    assert found == []


def test_two_runs_of_the_same_seed_end_with_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    """Generators included: a pool's processes have drawn numbers before."""
    states = []
    for name, drawn in (("one", 0), ("other", 3)):
        run = four_steps("dp=2", tmp_path / name)
        pool.run("tests.training.cases:draw_and_train", (run, drawn), ranks=2)
        last = checkpoint_path(tmp_path / name / "checkpoints", 4)
        states.append({file: (last / file).read() for file in last.names() if file.endswith(".bin")})
    assert states[0] == states[1]
