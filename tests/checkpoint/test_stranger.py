"""A checkpoint made to do harm, whole by its own account: nothing in it runs, and what lies is refused by name."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile, checksum_of_bytes, read_manifest
from cuboid.checkpoint.owner import FIRST as OWNER
from cuboid.checkpoint.save import load, save
from cuboid.checkpoint.storage import whole_tensors
from cuboid.checkpoint.verify import damages, verify
from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.training.optimizer import Optimizer
from cuboid.training.run_folder import prepare_folder
from tests.checkpoint.jobs import CPU, SMALL
from tests.parallel.cases import small_run
from tests.training.cases import short_run


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def bomb(tmp_path: Path) -> Any:
    victim = tmp_path / "created"
    yield Bomb(victim)
    assert not victim.exists(), "code of a stranger has run"


def put(checkpoint: Path, name: str, content: bytes) -> None:
    """Write a file and make the manifest agree with it."""
    (checkpoint / name).write_bytes(content)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: StoredFile(len(content), checksum_of_bytes(content))}
    (checkpoint / MANIFEST).write_bytes(Manifest(**{**manifest.__dict__, "files": files}).render())


def refused(checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in [damage.file for damage in damages(checkpoint)]
    assert main(["checkpoint", "verify", str(checkpoint)]) == 1
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("name", [".metadata", "pytorch_model.bin", "optimizer.pt", "data.pkl"])
def test_a_pickle_beside_it(checkpoint: Path, bomb: Bomb, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`.metadata` is where PyTorch's own checkpoints keep a pickle."""
    (checkpoint / name).write_bytes(pickle.dumps(bomb))
    refused(checkpoint, name, capsys)


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_a_pickle_in_the_place_of_json(
    checkpoint: Path, bomb: Bomb, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == INDEX:
        put(checkpoint, name, pickle.dumps(bomb))
    else:
        (checkpoint / name).write_bytes(pickle.dumps(bomb))
    refused(checkpoint, name, capsys)


def test_a_pickle_in_the_place_of_tensors_is_only_numbers(checkpoint: Path, bomb: Bomb, tmp_path: Path) -> None:
    torch.save({"weights": bomb}, tmp_path / "zip")
    archive = (tmp_path / "zip").read_bytes()
    size = (checkpoint / "data-00000.bin").stat().st_size
    put(checkpoint, "data-00000.bin", (archive * (size // len(archive) + 1))[:size])
    assert verify(checkpoint).step == 2
    assert whole_tensors(checkpoint)


def test_names_that_leave_the_folder(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret.bin").write_bytes(b"secret")
    manifest = read_manifest(checkpoint)
    for name in (
        "../secret.bin",
        str(tmp_path / "secret.bin"),
        "data-00000.bin/../../secret.bin",
        "data-0000٣.bin",
        "",
    ):
        files = {**manifest.files, name: StoredFile(6, "0" * 32)}
        (checkpoint / MANIFEST).write_bytes(Manifest(**{**manifest.__dict__, "files": files}).render())
        refused(checkpoint, MANIFEST, capsys)


@pytest.mark.parametrize("name", ["data-00001.bin", INDEX, MANIFEST])
def test_links_pipes_and_folders(
    checkpoint: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe nobody writes to would be read for ever, and so would some devices."""
    path, original = checkpoint / name, tmp_path / "original"
    path.rename(original)
    for make in (
        lambda: path.symlink_to(original),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        path.mkdir,
    ):
        make()
        refused(checkpoint, name, capsys)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"null", b"[1]", b"NaN", b""])
@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_json_made_to_break_its_reader(
    checkpoint: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == INDEX:
        put(checkpoint, name, content)
    else:
        (checkpoint / name).write_bytes(content)
    refused(checkpoint, name, capsys)


def test_a_huge_file_of_json_is_not_read(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (checkpoint / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)  # a hole, which takes no room on the disk
    refused(checkpoint, MANIFEST, capsys)


def test_tensors_of_another_model_are_refused_by_name(checkpoint: Path) -> None:
    """Indices that add up, but not to the model that is to be filled."""
    index = json.loads((checkpoint / INDEX).read_bytes())
    name = "parameter/embedding.tokens.weight"
    other = next(key for key in index if key.startswith("parameter/layers.0") and len(index[key]["shape"]) == 2)
    swapped = {**index, name: index[other], other: index[name]}
    engine = build_engine(small_run("dp=1", *SMALL), 0, CPU)
    optimizer = Optimizer(engine, engine.run.optimizer)
    for lying, said in ((swapped, "has"), ({key: index[key] for key in index if key != name}, "lacks")):
        put(checkpoint, INDEX, json.dumps(lying).encode())
        assert verify(checkpoint).step == 2
        with pytest.raises(UserError, match=f"{INDEX} {said} .*{name}, which needs 67×16"):
            load(engine, optimizer, checkpoint)


@pytest.mark.parametrize("kind", ["parameter", "exp_avg", "exp_avg_sq"])
def test_an_index_without_a_tensor_is_refused_before_the_folder_is_written(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    index = json.loads((checkpoint / INDEX).read_bytes())
    name = f"{kind}/layers.1.attention.key.weight"
    folders = (f"output.folder={tmp_path / 'run'}", f"checkpoint.folder={checkpoint.parent}")
    run = small_run("dp=1", *SMALL, *folders, "training.global_batch=4")
    for change, said in (({**index[name], "shape": [1, 16]}, "has another shape"), (None, "lacks")):
        lying = {key: index[key] if key != name else change for key in index if key != name or change}
        put(checkpoint, INDEX, json.dumps(lying).encode())
        with pytest.raises(UserError, match=f"{INDEX} {said}.*layers.1.attention.key.weight"):
            prepare_folder(run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["x = [[[", "\x0c", 'model = "no such model"', "[model]\nlayers = true"])
def test_a_run_that_is_none(checkpoint: Path, tmp_path: Path, text: str) -> None:
    """What its manifest says of the run is read before any rank starts."""
    manifest = read_manifest(checkpoint)
    (checkpoint / MANIFEST).write_bytes(Manifest(**{**manifest.__dict__, "run": text}).render())
    run = small_run("dp=1", *SMALL, f"output.folder={tmp_path / 'run'}", f"checkpoint.folder={checkpoint.parent}")
    with pytest.raises(UserError, match=f"{MANIFEST} holds no run"):
        prepare_folder(run)
    owner = {"identity": "another", "folder": "elsewhere", "host": "", "run": text}
    (checkpoint.parent / OWNER).write_text(json.dumps(owner))
    with pytest.raises(UserError, match=f"{OWNER} holds no run"):
        prepare_folder(run)
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads((checkpoint / MANIFEST).read_bytes())
    for files in ([], {INDEX: 7}, {INDEX: {"bytes": 1}}):
        (checkpoint / MANIFEST).write_text(json.dumps({**table, "files": files}))
        refused(checkpoint, MANIFEST, capsys)
        assert main(["checkpoint", "verify", str(checkpoint)]) == 1
        assert "has files that are no table of bytes and checksum" in capsys.readouterr().out


def test_a_generator_that_is_none(tmp_path: Path) -> None:
    engine = build_engine(small_run("dp=1", *SMALL), 0, CPU)
    optimizer = Optimizer(engine, engine.run.optimizer)
    saved = Path(str(save(engine, optimizer, tmp_path, 2)))
    index, (file,) = json.loads((saved / INDEX).read_bytes()), saved.glob("data-*.bin")
    (chunk,) = index["generator/cpu/00000"]["chunks"]
    content = bytearray(file.read_bytes())
    content[chunk["position"] : chunk["position"] + chunk["bytes"]] = b"\xff" * chunk["bytes"]
    put(saved, file.name, bytes(content))
    with pytest.raises(UserError, match="generator/cpu/00000', which is no state of a random generator"):
        load(engine, optimizer, saved)


@pytest.mark.parametrize(("kind", "resumed"), [("generator", 4), ("exp_avg", 2)])
def test_what_does_not_fit_is_known_to_all_ranks_and_an_older_checkpoint_is_used(
    pool: Pool, tmp_path: Path, kind: str, resumed: int
) -> None:
    """A generator's state of another size is another PyTorch's, and nothing draws from it."""
    run = short_run("dp=2", str(tmp_path), "training.steps=4", "checkpoint.every=2")
    prepare_folder(run)
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    newest = checkpoint_path(tmp_path / "checkpoints", 4)
    folder = tmp_path / "checkpoints" / newest.name
    index = json.loads((folder / INDEX).read_bytes())
    name = next(name for name in index if name.startswith(f"{kind}/"))
    rows, *rest = index[name]["shape"]
    index[name] |= {"shape": [8] if kind == "generator" else [rows + 1, *rest]}
    if kind == "generator":
        index[name]["chunks"][0] |= {"lengths": [8], "bytes": 8}
    put(folder, INDEX, json.dumps(index).encode())
    again = replace(run, training=replace(run.training, steps=6))
    assert pool.run("tests.checkpoint.jobs:found_at_resume", (again,), ranks=2) == [resumed, resumed]
