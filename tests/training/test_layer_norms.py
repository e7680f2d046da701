"""Norms by layer are the same on any layout, and measuring them changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.report.page import collect
from cuboid.report.source import open_source
from cuboid.spec.run import dump_run
from cuboid.training.layer_norms import LayerNorms
from cuboid.training.offload import OffloadedState
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import start_step
from tests.parallel.cases import CPU, small_run
from tests.training.cases import short_run

ON = "output.layer_norms=true"


def one_device(layout: str, model: str) -> Any:
    """What the layout computes, in one process."""
    run = small_run(layout, ON, model=model)
    same = [f"training.global_batch={run.training.global_batch}", f"model.layers={run.model.layers}"]
    return small_run("dp=1", ON, *same, f"training.sequence={run.training.sequence}", model=model)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2,tp=2,pp=2,zero=1", "tiny-llama"),
        ("tp=4,pp=2,sequence_parallel=false", "tiny-qwen3"),
        ("dp=2,zero=3,recompute=full", "tiny-deepseek"),
        ("dp=2,ep=2,pp=2,zero=2,schedule=zb1p", "tiny-mixtral"),
        ("cp=2,tp=2", "tiny-gpt2"),
    ],
)
def test_any_layout_measures_the_same(pool: Pool, layout: str, model: str) -> None:
    run = small_run(layout, ON, model=model)
    ((expected, _),) = pool.run("tests.parallel.cases:layer_norms", (one_device(layout, model),), ranks=1)
    for found, whole in pool.run("tests.parallel.cases:layer_norms", (run,), ranks=run.layout.world_size):
        for step, norms in enumerate(found):
            for kind, values in norms.items():
                assert values == pytest.approx(expected[step][kind], rel=1e-9, abs=1e-15), kind
            assert sum(norm**2 for norm in norms["gradient_norm"]) ** 0.5 == pytest.approx(whole[step], rel=1e-9)


def step_by_step(precision: str, measures: bool, most: int = 0) -> tuple[list[torch.Tensor], Any]:
    """Two steps: the weights before and after each, the norms of the last. `most`: elements of a load of offloaded
    state."""
    run = small_run("dp=1", ON, f"training.precision={precision}", model="tiny-qwen3")
    engine = build_engine(run, 0, CPU)
    state = OffloadedState(engine.units, CPU, most) if most else None
    optimizer, norms = Optimizer(engine, run.optimizer, state), LayerNorms(engine) if measures else None
    weights = [torch.cat([optimizer_shard.master for optimizer_shard in optimizer.optimizer_shards]).clone()]
    for step in range(2):
        batches = micro_batches(make_source(run), run, step, 0, CPU)
        pending = start_step(engine, optimizer, batches, 1e-3, norms=norms)
        weights.append(torch.cat([optimizer_shard.master for optimizer_shard in optimizer.optimizer_shards]).clone())
    return weights, pending.result().layers


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_measuring_changes_no_bit(precision: str) -> None:
    plain, nothing = step_by_step(precision, measures=False)
    weights, norms = step_by_step(precision, measures=True)
    assert nothing is None and all(map(torch.equal, plain, weights))
    square = sum(norm**2 for norm in norms["update_norm"])
    assert square**0.5 == pytest.approx(float((weights[2] - weights[1]).double().norm()), rel=1e-5)
    square = sum(norm**2 for norm in norms["weight_norm"])
    assert square**0.5 == pytest.approx(float(weights[1].double().norm()), rel=1e-5)
    assert 0.1 < sum(norm**2 for norm in norms["gradient_norm"]) ** 0.5 < 100, "without the loss scale"


def test_state_in_the_hosts_memory() -> None:
    """A unit is updated in several loads then."""
    _, resident = step_by_step("bf16", measures=True)
    _, offloaded = step_by_step("bf16", measures=True, most=1024)
    assert all(values == pytest.approx(resident[kind], rel=1e-5) for kind, values in offloaded.items())


def test_measured_steps_of_a_run(pool: Pool, tmp_path: Path) -> None:
    overrides = ["training.steps=5", "output.layer_norms_every=2", "output.track=jsonl", "model.layers=2", ON]
    run = short_run("dp=1", str(tmp_path), *overrides)
    (tmp_path / "run.toml").write_text(dump_run(run))
    pool.run("tests.training.cases:train_rank", (run,), ranks=1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "layers" in row] == [1, 2, 4, 5]
    measured = rows[-1]["layers"]
    assert {kind: len(values) for kind, values in measured.items()} == {
        "activation_rms": 2,
        "gradient_norm": 4,
        "weight_norm": 4,
        "update_norm": 4,
        "relative_update": 4,
    }
    assert measured["activation_rms"][-1] == pytest.approx(rows[-1]["activation_rms"], rel=1e-3)
    tracked = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert tracked[-1]["layers/gradient_norm/head"] == measured["gradient_norm"][-1]
    assert tracked[-1]["layers/activation_rms/0"] == measured["activation_rms"][0]
    assert not any(name.startswith("layers/") for name in tracked[2])
    shown = collect(open_source(tmp_path, "cpux1"), False)["layers"]
    assert (shown["steps"], shown["measured"]) == ([1, 2, 4, 5], 4)
    assert shown["kinds"][1]["places"] == ["embedding", "0", "1", "head"]
    assert shown["kinds"][1]["values"][-1] == measured["gradient_norm"]
