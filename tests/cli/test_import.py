"""`cuboid import hf:DIR` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.spec.run import load_run
from tests.checkpoint.pretrained import save_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("saved") / "small", "qwen3")


def test_a_run_file_that_starts_from_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tune.toml"
    assert (
        main(["import", f"hf:{folder}", "-o", str(file), "--set", "layout=dp=2,tp=2", "--set", "training.steps=7"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"hf:{folder}: qwen3, 39,360 parameters, 157,440 bytes, every tensor there"
    assert lines[1].startswith(f"next: cuboid data build FILES --tokenizer {folder} -o tune-tokens")
    assert lines[2] == f"then: cuboid train {file}"
    run = load_run(file)
    assert (run.model.name, run.model.family, run.model.parameters) == ("small", "qwen3", 39_360)
    assert (run.training.start_from, run.training.sequence, run.training.steps) == (f"hf:{folder}", 64, 7)
    assert (run.data.source, run.output.folder, str(run.layout)) == ("tune-tokens", "runs/tune", "dp=2,tp=2,pp=1")
    assert main(["import", f"hf:{folder}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# Starts from hf:{folder}. Its data: cuboid data build FILES --tokenizer {folder}")
    assert main(["import", f"hf:{folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 39_360


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import", "model"], "source=model has no kind; write hf:model"),
        (["import", "hf:none"], "hf:none is no folder; name a folder with config.json"),
        (["train", "--set", "training.start_from=hf:none"], "hf:none is no folder; name a folder with config.json"),
        (["train", "--set", "training.start_from=none"], "none holds no checkpoint; name a run"),
    ],
)
def test_refusals(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert list(tmp_path.iterdir()) == [], "nothing was begun"
