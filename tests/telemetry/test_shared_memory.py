"""What killed runs leave in shared memory is cleared at the next start, and nothing that is anybody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import cuboid
from cuboid.errors import UserError
from cuboid.launch.pool import fork_server
from cuboid.telemetry.shared_memory import MEMORY, memory_folder, place_sockets, prefix_of, sweep
from tests.cli.command import Training


@pytest.fixture
def dead() -> int:
    """A process that has been."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


@pytest.fixture
def mark() -> Iterator[str]:
    """In the names of what a test makes, all of which goes with it."""
    word = uuid4().hex
    yield word
    for path in Path(memory_folder()).glob(f"*{word}"):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_sockets_have_short_names_however_long_the_folder_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some schedulers make it."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    code = "from cuboid.launch.pool import Pool\nif __name__ == '__main__':\n    with Pool() as pool: pool._start(1)"
    (tmp_path / "start.py").write_text(code)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(cuboid.__file__).parent.parent)}
    subprocess.run([sys.executable, tmp_path / "start.py"], env=environment, check=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("cuboid.telemetry.shared_memory.SHORT", ())
    with pytest.raises(UserError, match="is too long a name for sockets; use one of 75 characters or fewer"):
        place_sockets()


def test_only_what_dead_processes_of_this_user_and_namespace_left_goes(dead: int, mark: str, tmp_path: Path) -> None:
    folder = Path(memory_folder())
    left = [prefix_of("slots", dead), prefix_of("heartbeats", dead), f"sem.{prefix_of('semaphore', dead)}"]
    user, namespace = prefix_of("slots", dead).split("-")[2:4]
    kept = [
        prefix_of("slots"),
        f"sem.{prefix_of('semaphore')}",
        f"cuboid-slots-{int(user) + 1}-{namespace}-{dead}-",
        f"cuboid-slots-{user}-{int(namespace) + 1}-{dead}-",
        f"sem.mp-{dead}-",
        f"somebody-{dead}-",
        f"cuboid-{user}-",  # copies of a state, which outlive processes on purpose
    ]
    for name in (*left, *kept):
        place = folder / f"{name}{mark}"
        if "heartbeats" in name:
            place.mkdir()
            (place / "rank-00000").write_text("beat")
        else:
            place.write_text("")
    (tmp_path / "precious").mkdir()
    (folder / f"{prefix_of('heartbeats', dead)}link-{mark}").symlink_to(tmp_path / "precious")
    sweep()
    assert {path.name.removesuffix(mark) for path in folder.glob(f"*{mark}")} == set(kept)
    assert (tmp_path / "precious").is_dir(), "a link goes, not what it leads to"


def test_semaphores_bear_the_name_of_their_process() -> None:
    lock = fork_server().Lock()
    assert list(Path(MEMORY).glob(f"sem.{prefix_of('semaphore')}*"))
    del lock


def test_what_a_killed_training_leaves_is_cleared_by_the_next(tmp_path: Path) -> None:
    training = Training(tmp_path, "dp=2")
    training.wait_for_a_step()
    launcher = training.command.pid
    os.killpg(launcher, signal.SIGKILL)  # with the tracker that would have cleared what they leave
    training.command.communicate()
    training.assert_nothing_is_left()
    names = [prefix_of("heartbeats", launcher), f"sem.{prefix_of('semaphore', launcher)}"]
    assert all(list(Path(MEMORY).glob(f"{name}*")) for name in names), "else this proves nothing"
    fork_server()
    assert not any(list(Path(MEMORY).glob(f"{name}*")) for name in names)
