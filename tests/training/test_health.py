"""Runs that go wrong say so, once, with the setting to change; good ones say nothing."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.launch.pool import Pool
from cuboid.report.watch import Watched
from cuboid.spec.run import build_run
from cuboid.training.health import COLLAPSED_STEPS, Health
from cuboid.training.routers import DEAD_STEPS, DEAD_TOKENS, DeadExperts
from tests.training.cases import short_run

Row = dict[str, Any]


def health(*overrides: str, model: str = "tiny-llama", past: list[Row] | None = None) -> Health:
    return Health(build_run({"model": model}, overrides), past or [])


def row(step: int, loss: float = 5.5, norm: float = 1.0, activation: float = 1.0, **more: Any) -> Row:
    return {"step": step, "loss": loss, "gradient_norm": norm, "activation_rms": activation, "finite": True, **more}


def told(watcher: Health, rows: list[Row], routers: torch.Tensor | None = None) -> list[tuple[int, str, str]]:
    dead, found = DeadExperts(), []
    for each in rows:
        dying = None if routers is None else dead.add(routers[:, :-3])
        found += [(each["step"], trouble.kind, trouble.text) for trouble in watcher.observe(each, routers, dying)]
    return found


def test_the_first_loss() -> None:
    (high,) = told(health(), [row(1, 9.0), row(2, 9.0)])
    assert high[:2] == (1, "first loss")
    assert high[2].startswith("the first loss is 9.00, far from ln(vocabulary) = 5.56 of random weights: they are too")
    assert high[2].endswith("lower model.initial_std=0.02")
    ((_, _, low),) = told(health(), [row(1, 3.8)])
    assert low.endswith("labels repeat their inputs or are mostly padding; check data.source=python-stdlib")
    assert not told(health(), [row(1, 6.9)]) and not told(health(), [row(1, 4.1)]), "near enough"
    assert not told(health("training.start_from=hf:somewhere"), [row(1, 2.0)]), "weights that have learned"
    assert not told(health(), [row(8, 2.0)]), "a run whose first rows are lost"


def test_loss_above_its_start() -> None:
    """After the warm-up, and not by noise."""
    rows = [row(1, 5.5), *(row(step, 7.0) for step in range(2, 40))]
    ((step, kind, text),) = told(health("learning_rate.warmup_steps=10"), rows)
    assert (step, kind) == (20, "loss")
    assert "7.00 beside 5.50: lower learning_rate.peak=0.0003 or raise learning_rate.warmup_steps=10" in text
    draw = random.Random(0)
    noisy = [row(step, 2 + draw.gauss(0, 0.3)) for step in range(1, 3000)]
    assert not told(health("training.start_from=hf:somewhere"), noisy), "a fine-tuning that hardly learns"
    stays = [row(step, 5.5 + draw.gauss(0, 0.1)) for step in range(1, 500)]
    assert not told(health(), stays), "nor one that does not learn at all"


def test_gradients_out_of_proportion() -> None:
    spikes = [row(step, norm=50.0 if step in (40, 90) else 1.0) for step in range(1, 120)]
    assert not told(health(), spikes), "single bad batches are no trend"
    rows = [row(step, norm=1.0 if step < 20 else 40.0) for step in range(1, 50)]
    ((step, kind, text),) = told(health(), rows)
    assert (step, kind) == (22, "gradient norm") and text.startswith("gradient norm 40 is 40 × the median")
    ((step, _, text),) = told(health(), [row(step, norm=400.0) for step in range(1, 50)])
    assert step == 10 and text.endswith("lower learning_rate.peak=0.0003, or lower model.initial_std=0.02")
    ((_, _, text),) = told(health("training.gradient_clip=0.001"), [row(step) for step in range(1, 50)])
    assert text.endswith("raise training.gradient_clip=0.001")
    assert not told(health("training.gradient_clip=0"), [row(step, norm=400.0) for step in range(1, 50)])
    bad = [row(step, norm=1e9, finite=False) if step % 2 else row(step) for step in range(2, 50)]
    left = [row(step, norm=1e9, left_out="a spike") if step % 2 else row(step) for step in range(2, 50)]
    assert not told(health(), bad) and not told(health(), left), "others tell of these"


def test_activations_that_grow() -> None:
    grows = [row(step, activation=0.02 * 1.3**step) for step in range(1, 50)]
    ((step, kind, text),) = told(health(), grows)
    assert kind == "activations" and step == math.ceil(math.log(100 / 0.02, 1.3))
    assert "from 0.026 in the first steps to 115 and still grow: lower learning_rate.peak=0.0003" in text
    assert not told(health(), [row(step, activation=min(0.02 * 1.3**step, 90.0)) for step in range(1, 90)])
    slowly = [row(step, activation=0.02 * 1.008**step) for step in range(1, 1500)]
    assert not told(health(), slowly), "17 % in 20 steps is what learning may do"
    ((_, _, text),) = told(health("training.precision=fp16"), [row(step, activation=700.0) for step in range(1, 9)])
    assert text.endswith("fp16 ends at 65,504: use training.precision=bf16")


def loads(*layers: list[float]) -> torch.Tensor:
    return torch.tensor([[*layer, 0.0, 0.0, 0.0] for layer in layers], dtype=torch.float64)


def test_routers_that_collapse_and_experts_that_die() -> None:
    even, rows = [100.0] * 8, [row(step) for step in range(1, 60)]
    one, two = [400.0, 400.0, *[0.0] * 6], [390.0, 402.0, *[2.0] * 4, 0.0, 0.0]
    found = told(health(model="tiny-mixtral"), rows, loads(one, even, two, one, two))
    ((step, kind, text),) = found
    assert (step, kind) == (COLLAPSED_STEPS, "collapsed routers"), "which says more than that experts are dead"
    assert text.startswith("routers of layers 0, 2–4 have collapsed: 2 of 8 experts had 99% or more of the assignments")
    assert text.endswith("raise model.mixture.balance_coefficient=0.02 (0.1 to 0.3 hold with noise)")
    uneven = [300.0, 200.0, 100.0, 50.0, 50.0, 50.0, 50.0, 0.0]
    quiet = health("model.mixture.router_noise=0", model="tiny-deepseek")
    ((step, kind, text),) = told(quiet, rows, loads(even * 2, uneven * 2))
    assert (step, kind) == (DEAD_STEPS, "dead experts")
    assert text == "2 experts have had no token for 25 steps or more, in layer 2; set model.mixture.router_noise=1"
    few = [2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.0]
    ((step, *_),) = told(health(model="tiny-mixtral"), rows, loads(even, few))
    assert step == DEAD_TOKENS > DEAD_STEPS, "where there are few tokens, chance may leave an expert without one"
    assert not told(health(model="tiny-mixtral"), rows[:19], loads(one)), "routers come back from that"
    unsteady, less, found = health(model="tiny-mixtral"), [330.0, 330.0, *[20.0] * 6], []
    for each in rows:
        found += told(unsteady, [each], loads(one if each["step"] % 4 else less))
    assert [kind for _, kind, _ in found] == ["collapsed routers"], "less in one of four steps does not hide it"
    shared = [400.0, 100.0, 80.0, 60.0, 50.0, 50.0, 40.0, 20.0]
    assert not told(health(model="tiny-mixtral"), rows, loads(shared)), "the other choice of each token is its own"


def test_a_run_that_resumes_remembers() -> None:
    rows = [row(step, activation=0.02 * 1.3**step) for step in range(1, 50)]
    past = [*rows[:33], {**rows[33], "warnings": [{"kind": "activations", "text": "told"}]}]
    assert not told(health(past=past), rows[34:])
    assert not told(health(past=[row(1, 9.0, warnings=[{"kind": "first loss", "text": "told"}])]), [row(2, 9.0)])
    long = [row(1), *(row(step, activation=0.02) for step in range(2, 5000))]
    later = [row(step, activation=0.02 * 1.3 ** (step - 5000)) for step in range(5000, 5050)]
    assert told(health(past=long), later)[0][:2] == (5033, "activations")
    assert told(health(past=rows[:20]), rows[20:])[0][:2] == (33, "activations"), "its first steps are not those of now"


@pytest.mark.parametrize(
    ("model", "settings", "kinds"),
    [
        ("tiny-llama", ["learning_rate.peak=2e-3"], set()),
        ("tiny-mixtral", ["learning_rate.peak=2e-3"], set()),
        ("tiny-llama", ["model.initialization=flat", "model.initial_std=10"], {"first loss", "gradient norm"}),
        ("tiny-gpt2", ["learning_rate.peak=1"], {"loss", "activations"}),
        ("tiny-llama", ["learning_rate.peak=1", "output.health=false"], set()),
    ],
)
def test_real_runs(pool: Pool, tmp_path: Path, model: str, settings: list[str], kinds: set[str]) -> None:
    run = short_run("dp=1", str(tmp_path), "training.steps=30", "model.layers=2", *settings, model=model)
    pool.run("tests.training.cases:train_rank", (run,), ranks=1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [warning["kind"] for each in rows for warning in each.get("warnings", ())]
    assert len(found) == len(set(found)) and set(found) >= kinds and bool(found) == bool(kinds)
    assert all(each["activation_rms"] > 0 for each in rows)
    if kinds:
        (tmp_path / "run.toml").write_text('model = "tiny-llama"\n')
        watched = Watched.open(tmp_path, "cpux1")
        watched.refresh()
        assert [text.split(":")[0] for text in watched.state()["warnings"]]
