"""Text from models of one's own: what recomputing the whole text with their modules gives, by hand and by the command,
on any number of replicas; what has no next token is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cuboid
from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.generate.target import find_target
from cuboid.launch.pool import Pool
from cuboid.model.custom import Model, WholeModel
from cuboid.model.family import family
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import build_run

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ["def main(", "import", "x"]


def trained(pool: Pool, folder: Path, name: str) -> Path:
    table = {"model": f"python:{EXAMPLES / name}.py:build", "layout": "dp=2"}
    small = ["training.steps=3", "training.sequence=16", "training.global_batch=2", "training.device=cpu"]
    run = build_run(table, [*small, "checkpoint.every=3", "learning_rate.peak=0.01", f"output.folder={folder}"])
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    return folder


def by_hand(folder: Path, prompt: str, count: int) -> list[int]:
    spec = cuboid.make_run({"model": f"python:{EXAMPLES / 'own_attention'}.py:build"}).model
    assert isinstance(spec, PythonModelSpec) and isinstance(spec.built, Model)
    model = WholeModel(spec.built, 5)
    model.load_state_dict(cuboid.load_checkpoint(folder))
    tokens = list(prompt.encode())
    for _ in range(count):
        batch = {"tokens": torch.tensor([tokens])}
        x = model.embedding(batch)
        for block in model.layers.values():
            x = block(x, batch)
        tokens.append(int(model.head.output.logits(model.head.norm(x))[0, -1].argmax()))  # type: ignore[union-attr,operator]
    return tokens[len(prompt) :]


def generated(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, object]]:
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert main(["generate", str(folder), *asked, "--max-tokens", "6", "--device", "cpu", "--json", *options]) == 0
    results: list[dict[str, object]] = json.loads(capsys.readouterr().out)["results"]
    return results


def test_text_is_what_the_modules_say(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(pool, tmp_path / "run", "own_attention")
    alone = generated(folder, capsys)
    assert [row["tokens"] for row in alone] == [by_hand(folder, prompt, 6) for prompt in PROMPTS]
    chance = ("--temperature", "1.0", "--seed", "4")
    drawn = generated(folder, capsys, *chance)
    assert [row["tokens"] for row in drawn] != [row["tokens"] for row in alone]
    replicas = generated(folder, capsys, *chance, "--layout", "dp=2")
    assert [row["tokens"] for row in replicas] == [row["tokens"] for row in drawn]
    assert main(["generate", str(folder), "--prompt", "x", "--layout", "tp=2"]) == 2
    assert "splits a model of one's own, which generation does not; use dp only" in capsys.readouterr().err


def test_a_model_without_a_next_token_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder = trained(pool, tmp_path / "run", "vision_transformer")
    with pytest.raises(UserError, match=r"its head, Classifier, has no `logits\(x, batch\)`"):
        find_target(str(folder))


def test_logits_of_a_family_are_those_of_its_loss() -> None:
    model = WholeModel(family("tiny-llama"), 0)
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens, "labels": tokens.flip(1)}
    x = model.embedding(batch)
    for block in model.layers.values():
        x = block(x, batch)
    logits = model.head.logits(x, batch)  # type: ignore[operator]
    assert logits.shape == (2, 6, 259)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert torch.allclose(loss, model.head(x, batch), rtol=1e-6)
