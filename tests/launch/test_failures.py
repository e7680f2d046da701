"""What is said of a rank that failed: the line of its exception that tells why."""

import os
import shutil
from pathlib import Path

import pytest
from torch.utils.checkpoint import CheckpointError

from cuboid.errors import RankError, UserError
from cuboid.launch import rank
from cuboid.launch.supervisor import _explain_failure
from cuboid.resilience.preemption import Listener
from cuboid.training.run_folder import prepare_folder
from tests.training.cases import short_run

ADVICE = (
    "\n\nTip: to see more, set a flag.\nTraceback (most recent call last):\n  of something else\nworkaround examples."
)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ValueError(f"shapes differ{ADVICE}"), RankError, "rank 0 failed: ValueError: shapes differ; its traceback"),
        (
            CheckpointError(f"\nRecomputed values differ:\nat 3{ADVICE}"),
            RankError,
            "rank 0 failed: torch.utils.checkpoint.CheckpointError: Recomputed values differ: at 3; its traceback",
        ),
        (AssertionError(), RankError, "rank 0 failed: AssertionError; its traceback"),
        (UserError("seed=x is no number; use 1"), UserError, "seed=x is no number; use 1"),
        (RankError("rank 1 is slow"), RankError, "rank 1 is slow"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_line_that_tells_why(
    error: Exception, kind: type[Exception], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank, "train", fail)
    run = short_run("dp=1", str(tmp_path))
    prepare_folder(run)
    with pytest.raises(type(error)), Listener(run) as signals:
        rank.run_rank(run, signals)
    with pytest.raises(kind) as told:
        _explain_failure(run, 0, 1)
    assert str(told.value).startswith(sentence)
    assert "in fail\n    raise error" in (tmp_path / "failure-00000.txt").read_text()


@pytest.mark.parametrize("moment", ["before it joins", "while it sets up"])
def test_a_folder_that_vanishes_before_the_first_step_is_not_made_anew(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short_run("dp=1", str(tmp_path / "run"))
    if moment == "while it sets up":
        prepare_folder(run)
        monkeypatch.setattr(rank, "_tell", lambda *_: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(UserError, match="was removed, or unmounted, before a step"), Listener(run) as signals:
        rank.run_rank(run, signals)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_left_no_report_was_ended_by_somebody_else(tmp_path: Path) -> None:
    run = short_run("dp=2", str(tmp_path))
    for code, ending in (
        (-9, "it was ended by SIGKILL (out of memory?)"),
        (-15, "it was ended by SIGTERM"),
        (3, "it ended with exit code 3"),
    ):
        with pytest.raises(RankError) as told:
            _explain_failure(run, 1, code)
        assert str(told.value) == f"rank 1 failed: {ending}"


def test_the_first_report_is_the_cause(tmp_path: Path) -> None:
    """Rank 0 was seen to end first, but it failed because rank 1 was gone."""
    run = short_run("dp=2", str(tmp_path))
    reports = {1: "ValueError: shapes differ", 0: "RuntimeError: connection closed by peer"}
    for age, (rank_, sentence) in enumerate(reports.items()):
        path = tmp_path / f"failure-{rank_:05d}.txt"
        path.write_text(f"{sentence}\n\nTraceback\n")
        os.utime(path, (1000 + age, 1000 + age))
    with pytest.raises(RankError) as told:
        _explain_failure(run, 0, 1)
    file = tmp_path / "failure-00001.txt"
    assert str(told.value) == f"rank 1 failed: ValueError: shapes differ; its traceback is in {file}"
    file.write_text("")  # the disk was full
    os.utime(file, (999, 999))
    with pytest.raises(RankError, match="rank 1 failed: it left an empty report; its traceback"):
        _explain_failure(run, 0, 1)
