"""Routers after a step: which experts are dead, what a row says, and how biases move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.spec.sharding import BALANCES
from cuboid.training.routers import DEAD_STEPS, WINDOWS, DeadExperts, ExpertLoads, rebalance, report, summed_statistics
from tests.parallel.cases import CPU, small_run
from tests.training.cases import short_run


def mixed(*overrides: str) -> Run:
    return small_run("dp=1", *overrides, model="tiny-mixtral")


def statistics(run: Run, loads: list[list[float]], sums: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> torch.Tensor:
    assert run.model.mixture is not None
    return torch.tensor([[*row, *sums] for row in loads], dtype=torch.float64)


def test_an_expert_is_dead_after_many_steps_in_which_others_had_tokens() -> None:
    dead, asked = DeadExperts(), torch.tensor([[4.0, 0.0, 4.0, 8.0]])
    seen = [dead.add(asked)[0].tolist() for _ in range(DEAD_STEPS)]
    assert not any(map(any, seen[:-1])) and seen[-1] == [False, True, False, False]
    assert not dead.add(torch.tensor([[4.0, 1.0, 4.0, 8.0]])).any(), "one token brings it back"
    assert not dead.add(asked).any(), "and it must be idle for as long again"


def test_where_all_have_few_tokens_none_is_dead() -> None:
    dead = DeadExperts()
    for _ in range(2 * DEAD_STEPS - 1):
        assert not dead.add(torch.tensor([[1.0, 1.0, 0.0, 1.0]])).any(), "the mean one had less than fifty"


def test_a_row_of_the_routers() -> None:
    run = mixed("model.mixture.balance_coefficient=0.01", "model.mixture.z_coefficient=0.001")
    batch, tokens = run.training.global_batch, run.training.global_batch * run.training.sequence
    layers = run.model.layers
    experts = run.model.mixture.experts if run.model.mixture else 0
    even = [[10.0] * experts for _ in range(layers - 1)]
    uneven = [30.0, *[10.0] * (experts - 1)]
    told = report(statistics(run, [uneven, *even], (2.0 * batch, 3.0 * tokens, 1.0)), run, batch, dead=2)
    assert told.balance_loss == pytest.approx(2.0) and told.z_loss == pytest.approx(3.0)
    assert (told.dropped, told.dead) == (layers, 2)
    mean = (30.0 + 10.0 * (experts - 1)) / experts
    assert told.largest_load == pytest.approx([30.0 / mean, *[1.0] * (layers - 1)])
    assert told.numbers["routers/largest_load"] == pytest.approx(30.0 / mean)


def test_a_loss_that_takes_no_part_is_not_told() -> None:
    run = mixed("model.mixture.balance_coefficient=0", "model.mixture.z_coefficient=0")
    experts = run.model.mixture.experts if run.model.mixture else 0
    told = report(statistics(run, [[10.0] * experts] * run.model.layers), run, 8)
    assert told.balance_loss is None and told.z_loss is None
    assert set(told.numbers) == {"routers/dropped", "routers/largest_load", "routers/dead"}


def test_biases_move_towards_experts_that_lack_tokens_and_not_in_a_skipped_step() -> None:
    run = mixed("model.mixture.router_bias=true", "model.mixture.bias_rate=0.5")
    engine = build_engine(run, 0, CPU)
    mixture = run.model.mixture
    assert mixture is not None and engine.balance is not None
    busy = [8.0, *[4.0] * (mixture.experts - 2), 0.0]
    told = statistics(run, [busy] * run.model.layers)
    biases = [unit.master for unit in engine.units if unit.name.endswith(BALANCES)]
    assert len(biases) == run.model.layers
    rebalance(engine, told, torch.tensor(False))
    assert not any(bias.any() for bias in biases)
    rebalance(engine, told, torch.tensor(True))
    mean = sum(busy) / len(busy)
    expected = [0.5 * ((load < mean) - (load > mean)) for load in busy]
    assert all(bias.tolist() == expected for bias in biases)


def test_a_dense_model_has_no_statistics() -> None:
    assert summed_statistics(build_engine(small_run("dp=1"), 0, CPU)) is None


def test_a_run_that_resumes_keeps_the_windows_before(tmp_path: Path) -> None:
    steps = 10 * WINDOWS
    run = short_run("dp=1", str(tmp_path), f"training.steps={steps}", "output.log_every=1", model="tiny-mixtral")
    experts = run.model.mixture.experts if run.model.mixture else 0
    told = statistics(run, [[1.0, *[0.0] * (experts - 1)]] * run.model.layers)
    loads = ExpertLoads(run, 0)
    for step in range(1, 36):
        loads.add(step, told)
    loads.close()
    again = ExpertLoads(run, 20)
    for step in range(21, 31):
        again.add(step, told)
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert [(row["first"], row["step"]) for row in rows] == [(1, 10), (11, 20), (21, 30)]
    assert rows[0]["loads"][0] == [100 * experts, *[0] * (experts - 1)]
