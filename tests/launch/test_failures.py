"""What is said of a rank that failed: the line of its exception that tells why."""

from pathlib import Path

import pytest
from torch.utils.checkpoint import CheckpointError

from cuboid.errors import RankError, UserError
from cuboid.launch import rank
from cuboid.launch.supervisor import _explain_failure
from cuboid.resilience.preemption import Listener
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
    with pytest.raises(type(error)), Listener(run) as signals:
        rank.run_rank(run, signals)
    with pytest.raises(kind) as told:
        _explain_failure(run, 0, 1)
    assert str(told.value).startswith(sentence)
    assert "in fail\n    raise error" in (tmp_path / "failure-00000.txt").read_text()
