"""Text written during training is what the checkpoint of that step writes, on any layout of the training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.samples import prompts_of
from cuboid.generate.target import find_target
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec
from cuboid.spec.layout import Layout
from cuboid.spec.run import build_run
from cuboid.training.run_folder import prepare_folder
from cuboid.training.trainer import train
from tests.generate.jobs import texts
from tests.training.cases import short_run

SMALL = ("model.layers=4", "model.hidden=32", "model.ffn=48", "model.heads=4", "model.kv_heads=2")
WISHES = ("samples.every=2", "samples.max_tokens=9")
FIELDS = (*SMALL, *WISHES, "training.steps=4", "checkpoint.every=2", "samples.temperature=0.7", "training.seed=3")


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=1", "tiny-llama"),
        ("dp=2,zero=3,tp=2", "tiny-llama"),
        ("pp=2,schedule=zbv,cp=2", "tiny-llama"),
        ("pp=2,schedule=interleaved,dp=2,ep=2", "tiny-mixtral"),
    ],
)
def test_samples_are_what_the_checkpoint_writes(pool: Pool, tmp_path: Path, layout: str, model: str) -> None:
    run = short_run(layout, str(tmp_path / "run"), *FIELDS, model=model)
    run = replace(run, samples=replace(run.samples, prompts=("def ", "import os", "é")))
    prepare_folder(run)
    pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size)
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (step, prompt) for step in (2, 4) for prompt in run.samples.prompts
    ]
    for step in (2, 4):
        target = find_target(str(checkpoint_path(tmp_path / "run" / "checkpoints", step)))
        spec = GenerationSpec(
            model=run.model, layout=Layout(), weights=target.weights, slots=1, length=30, device="cpu"
        )
        requests = [Request(n, target.words.encode(text), 9) for n, text in enumerate(run.samples.prompts)]
        sampling = SamplingSpec(max_tokens=9, temperature=0.7, seed=3)
        (written,), *_ = texts(0, spec, requests, [(sampling, target.words)])
        expected = [target.words.decode(written[number]) for number in range(3)]
        assert [row["text"] for row in rows if row["step"] == step] == expected


def test_samples_change_nothing_in_the_training(pool: Pool, tmp_path: Path) -> None:
    losses = []
    for name, wishes in (("with", WISHES), ("without", ())):
        run = short_run("dp=2,zero=1", str(tmp_path / name), *SMALL, *wishes, "training.steps=5")
        prepare_folder(run)
        losses.append(pool.run("tests.training.cases:train_rank", (run,), ranks=2)[0])
    assert losses[0] == losses[1]


def test_what_cannot_be_written_is_refused() -> None:
    table = {"model": "tiny-llama", "data": {"source": "synthetic"}, "samples": {"every": 1}}
    with pytest.raises(UserError, match=r"samples\.every=1 needs text and the data has no tokenizer; use every=0"):
        prompts_of(build_run(table))
    with pytest.raises(UserError, match=r"samples\.prompts has an empty one"):
        build_run({"model": "tiny-llama", "samples": {"every": 1, "prompts": [""]}})


def test_a_training_that_was_given_no_sampler_refuses_to_drop_samples(tmp_path: Path) -> None:
    run = short_run("dp=1", str(tmp_path / "run"), *WISHES)
    with pytest.raises(UserError, match=r"samples\.every=2 needs make_sampler; pass one, or use every=0"):
        train(run, 0, torch.device("cpu"))
    assert not (tmp_path / "run").exists()
