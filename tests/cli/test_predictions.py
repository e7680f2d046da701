"""A model with prediction layers as a user meets it: trained, drafting in generation, sent to Hugging Face and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec, parse_layout
from tests.cli.command import rows

SMALL = {
    "model.hidden": 32,
    "model.layers": 2,
    "model.prediction_layers": 2,
    "training.steps": 12,
    "training.global_batch": 8,
    "training.sequence": 32,
    "training.device": "cpu",
    "learning_rate.peak": 0.01,
    "checkpoint.every": 12,
}
DRAFTS = {f"model.layers.{layer}.{name}.weight" for layer in (2, 3) for name in ("enorm", "hnorm", "eh_proj")} | {
    f"model.layers.{layer}.{name}.weight"
    for layer in (2, 3)
    for name in ("shared_head.norm", "shared_head.head", "embed_tokens")
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "predicting"
    changes = {**SMALL, "output.folder": folder}
    settings = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    assert main(["train", "--model", "tiny-deepseek-mtp", "--layout", "dp=1", *settings]) == 0
    return folder


def written(capsys: pytest.CaptureFixture[str], target: Path | str, *options: str) -> dict[str, Any]:
    prompts = [argument for prompt in ("def ", "import os", "x") for argument in ("--prompt", prompt)]
    arguments = ["--tokenizer", "byte", "--device", "cpu", "--precision", "float64", "--max-tokens", "12", "--json"]
    assert main(["generate", str(target), *prompts, *arguments, *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def texts(found: dict[str, Any]) -> list[list[int]]:
    return [row["tokens"] for row in found["results"]]


def test_losses_are_told_apart(trained: Path) -> None:
    told = rows(trained / "metrics.jsonl")
    assert all({"loss", "prediction_loss_1", "prediction_loss_2"} <= row.keys() for row in told)
    for name in ("loss", "prediction_loss_1", "prediction_loss_2"):
        assert told[-1][name] < told[0][name] - 0.5, "it learns"


def test_drafts_change_no_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sampling in ((), ("--temperature", "0.5", "--repetition-penalty", "1.1", "--stop", "  e")):
        plain = written(capsys, trained, *sampling)
        assert plain["drafts"] == 0
        for draft in ("1", "2"):
            found = written(capsys, trained, "--draft", draft, "--batch", "2", *sampling)
            assert texts(found) == texts(plain)
            assert 0 < found["accepted_drafts"] <= found["drafts"]


def test_more_drafts_than_layers_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(trained), "--prompt", "a", "--draft", "3"]) == 2
    assert "draft=3 is more than the 2 prediction layers" in capsys.readouterr().err
    assert main(["generate", str(trained), "--prompt", "a", "--draft", "-1"]) == 2
    assert "draft=-1 is too small; use draft=0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "cp=2,dp=2,ep=2"])
def test_drafts_on_other_layouts(trained: Path, pool: Pool, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cuboid.generate.batch import Request
    from cuboid.generate.detokenizer import Words
    from cuboid.generate.target import find_target
    from tests.generate.jobs import together

    target = find_target(str(trained), "byte")
    requests = [Request(number, tuple(b"def main"[: number + 1]), 9) for number in range(5)]
    found = []
    for where, draft in (("dp=1", 0), (layout, 2)):
        fields: dict[str, Any] = {"slots": 2, "length": 17, "chunk": 5, "device": "cpu", "precision": "float64"}
        spec = GenerationSpec(
            model=target.model, layout=parse_layout(where), weights=target.weights, draft=draft, **fields
        )
        ways = [(SamplingSpec(), Words(ends=(256,)))]
        job = "tests.generate.jobs:drafted" if draft else "tests.generate.jobs:texts"
        found += together(pool.run(job, (spec, requests, ways), ranks=spec.layout.world_size))
    assert found[0] == found[1]


def test_hugging_face_and_back(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exported"
    assert main(["export", str(trained), "--to", f"hf:{folder}"]) == 0
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() >= DRAFTS
    assert torch.equal(stored["model.layers.2.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(stored["model.layers.3.shared_head.head.weight"], stored["lm_head.weight"])
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    capsys.readouterr()
    plain, drafted = written(capsys, trained), written(capsys, f"hf:{folder}", "--draft", "2")
    assert texts(drafted) == texts(plain)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(b"def ")])
    said = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert said[0, 4:].tolist() == texts(plain)[0][:4]
    assert main(["import", f"hf:{folder}", "-o", str(tmp_path / "tune.toml")]) == 0
    assert "prediction_layers = 2" in (tmp_path / "tune.toml").read_text()
