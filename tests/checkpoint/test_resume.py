"""Stop on one layout, go on with another: the losses and the state are those of one uninterrupted process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.manifest import MANIFEST
from cuboid.checkpoint.whole import whole_tensors
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run

CHAINS = [
    ("tiny-llama", ["dp=2,tp=2,pp=2", "dp=4,tp=2", "pp=4,dp=2,zero=3,schedule=zbv", "dp=1"]),
    ("tiny-qwen3", ["tp=4,zero=1,dp=2", "pp=3,schedule=zb1p", "dp=4,zero=2,shard=2"]),
    ("tiny-gpt2", ["pp=2,schedule=interleaved,dp=2,zero=3", "tp=8", "dp=3,zero=1"]),
]


@pytest.mark.parametrize(("model", "chain"), CHAINS)
def test_any_layout_goes_on_from_any_other(pool: Pool, tmp_path: Path, model: str, chain: list[str]) -> None:
    steps = 2 * len(chain)
    common = (f"training.steps={steps}", "training.global_batch=12", "model.vocab=259", "model.layers=8")
    alone = small_run("dp=1", *common, model=model)
    expected = pool.run("tests.checkpoint.jobs:train_part", (alone, str(tmp_path / "one"), 0, steps, None), ranks=1)[0]
    seen: list[float] = []
    source: str | None = None
    for index, layout in enumerate(chain):
        run = small_run(layout, *common, model=model)
        arguments = (run, str(tmp_path / "many"), 2 * index, 2 * index + 2, source)
        seen += pool.run("tests.checkpoint.jobs:train_part", arguments, ranks=run.layout.world_size)[0]
        source = str(checkpoint_path(tmp_path / "many", 2 * index + 2))
    assert seen == pytest.approx(expected, rel=1e-9)
    reference = whole_tensors(checkpoint_path(tmp_path / "one", steps))
    final = whole_tensors(checkpoint_path(tmp_path / "many", steps))
    assert final.keys() == reference.keys()
    largest: dict[str, float] = {}
    for name, tensor in reference.items():
        kind = name.partition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), tensor.abs().max().item())
    for name, tensor in reference.items():
        # Where the true gradient is zero (key biases under learned positions) there is only noise to compare.
        scale = max(tensor.abs().max().item(), 1e-3 * largest[name.partition("/")[0]])
        assert (final[name] - tensor).abs().max().item() <= 1e-9 * scale, name


def test_the_same_layout_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    run = small_run("dp=2,tp=2,pp=2,zero=1", "training.steps=4", "training.precision=float32")
    whole = pool.run("tests.checkpoint.jobs:train_part", (run, str(tmp_path / "a"), 0, 4, None), ranks=8)[0]
    first = pool.run("tests.checkpoint.jobs:train_part", (run, str(tmp_path / "b"), 0, 2, None), ranks=8)[0]
    source = str(checkpoint_path(tmp_path / "b", 2))
    second = pool.run("tests.checkpoint.jobs:train_part", (run, str(tmp_path / "b"), 2, 4, source), ranks=8)[0]
    assert first + second == whole
    one, other = checkpoint_path(tmp_path / "a", 4), checkpoint_path(tmp_path / "b", 4)
    assert one.names() == other.names()
    for name in one.names():
        assert name == MANIFEST or (one / name).read() == (other / name).read()
