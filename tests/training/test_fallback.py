"""Whatever is done to the newest checkpoint, the same command continues from the one before it, and says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cuboid.checkpoint.verify import verify
from cuboid.cli.main import main
from tests.checkpoint.jobs import SMALL

NEWEST = "step-00000004"


def command(folder: Path) -> list[str]:
    fields = [*SMALL, "training.steps=4", "training.global_batch=2", "training.sequence=8", "training.device=cpu"]
    fields += ["data.source=synthetic", "checkpoint.every=2", f"output.folder={folder}"]
    return ["train", *(word for field in fields for word in ("--set", field))]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main(command(folder)) == 0
    return folder


def flip(part: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[round(part * (len(content) - 1))] ^= 0x10
        path.write_bytes(content)

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first byte": flip(0),
    "a byte": flip(0.37),
    "last byte": flip(1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", ["data-00000.bin", "index.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_it_is_named_and_the_one_before_is_used(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    newest = folder / "checkpoints" / NEWEST
    DAMAGE[damage](newest / name)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert f"DAMAGED: {name} " in capsys.readouterr().out
    assert main(command(folder)) == 0
    shown = capsys.readouterr()
    assert f"warning: checkpoint {newest} is damaged: {name} " in shown.err
    assert "resuming after step 2" in shown.out
    assert losses(folder) == losses(trained)
    assert verify(newest).step == 4, "it is written anew"


def test_a_foreign_file_and_no_whole_one_at_all(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    checkpoints = folder / "checkpoints"
    (checkpoints / NEWEST / ".metadata").write_bytes(b"a pickle, perhaps")
    shutil.rmtree(checkpoints / "step-00000002")
    (checkpoints / "step-00000002").write_text("no folder")
    rows = (folder / "metrics.jsonl").read_text()
    assert main(command(folder)) == 2 and "finished its 4 steps" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == rows, "of a finished run nothing is dropped unasked"
    (folder / "metrics.jsonl").write_text("".join(rows.splitlines(keepends=True)[:-1]))  # as if killed in its last step
    assert main(command(folder)) == 0
    shown = capsys.readouterr()
    assert f"{checkpoints / NEWEST} is damaged: .metadata is not one of its files" in shown.err
    assert f"{checkpoints / 'step-00000002'} is damaged: manifest.json is missing" in shown.err
    assert losses(folder) == losses(trained)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", NEWEST]
    assert main(["checkpoint", "verify", str(folder)]) == 0


def test_where_the_contents_of_all_are_damaged_it_begins_as_it_began(trained: Path, tmp_path: Path) -> None:
    """What was read of them before their checksums were known must leave nothing behind."""
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / NEWEST)
    flip(0.5)(folder / "checkpoints" / "step-00000002" / "data-00000.bin")
    log = folder / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # a run that had finished is refused
    assert main(command(folder)) == 0
    assert losses(folder) == losses(trained)
