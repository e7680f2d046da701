"""A folder has one run at a time, and is free again however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.training.claim import claimed

HOLD = """
import sys, time
from pathlib import Path
from cuboid.training.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_refused_until_the_first_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="is in use by another run"), claimed(folder, patience=0):
        pass
    fields = ["training.steps=1", "training.sequence=8", "training.device=cpu", f"output.folder={folder}"]
    command = ["train", *(word for field in fields for word in ("--set", field))]
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"error: output.folder={folder} is in use by another run; stop that one, or use another folder\n"
    )
    assert list(folder.iterdir()) == [], "what is refused writes nothing"
    os.kill(holder.pid, signal.SIGKILL)
    with claimed(folder, patience=120):
        holder.wait()
    assert main(command) == 0


def test_what_is_no_folder_is_said_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with claimed(tmp_path / "file"), claimed(tmp_path / "file" / "below"):
        pass


def test_a_run_that_fails_leaves_its_folder_free_and_no_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with pytest.raises(ValueError, match="a step failed"), claimed(folder):
        with pytest.raises(UserError, match="is in use by another run"), claimed(folder, patience=0.1):
            pass
        raise ValueError("a step failed")
    with claimed(folder, patience=0):
        assert list(folder.iterdir()) == [], "the folder itself is what is locked"
