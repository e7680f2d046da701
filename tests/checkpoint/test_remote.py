"""Checkpoints in stores that fsspec reaches, which rename nothing: the manifest, written last, is what publishes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path, checkpoints, clear, newest_whole, prune, step_of, withdraw
from cuboid.checkpoint.location import Location, RemoteFiles, locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest
from cuboid.checkpoint.storage import Staging, Writer
from cuboid.checkpoint.verify import verify
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from tests.training.cases import short_run, train_rank
from tests.training.test_resume import rows


def steps_in(folder: Location) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


def test_several_ranks_keep_their_state_in_a_store_and_go_on(pool: Pool, tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    common = ("checkpoint.every=2", f"checkpoint.folder={store}", "training.precision=float64")
    common += ("learning_rate.schedule=constant",)
    whole = short_run("dp=1", str(tmp_path / "whole"), *common[2:], "training.steps=6")
    pool.run("tests.training.cases:train_rank", (whole,), ranks=1)
    for layout, steps in (("dp=2,zero=1", 4), ("pp=2", 6)):
        run = short_run(layout, str(tmp_path / "parts"), *common, f"training.steps={steps}")
        pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert steps_in(locate(store)) == [4, 6]
    assert not locate(store).files.renames
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_a_store_in_memory(tmp_path: Path) -> None:
    """One process, one rank: saved, verified, damaged, pruned and cleared without a disk."""
    store = locate("memory://cuboid-test/run")
    run = short_run("dp=1", str(tmp_path), "training.steps=3", "checkpoint.every=1", f"checkpoint.folder={store}")
    train_rank(0, run)
    assert steps_in(store) == [2, 3]
    newest = checkpoint_path(store, 3)
    assert verify(newest).step == 3
    content = bytearray((newest / "data-00000.bin").read())
    content[-1] ^= 1
    (newest / "data-00000.bin").write_durably(bytes(content))
    with pytest.raises(UserError, match=r"memory://.*data-00000.bin does not match its checksum"):
        verify(newest)
    assert newest_whole(store)[0] == checkpoint_path(store, 2)
    assert prune(store, keep=1) == [], "the last whole one stays"
    withdraw(newest)
    assert steps_in(store) == [2]
    clear(store)
    assert store.names() == []


def test_what_has_no_manifest_is_not_one_yet(tmp_path: Path) -> None:
    store = locate(f"file://{tmp_path}")
    half = checkpoint_path(store, 5)
    half.make_folder()
    (half / INDEX).write_durably(b"{}")
    assert checkpoints(store) == []
    (half / MANIFEST).write_durably(b"{}")
    assert checkpoints(store) == [half]


def test_a_store_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(UserError, match=r"nowhere://x cannot be reached: Protocol not known: nowhere"):
        locate("nowhere://x")


class Broken:
    """A driver that fails in its own way."""

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: object, **options: object) -> None:
            raise FileNotFoundError("gone") if name == "cat_file" else RuntimeError("no route\nand more")

        return fail


def test_what_a_driver_raises_names_the_place() -> None:
    store = RemoteFiles(Broken())
    for ask in (store.names, store.is_folder, store.size, store.make_folder, store.open, store.remove):
        with pytest.raises(OSError, match=r"no route: 'bucket/x'$") as caught:
            ask("bucket/x")
        assert caught.value.filename == "bucket/x", "by which the command line says it in a sentence"
    with pytest.raises(FileNotFoundError, match="gone: 'bucket/x'"):
        store.read_into("bucket/x", 0, memoryview(bytearray(1)))


def test_a_checkpoint_makes_no_removed_folder_of_its_run_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    staging = Staging({}, torch.device("cpu"))
    writer = Writer(
        locate(tmp_path / "run" / "checkpoints" / "step-00000001"), 0, Manifest(1, 1, 1, "", "", ""), staging
    )
    writer.open(in_a_run=True)
    assert (tmp_path / "run/checkpoints/.step-00000001.writing").is_dir()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        writer.open(in_a_run=True)
    assert not (tmp_path / "run").exists()
