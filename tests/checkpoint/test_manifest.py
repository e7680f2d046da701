"""A checkpoint that is not what it says is refused, naming the file; nothing in it can run code or reach outside."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from cuboid.checkpoint.folder import checkpoint_path, checkpoints, newest_whole, prune
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, read_manifest
from cuboid.checkpoint.verify import check_index, damages, verify
from cuboid.errors import UserError


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
@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("bit", [0x01, 0x20])
def test_one_flipped_byte_is_named(checkpoint: Path, name: str, part: float, bit: int) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[round(part * (len(content) - 1))] ^= bit
    (checkpoint / name).write_bytes(content)
    assert [damage.file for damage in damages(checkpoint)] == [name]
    with pytest.raises(UserError, match=f"is damaged: {name}"):
        verify(checkpoint)


def test_every_byte_of_the_manifest_is_guarded(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:  # written anew each time, it would go to the disk each time
        for place, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ 0x01]), place)
            with pytest.raises(UserError, match=MANIFEST):
                read_manifest(checkpoint)
            os.pwrite(file.fileno(), bytes([byte]), place)
    for extra in (b" ", b"\n", b"{}"):
        path.write_bytes(content + extra)
        with pytest.raises(UserError, match=MANIFEST):
            read_manifest(checkpoint)


def test_all_that_is_damaged_is_named(checkpoint: Path) -> None:
    (checkpoint / "data-00001.bin").unlink()
    size = (checkpoint / "data-00002.bin").stat().st_size
    (checkpoint / "data-00002.bin").write_bytes(b"short")
    (checkpoint / ".metadata").write_bytes(b"from elsewhere")
    found = {damage.file: damage.reason for damage in damages(checkpoint)}
    assert found == {
        ".metadata": "is not one of its files",
        "data-00001.bin": "is missing",
        "data-00002.bin": f"has 5 bytes, not {size:,}",
    }


def test_under_another_step_it_is_no_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json is of step 2"):
        verify(checkpoint.rename(checkpoint_path(checkpoint.parent, 8).path))


def test_a_short_or_missing_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "data-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data-00001\.bin has [0-9,]+ bytes"):
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
        lambda entry: entry["chunks"].append(entry["chunks"][0]),
        lambda entry: entry["chunks"][0].update(offsets=entry["chunks"][1]["offsets"]),
        lambda entry: entry["chunks"][1].update(
            file=entry["chunks"][0]["file"], position=entry["chunks"][0]["position"]
        ),
        lambda entry: entry["chunks"][0].update(position=-8),
        lambda entry: entry["chunks"][0].update(position=8.0),
        lambda entry: entry["chunks"][0].update(lengths=[2**30, 2**30], bytes=2**63),
        lambda entry: entry.update(shape=[2**60]),
        lambda entry: entry.update(shape=[]),
        lambda entry: entry.update(shape=[1] * 60),
        lambda entry: entry.update(shape="64"),
        lambda entry: entry.update(shape=[-64, -64]),
        lambda entry: entry.update(shape=[True, True]),
        lambda entry: entry.update(dtype=["float64"]),
        lambda entry: entry.update(chunks=5),
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
    assert [sentence.startswith("checkpoint ") for sentence in sentences] == [True, True]
    assert prune(folder, keep=1) == [checkpoint_path(folder, 4)]
    assert checkpoints(folder) == [locate(checkpoint), checkpoint_path(folder, 6)]
