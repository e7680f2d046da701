"""A step of another trainer beside one process: what is right is equal, and what is not is located."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cuboid.cli.main import main
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.model.huggingface import state_to_huggingface
from cuboid.spec.huggingface_writer import config_from_model
from cuboid.verification.against import judge_step, step_run
from cuboid.verification.locate import recorded_references
from cuboid.verification.make import verification_run

FEW = ("model.layers=2", "model.hidden=32", "model.ffn=48", "model.vocab=64", "training.sequence=8")
NO_DOCUMENTS = ("data.attention_within_documents=false", "data.positions_within_documents=false")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer without bugs would have written."""
    folder = tmp_path_factory.mktemp("step")
    run = verification_run("dp=1", overrides=(*FEW, *NO_DOCUMENTS, "training.global_batch=4"), steps=1)
    (trace,), _ = recorded_references(run, 0)
    samples = [make_source(run).at(place) for place in range(4)]
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config_from_model(run.model)))
    written = {"model/model": trace.start, "gradients": trace.gradients[0], "parameters": trace.parameters[0]}
    for name, state in written.items():
        made = {key: value.contiguous() for key, value in state_to_huggingface(run.model, state).items()}
        save_file(made, folder / f"{name}.safetensors")
    batch = {name: torch.stack([sample[at] for sample in samples]) for at, name in enumerate(("tokens", "labels"))}
    save_file(batch, folder / "batch.safetensors")
    optimizer = {key: getattr(run.optimizer, key) for key in ("beta1", "beta2", "epsilon", "weight_decay")}
    told = {"loss": trace.losses[0], "learning_rate": 1e-3, "gradient_clip": run.training.gradient_clip}
    told |= {"gradient_norm": trace.gradient_norms[0], "precision": "float64", "dp": 2, "micro_batches": 2, **optimizer}
    (folder / "step.json").write_text(json.dumps(told))
    return folder


def copied(folder: Path, to: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


def test_a_right_step_is_equal(right: Path) -> None:
    verdict = judge_step(0, str(right))
    assert verdict["passed"] and verdict["located"] is None, verdict


@pytest.mark.parametrize(
    ("file", "name", "factor", "where", "cause"),
    [
        ("gradients", "model.layers.1.mlp.down_proj.weight", 2.0, "reduction", "factor 2 = dp or micro-batches"),
        ("gradients", "model.norm.weight", 0.0, "reduction", "it is zero"),
        ("parameters", "model.embed_tokens.weight", -1.0, "update", ""),
    ],
)
def test_what_is_wrong_is_located(
    right: Path, tmp_path: Path, file: str, name: str, factor: float, where: str, cause: str
) -> None:
    folder = copied(right, tmp_path)
    tensors = load_file(folder / f"{file}.safetensors")
    tensors[name] *= factor
    save_file(tensors, folder / f"{file}.safetensors")
    located: dict[str, Any] = judge_step(0, str(folder))["located"]
    assert located["where"] == where and cause in located["cause"], located


def test_a_loss_that_is_not_divided_by_its_tokens_is_named(right: Path, tmp_path: Path) -> None:
    folder = copied(right, tmp_path)
    tokens = int((load_file(folder / "batch.safetensors")["labels"] >= 0).sum())
    gradients = load_file(folder / "gradients.safetensors")
    save_file({name: tokens * x for name, x in gradients.items()}, folder / "gradients.safetensors")
    cause = judge_step(0, str(folder))["located"]["cause"]
    assert cause == f"factor {tokens}: the sum of losses is not divided by the tokens that count"


def test_what_cannot_be_compared_is_refused(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(right, tmp_path)
    told = json.loads((folder / "step.json").read_text())
    (folder / "step.json").write_text(json.dumps({**told, "micro_batches": 3}))
    with pytest.raises(UserError, match="does not divide 4 samples"):
        step_run(str(folder))
    (folder / "step.json").write_text(json.dumps({**told, "momentum": 0.9}))
    assert main(["verify", "--against", str(folder)]) == 2
    assert "unknown key momentum" in capsys.readouterr().err
    for option in ("--layout=dp=2", "--set=training.steps=2", "--precision=bf16"):
        assert main(["verify", "--against", str(folder), option]) == 2
    for key in ("dp", "loss", "gradient_norm"):
        (folder / "step.json").write_text(json.dumps({**told, key: "x"}))
        with pytest.raises(UserError, match=f'step.json: {key}="x" is a string'):
            step_run(str(folder))


@pytest.mark.parametrize(
    ("file", "name", "value", "sentence"),
    [
        ("batch", "tokens", 64, "tokens hold 64, no token of the model; use 0 to 63$"),
        ("batch", "labels", -1, "labels hold -1, no token of the model; use 0 to 63, or -100"),
        ("batch", "labels", -100, "labels hold -100 alone"),
        ("batch", "tokens", 0.5, "tokens are float32; write them as int64"),
        ("model/model", "model.norm.weight", float("nan"), "model.norm.weight holds numbers that are not finite"),
        ("gradients", "model.norm.weight", 1, "gradients.safetensors: model.norm.weight is int64"),
        ("parameters", "model.norms.weight", 1.0, "parameters.safetensors: the checkpoint holds model.norms.weight"),
    ],
)
def test_tensors_that_are_none_of_a_step_are_refused(
    right: Path, tmp_path: Path, file: str, name: str, value: float, sentence: str
) -> None:
    folder = copied(right, tmp_path)
    tensors = load_file(folder / f"{file}.safetensors")
    tensors[name] = torch.full(tensors[name].shape if name in tensors else (1,), value)
    save_file(tensors, folder / f"{file}.safetensors")
    with pytest.raises(UserError, match=sentence):
        judge_step(0, str(folder))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("bug", "cause"), [("", ""), ("--mean-of-means", "mean of means"), ("--decay-all", "weight decay on a parameter")]
)
def test_a_loop_of_transformers(
    tmp_path: Path, bug: str, cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step", str(tmp_path / "step"), *([bug] if bug else [])])
    runpy.run_path("examples/step_of_transformers.py", run_name="__main__")
    assert main(["verify", "--against", str(tmp_path / "step")]) == (1 if bug else 0)
    assert cause in capsys.readouterr().out
