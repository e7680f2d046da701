"""`cuboid checkpoint`: what each action prints and how it exits, on folders a person may have."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile, read_manifest
from cuboid.checkpoint.verify import verify
from cuboid.cli.main import main

Shown = Callable[..., str]


@pytest.fixture
def run_folder(written: Path, tmp_path: Path) -> Path:
    """Steps 2, 4 and 6 of a run."""
    manifest = read_manifest(written)
    for step in (2, 4, 6):
        folder = Path(checkpoint_path(tmp_path / "run" / "checkpoints", step).path)
        shutil.copytree(written, folder)
        of_step = Manifest(**{**manifest.__dict__, "step": step, "updates": step, "position": 4 * step})
        (folder / MANIFEST).write_bytes(of_step.render())
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def run(*arguments: object, status: int = 0) -> tuple[str, str]:
        assert main(["checkpoint", *map(str, arguments)]) == status
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_ls_takes_a_run_its_checkpoints_or_one(run_folder: Path, said: Any) -> None:
    for place in (run_folder, run_folder / "checkpoints"):
        table = [line.split() for line in said("ls", place)[0].splitlines()]
        assert table[0] == ["step", "layout", "size", "age", "state"]
        assert [row[0] for row in table[1:]] == ["2", "4", "6"]
        assert all(row[1] == "dp=2,tp=2,pp=1,zero=1" and row[-3:] == ["whole", "by", "size"] for row in table[1:])
    one = said("ls", run_folder / "checkpoints" / "step-00000004", "--deep")[0].splitlines()
    assert len(one) == 2 and one[1].split()[-1] == "whole"
    told = json.loads(said("ls", run_folder, "--json")[0])
    assert [row["step"] for row in told["checkpoints"]] == [2, 4, 6]
    assert all(row["whole"] and row["checked"] == "sizes" and row["seconds_old"] >= 0 for row in told["checkpoints"])


def test_verify_names_file_and_reason_and_exits_with_one(run_folder: Path, said: Any) -> None:
    assert said("verify", run_folder)[0].splitlines()[-1].endswith("is what the manifests say.")
    checkpoints = run_folder / "checkpoints"
    flip(checkpoints / "step-00000006" / "data-00002.bin")
    (checkpoints / "step-00000004" / MANIFEST).unlink()
    assert said("ls", run_folder)[0].count("DAMAGED") == 1, "sizes alone do not show a flipped byte"
    lines = said("verify", run_folder, status=1)[0].splitlines()
    assert "DAMAGED: manifest.json is missing" in lines[2]
    assert "DAMAGED: data-00002.bin does not match its checksum" in lines[3]
    assert lines[4].startswith("1 of 3 checkpoints are whole")
    told = json.loads(said("verify", run_folder, "--json", status=1)[0])
    assert [row["damaged"] for row in told["checkpoints"]] == [
        [],
        [{"file": MANIFEST, "reason": "is missing"}],
        [{"file": "data-00002.bin", "reason": "does not match its checksum"}],
    ]
    assert told["damaged"] == 2


def test_show_says_what_it_is_of(run_folder: Path, said: Any) -> None:
    told = json.loads(said("show", run_folder, "--json")[0])
    assert (told["step"], told["position"], told["tokens"], told["model"]) == (6, 24, 24 * 8, "tiny-llama")
    assert told["layout"] == "dp=2,tp=2,pp=1,zero=1" and told["precision"] == "float64"
    names = [tensor["name"] for tensor in told["tensors"]]
    assert {name.partition("/")[0] for name in names} == {"parameter", "exp_avg", "exp_avg_sq", "generator"}
    of_model = [tensor["bytes"] for tensor in told["tensors"] if not tensor["name"].startswith("generator/")]
    assert 3 * 8 * told["parameters"] == sum(of_model)
    out = said("show", run_folder / "checkpoints" / "step-00000002", "--filter", "embedding")[0]
    assert "after step 2: 8 samples, 64 tokens" in out
    assert "parameter/embedding.tokens.weight" in out and "layers.0" not in out
    assert "67×16" in out


def test_show_takes_the_newest_whole_one_and_says_so(run_folder: Path, said: Any) -> None:
    flip(run_folder / "checkpoints" / "step-00000006" / INDEX)
    out, err = said("show", run_folder)
    assert "after step 4" in out
    assert err.startswith("warning: checkpoint ") and "index.json does not match" in err
    assert "index.json does not match" in said("show", run_folder / "checkpoints" / "step-00000006", status=1)[1]


def test_copy_to_a_folder_and_to_a_store(run_folder: Path, tmp_path: Path, said: Any) -> None:
    said("copy", run_folder, tmp_path / "elsewhere" / "checkpoints")
    copied = tmp_path / "elsewhere" / "checkpoints" / "step-00000006"
    assert verify(copied).step == 6
    assert [path.name for path in copied.parent.iterdir()] == [copied.name]
    told = json.loads(said("copy", copied, "memory://bucket/kept", "--json")[0])
    assert told["copy"] == "memory:///bucket/kept/step-00000006" and told["verified"]
    assert json.loads(said("verify", "memory://bucket/kept", "--json")[0])["damaged"] == 0
    said("copy", "memory://bucket/kept", tmp_path / "back")
    assert verify(tmp_path / "back" / "step-00000006").step == 6
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_nothing_is_written_into_a_checkpoint(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes, and whatever way leads there."""
    checkpoint = run_folder / "checkpoints" / "step-00000006"
    assert str(checkpoint) == str(checkpoint_path(run_folder / "checkpoints", 6)), "the name that is looked for"
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "asked.jsonl").write_text('{"tokens": [1, 2]}\n')
    monkeypatch.chdir(checkpoint)
    data, sizes = f"{checkpoint}/data-00000.bin", ["--global-batch", "8", "--seq", "64"]
    layout = ["--layout", "dp=1", "--set", "training.steps=1"]
    kept = [*layout, "--set", f"output.folder={tmp_path}/other"]
    commands = {
        f"target={checkpoint}/x is inside": ["checkpoint", "copy", str(run_folder), f"{checkpoint}/x"],
        f"target={checkpoint} is the": ["checkpoint", "copy", str(run_folder), str(checkpoint)],
        f"target={tmp_path}/link/x is inside": ["checkpoint", "copy", str(run_folder), f"{tmp_path}/link/x"],
        f"target=file://{checkpoint}/x is inside": ["checkpoint", "copy", str(run_folder), f"file://{checkpoint}/x"],
        f"hf:{checkpoint}/x is inside": ["export", str(run_folder), "--to", f"hf:{checkpoint}/x"],
        f"output={checkpoint}/x is inside": ["data", "build", f"{tmp_path}/text.txt", "-o", f"{checkpoint}/x"],
        "output=x is inside": ["plan", "tiny-llama", "h100x8", *sizes, "-o", "x"],
        f"output={data} is inside": ["plan", "tiny-llama", "h100x8", *sizes, "-o", data],
        "output=y is inside": ["generate", str(run_folder), "--prompts", f"{tmp_path}/asked.jsonl", "-o", "y"],
        f"output.folder={checkpoint} is the": ["train", *layout, "--set", f"output.folder={checkpoint}"],
        f"checkpoint.folder={checkpoint}/x is": ["train", *kept, "--set", f"checkpoint.folder={checkpoint}/x"],
    }
    for sentence, arguments in commands.items():
        assert main(arguments) == 2, arguments
        assert f"error: {sentence}" in (told := capsys.readouterr().err), told
        assert told.endswith(f"the checkpoint {checkpoint}, which stays as it is; use another place\n")
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted([MANIFEST, *verify(checkpoint).files])


def test_copy_writes_over_nothing_and_copies_nothing_damaged(run_folder: Path, tmp_path: Path, said: Any) -> None:
    source = run_folder / "checkpoints" / "step-00000004"
    said("copy", source, tmp_path / "kept")
    before = (tmp_path / "kept" / "step-00000004" / MANIFEST).stat().st_mtime_ns
    assert "is there already" in said("copy", source, tmp_path / "kept", status=2)[1]
    assert (tmp_path / "kept" / "step-00000004" / MANIFEST).stat().st_mtime_ns == before
    assert "is no name for step 4" in said("copy", source, tmp_path / "step-00000009", status=2)[1]
    flip(source / "data-00000.bin")
    assert "data-00000.bin does not match" in said("copy", source, tmp_path / "new", status=1)[1]
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "inside"
    assert "cannot be written" in said("copy", run_folder / "checkpoints" / "step-00000006", target, status=2)[1]


def test_prune_keeps_the_last_that_verifies(run_folder: Path, said: Any) -> None:
    checkpoints = run_folder / "checkpoints"
    flip(checkpoints / "step-00000006" / "data-00000.bin")
    flip(checkpoints / "step-00000004" / "data-00000.bin")
    told = json.loads(said("prune", run_folder, "--keep", 1, "--dry-run", "--json")[0])
    assert [Path(name).name for name in told["removed"]] == ["step-00000004"]
    assert len(list(checkpoints.iterdir())) == 3, "a dry run removes nothing"
    out = said("prune", run_folder, "--keep", 1)[0]
    assert out.splitlines()[0] == f"removed {checkpoints / 'step-00000004'}"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000006"]
    assert verify(checkpoints / "step-00000002").step == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "nowhere"], "nowhere is no folder; use a run's folder, its checkpoints or one of them"),
        (["ls", "empty"], "empty holds no checkpoint; use a run's folder"),
        (["ls", "s4://bucket"], "s4://bucket cannot be reached"),
        (["copy", "run"], "checkpoint copy needs a folder to copy into"),
        (["show", "run", "run"], "checkpoint show takes one place"),
        (["show", "run", "--filter", "nothing"], "--filter nothing matches no tensor"),
        (["prune", "run"], "checkpoint prune with --keep 0 would keep nothing; use --keep 1 or more"),
        (["prune", "run", "--keep", "0"], "checkpoint prune with --keep 0 would keep nothing"),
        (["prune", "run/checkpoints/step-00000002", "--keep", "1"], "is one checkpoint; prune takes a folder"),
        (["burn", "run"], "'burn' is not one of"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, run_folder: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder.parent)
    Path("empty").mkdir()
    out, err = said(*arguments, status=2)
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert sentence in err


def test_a_stranger_cannot_write_on_the_terminal(run_folder: Path, said: Any) -> None:
    folder = run_folder / "checkpoints" / "step-00000006"
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_bytes(Manifest(**{**manifest.__dict__, "layout": "\x1b[2Jdp=1"}).render())
    (folder / "\x1b]0;owned\x07").write_text("")
    assert "\x1b" not in said("ls", run_folder)[0] + said("show", folder)[0]


def test_a_run_that_keeps_its_checkpoints_elsewhere(run_folder: Path, tmp_path: Path, said: Any) -> None:
    shutil.move(run_folder / "checkpoints", tmp_path / "elsewhere")
    place = json.dumps(str(tmp_path / "elsewhere"))
    (run_folder / "run.toml").write_text(f'model = "tiny-llama"\n[checkpoint]\nfolder = {place}\n')
    assert len(json.loads(said("ls", run_folder, "--json")[0])["checkpoints"]) == 3


def test_looking_does_not_import_torch(run_folder: Path) -> None:
    code = """
import sys
from cuboid.cli.main import main
assert main(["checkpoint", "ls", sys.argv[1], "--deep"]) == 0
assert main(["checkpoint", "show", sys.argv[1], "--json"]) == 0
print("torch" in sys.modules, "fsspec" in sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", code, run_folder], capture_output=True, text=True, check=True)
    assert finished.stdout.split()[-2:] == ["False", "False"]


def test_help_has_an_example(said: Any) -> None:
    assert "Example: cuboid checkpoint verify runs/default" in said("--help")[0]


def test_a_file_that_is_larger_than_the_disk_is_only_a_number(run_folder: Path, said: Any) -> None:
    folder = run_folder / "checkpoints" / "step-00000006"
    manifest = read_manifest(folder)
    files = {**manifest.files, "data-00000.bin": StoredFile(2**61, "blake2b_128:" + "0" * 32)}
    (folder / MANIFEST).write_bytes(Manifest(**{**manifest.__dict__, "files": files}).render())
    assert "data-00000.bin has" in said("verify", folder, status=1)[0]
