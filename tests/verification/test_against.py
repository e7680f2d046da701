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
    return written(tmp_path_factory.mktemp("step"), "tiny-llama", FEW)


def written(folder: Path, model: str, overrides: tuple[str, ...], precision: str = "float64") -> Path:
    """What a trainer without bugs would have written."""
    changed = (*overrides, *NO_DOCUMENTS, "training.global_batch=4")
    run = verification_run("dp=1", model, changed, steps=1, dtype=precision)
    (trace,), _ = recorded_references(run, 0)
    samples = [make_source(run).at(place) for place in range(4)]
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config_from_model(run.model)))
    states = {"model/model": trace.start, "gradients": trace.gradients[0], "parameters": trace.parameters[0]}
    for name, state in states.items():
        made = {key: value.clone().contiguous() for key, value in state_to_huggingface(run.model, state).items()}
        save_file(made, folder / f"{name}.safetensors")
    batch = {name: torch.stack([sample[at] for sample in samples]) for at, name in enumerate(("tokens", "labels"))}
    save_file(batch, folder / "batch.safetensors")
    optimizer = {key: getattr(run.optimizer, key) for key in ("beta1", "beta2", "epsilon", "weight_decay")}
    told = {"loss": trace.losses[0], "learning_rate": 1e-3, "gradient_clip": run.training.gradient_clip}
    told |= {"gradient_norm": trace.gradient_norms[0], "precision": precision, "dp": 2, "micro_batches": 2, **optimizer}
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


def test_a_mixture_is_compared_without_noise_and_auxiliary_losses(tmp_path: Path) -> None:
    own = ("balance_coefficient", "z_coefficient", "bias_rate", "router_noise")
    plain = (*(f"model.mixture.{name}=0.0" for name in own), "model.mixture.router_bias=false")
    folder = written(tmp_path, "tiny-mixtral", ("model.layers=2", "model.vocab=64", *plain))
    told = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**told, "router_aux_loss_coef": 0.02}))
    verdict = judge_step(0, str(folder))
    assert verdict["passed"], verdict


def test_a_bias_whose_gradient_is_zero_but_for_rounding_may_move_either_way(tmp_path: Path) -> None:
    folder = written(tmp_path, "tiny-gpt2", ("model.layers=1", "model.vocab=64"), "float32")
    gradients, start, after = (
        load_file(folder / f"{name}.safetensors") for name in ("gradients", "model/model", "parameters")
    )
    name, key = "transformer.h.0.attn.c_attn.bias", slice(64, 128)
    gradients[name][key] *= -1
    after[name][key] = 2 * start[name][key] - after[name][key]
    save_file(gradients, folder / "gradients.safetensors")
    save_file(after, folder / "parameters.safetensors")
    verdict = judge_step(0, str(folder))
    assert verdict["passed"], verdict
    after[name][key] += 1e-4  # a tenth of the learning rate
    save_file(after, folder / "parameters.safetensors")
    assert judge_step(0, str(folder))["located"]["where"] == "update"


def test_a_family_without_a_reference_is_refused(right: Path, tmp_path: Path) -> None:
    folder = copied(right, tmp_path)
    config = {"model_type": "phi3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    (folder / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["Phi3ForCausalLM"]}))
    with pytest.raises(UserError, match="is of a family that has no reference here; use one of llama, "):
        step_run(str(folder))


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
