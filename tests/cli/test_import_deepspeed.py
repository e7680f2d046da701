"""`cuboid import-deepspeed` and `cuboid models`."""

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.spec.load import catalog_models
from cuboid.spec.run import load_run
from cuboid.spec.training import TO_CHOOSE

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "pipeline": {"stages": 2},
}


def written(folder: Path, **changes: object) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def test_a_run_file_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.toml"
    arguments = ["import-deepspeed", written(tmp_path), "--model", "tiny-llama", "--world-size", "8"]
    assert main([*arguments, "-o", str(target), "--set", "training.steps=7"]) == 0
    assert capsys.readouterr().out == ""
    run = load_run(target)
    assert (str(run.layout), run.training.global_batch, run.training.steps) == ("dp=4,tp=1,pp=2,micro_batch=2", 32, 7)
    assert run.data.source == TO_CHOOSE, "nobody said on what"
    assert main([*arguments, "--set", "data.source=python-stdlib"]) == 0
    head, _, rest = capsys.readouterr().out.partition("layout = ")
    assert "training.sequence" in head and all(line.startswith("# ") for line in head.splitlines())
    assert rest.startswith('"dp=4,tp=1,pp=2,micro_batch=2"') and 'source = "python-stdlib"' in rest


def test_json_shows_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", written(tmp_path), "--model", "tiny-llama", "--world-size", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["training"]["precision"]) == ("tiny-llama", "bf16")


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = written(tmp_path, fp32_only=1, elasticity={"enabled": True})
    assert main(["import-deepspeed", half, "--model", "tiny-llama", "--world-size", "8"]) == 2
    assert capsys.readouterr().err.startswith("error: DeepSpeed keys that cannot be honoured: elasticity (give train_")
    nowhere = str(tmp_path / "none" / "run.toml")
    plain = written(tmp_path)
    assert main(["import-deepspeed", plain, "--model", "tiny-llama", "--world-size", "8", "-o", nowhere]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["import-deepspeed", str(tmp_path / "none.json"), "--model", "tiny-llama"]) == 2
    assert "none.json does not exist" in capsys.readouterr().err


def test_models_lists_the_catalog(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in catalog_models())
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama3-8b"]["parameters"] == 8_030_261_248
    assert list(rows) == list(catalog_models())
