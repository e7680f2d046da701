"""A checkpoint that is not what it says is refused, naming the file; nothing in it can run code or reach outside."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from cuboid.checkpoint.folder import checkpoint_path, checkpoints, newest_whole, prune
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, read_manifest, verify
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from tests.parallel.cases import small_run


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps, by four ranks."""
    folder = tmp_path_factory.mktemp("written")
    run = small_run("dp=2,tp=2,zero=1")
    pool.run("tests.checkpoint.jobs:train_part", (run, str(folder), 0, 2, None), ranks=4)
    return Path(checkpoint_path(folder, 2).path)


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, checkpoint_path(tmp_path, 2).path))


def test_what_was_written_verifies(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert (manifest.step, manifest.layout) == (2, "dp=2,tp=2,pp=1,zero=1")
    assert manifest.position == 2 * 4
    assert {path.name for path in checkpoint.iterdir()} == {
        MANIFEST,
        INDEX,
        *(f"data-{rank:05d}.bin" for rank in range(4)),
    }
    assert not list(checkpoint.parent.glob(".*")), "nothing is left aside"


@pytest.mark.parametrize("name", ["data-00000.bin", "data-00003.bin", INDEX, MANIFEST])
def test_one_flipped_byte_is_named(checkpoint: Path, name: str) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 0x20
    (checkpoint / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        verify(checkpoint)


def test_a_short_or_missing_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "data-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data-00001\.bin has \d+ bytes"):
        verify(checkpoint, contents=False)
    path.unlink()
    with pytest.raises(UserError, match=r"data-00001\.bin is missing"):
        verify(checkpoint)


def change_index(checkpoint: Path, change: Any) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    change(next(iter(index.values())))
    (checkpoint / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["chunks"][0].update(file="../../secret.bin"),
        lambda entry: entry["chunks"][0].update(file="/etc/passwd"),
        lambda entry: entry["chunks"][0].update(position=1 << 40),
        lambda entry: entry["chunks"][0].update(bytes=8),
        lambda entry: entry["chunks"][0].update(offsets=[-1, 0]),
        lambda entry: entry.update(shape=[1 << 40, 1 << 40]),
        lambda entry: entry.update(dtype="object"),
        lambda entry: entry["chunks"].pop(),
        lambda entry: entry.pop("chunks"),
    ],
)
def test_an_index_that_lies_is_refused_before_anything_is_read(checkpoint: Path, change: Any) -> None:
    change_index(checkpoint, change)
    with pytest.raises(UserError, match=INDEX):
        check_index(checkpoint)


def test_links_and_foreign_names_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.bin"
    shutil.move(checkpoint / "data-00000.bin", target)
    (checkpoint / "data-00000.bin").symlink_to(target)
    with pytest.raises(UserError, match=r"data-00000\.bin"):
        verify(checkpoint)
    with pytest.raises(UserError):
        check_index(checkpoint)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, (str(self.path), "w"))  # type: ignore[return-value]


def test_a_pickle_is_never_opened(checkpoint: Path, tmp_path: Path) -> None:
    victim = tmp_path / "created"
    for name in (MANIFEST, INDEX):
        (checkpoint / name).write_bytes(pickle.dumps(Bomb(victim)))
        with pytest.raises(UserError, match=name):
            (read_manifest if name == MANIFEST else check_index)(checkpoint)
    assert not victim.exists()


def test_the_newest_whole_one_is_used_and_never_pruned(checkpoint: Path) -> None:
    folder = checkpoint.parent
    for step in (4, 6):
        shutil.copytree(checkpoint, checkpoint_path(folder, step).path)
        (checkpoint_path(folder, step) / INDEX).write_durably(b"{}")
    path, manifest, sentences = newest_whole(folder)
    assert str(path) == str(checkpoint)
    assert manifest is not None
    assert [INDEX in sentence for sentence in sentences] == [True, True]
    assert prune(folder, keep=1) == [checkpoint_path(folder, 4)]
    assert checkpoints(folder) == [locate(checkpoint), checkpoint_path(folder, 6)]
