"""Stop on one layout, continue another: the losses and the state are those of one uninterrupted process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.storage import whole_tensors
from cuboid.launch.pool import Pool
from tests.matrix import rest
from tests.parallel.cases import small_run

CHAINS = [
    ("tiny-qwen3", ["tp=4,zero=1,dp=2", "pp=3,schedule=zb1p", "dp=4,zero=2,shard=2"]),
    ("tiny-llama", ["cp=2,dp=2,zero=3,shard=1", "cp=4,cp_method=ulysses,zero=1", "tp=2,pp=2,cp=2,schedule=zbv"]),
    ("tiny-gpt-oss", ["dp=2,tp=2,ep=4,zero=1", "cp=2,ep=2,pp=2,schedule=zb1p", "tp=4,zero=2"]),
    *rest(
        ("tiny-gemma3", ["cp=4,zero=1", "tp=2,pp=2,schedule=zbv,cp=2,cp_method=allgather", "dp=4,zero=3"]),
        ("tiny-olmo3", ["tp=4", "cp=2,dp=2,zero=2,cp_method=ulysses", "tp=2,pp=2,zero=1"]),
        ("tiny-gpt2", ["pp=2,schedule=interleaved,dp=2,zero=3", "tp=8", "dp=3,zero=1"]),
    ),
]


@pytest.mark.parametrize(("model", "chain"), CHAINS)
def test_any_layout_goes_on_from_any_other(pool: Pool, tmp_path: Path, model: str, chain: list[str]) -> None:
    steps = 2 * len(chain)
    common = (f"training.steps={steps}", "training.global_batch=12", "model.vocab=259", "model.layers=4")
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


def test_random_generators_go_on_where_the_same_layout_was(pool: Pool, tmp_path: Path) -> None:
    run = small_run("dp=2")
    results = pool.run("tests.checkpoint.jobs:draw_after_loading", (run, str(tmp_path)), ranks=2)
    drawn = [first for first, _ in results]
    assert [again for _, again in results] == drawn
    assert drawn[0] != drawn[1]
    other = small_run("tp=2")
    for seen, unlike in pool.run("tests.checkpoint.jobs:draw_after_loading", (other, str(tmp_path), False), ranks=2):
        assert seen not in drawn and unlike not in drawn, "to another layout they would mean nothing"


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2,zero=1"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_nothing_of_a_damaged_checkpoint_stays_where_a_run_begins_anew(
    pool: Pool, precision: str, layout: str, kind: str
) -> None:
    muon = ("optimizer.kind=muon", "optimizer.normuon=true") if kind == "muon" else ()
    run = small_run(layout, f"training.precision={precision}", "optimizer.average=0.9", *muon)
    assert pool.run("tests.checkpoint.jobs:unlike_a_beginning", (run,), ranks=2) == [[], []]
