"""`cuboid export RUN --to hf:DIR` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.cli.export import parse_size
from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = small_run("dp=2", "training.precision=float32", "model.layers=2")
    pool.run("tests.checkpoint.jobs:train_part", (run, str(folder / "checkpoints"), 0, 1, None), ranks=2)
    return folder


def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert main(["export", str(folder), "--to", f"hf:{target}", "--shard-size", "100kB", "--precision", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{target}: 131,776 parameters as bf16, 3 files of 263,552 bytes"
    where = checkpoint_path(folder / "checkpoints", 1)
    assert lines[1] == f"from {where}, after step 1; tokenizer: none, because data.source=synthetic holds random tokens"
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert main(["export", str(where), "--to", f"hf:{tmp_path / 'json'}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], report["files"], report["step"]) == ("float32", ["model.safetensors"], 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "RUN", "--to", "hf:RUN"], "hf:RUN exists already"),
        (["export", "RUN", "--to", "hf:out", "-o", "x"], "output=x is for plans; name the folder after hf:"),
        (
            ["export", "RUN", "--to", "hf:out", "--precision", "int8"],
            "precision=int8 is unknown; use float32, bf16, float16 or",
        ),
        (["export", "RUN", "--to", "hf:out", "--shard-size", "big"], "shard-size=big is not a size; write it like 5GB"),
        (
            ["export", "RUN", "--to", "megatron"],
            "RUN is a folder and to=megatron takes a plan file; use --to hf:FOLDER",
        ),
        (
            ["export", "RUN", "--to", "megatron", "--precision", "bf16"],
            "precision=bf16 is for models; use it with --to hf:",
        ),
        (["export", "none", "--to", "hf:out"], "none does not exist; name a run's folder"),
        (["export", "RUN/..", "--to", "hf:out"], "RUN/.. holds no checkpoint; name a run that was trained with"),
    ],
)
def test_refusals(
    folder: Path,
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.parent.iterdir())
    assert main([argument.replace("RUN", folder.name) for argument in arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence.replace('RUN', folder.name)}")
    assert sorted(folder.parent.iterdir()) == before


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", "20k", "7")] == [5 * 10**9, 3 * 2**19, 20000, 7]
    for text in ("0", "-1GB", "GB", "5TB!"):
        with pytest.raises(UserError, match="is not a size"):
            parse_size(text)
