"""Ranks hang in real trainings: they are found, named, ended and started again, and the job comes to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.resilience.faults import Fault, parse_faults
from cuboid.resilience.goodput import failures
from tests.cli.command import SHORT, rows, run, train

# Short enough to wait for, long enough that a machine busy with other things is not taken for a hang.
FIELDS = [*SHORT, "training.steps=12", "checkpoint.every=3", "resilience.hang_floor_seconds=6"]


def test_hung_and_stopped_ranks_are_named_and_the_job_comes_to_its_end(tmp_path: Path) -> None:
    faults = "spin rank=2 step=5 at=backward; stop rank=1 step=8 at=all-reduce; nan rank=3 step=10"
    result = run(train("--layout", "dp=2,pp=2", "--inject", faults, fields=FIELDS), tmp_path)
    folder = tmp_path / "runs/default"
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in rows(folder / "metrics.jsonl") if not row["finite"]] == [10]
    assert len(rows(folder / "metrics.jsonl")) == 12
    spun, stopped = failures(folder)
    assert (spun.kind, stopped.kind) == ("hang", "hang")
    assert spun.reason.startswith("rank 2 hangs in step 5, in its backward pass of stage 1: rank")
    assert stopped.reason.startswith("rank 1 is stopped by a signal in step 8")
    assert f"warning: {spun.reason}; starting again" in result.stderr
    assert sorted(path.name for path in folder.glob("hang-*/*")) == sorted(
        2 * ["report.json", *(f"rank-{rank:05d}.txt" for rank in range(4))]
    )
    reports = [json.loads((folder / f"hang-0000{number}/report.json").read_text()) for number in (1, 2)]
    assert [report["culprits"] for report in reports] == [[2], [1]]
    for number, (report, struck) in enumerate(zip(reports, sorted(folder.glob("fault-*.json")), strict=False), 1):
        waited = report["time"] - json.loads(struck.read_text())["time"]
        assert report["limit_seconds"] <= waited, f"hang {number} was reported before it could be one"
    stacks = (folder / "hang-00001/rank-00002.txt").read_text()
    assert "_spin_for_ever" in stacks and "in train" in stacks
    assert (
        "all_show"
        in (folder / "hang-00001/rank-00000.txt").read_text() + (folder / "hang-00001/rank-00003.txt").read_text()
    ), "where the others wait"
    assert "state T" in (folder / "hang-00002/rank-00001.txt").read_text()


def test_faults_are_read_from_one_line() -> None:
    assert parse_faults("kill rank=3 step=7;  slow rank=0 seconds=0.5 steps=2;") == [
        Fault("kill", 3, 7),
        Fault("slow", 0, seconds=0.5, steps=2),
    ]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("explode rank=1", r"^fault explode is unknown; use .*kill.*$"),
        ("kill step=3", r"^fault kill names no rank; use kill rank=1 step=5$"),
        ("kill rank=1 when=now", r"^fault kill has no when=now; use rank=, .*$"),
        ("kill rank=one", r"^fault kill rank=one has something that is no number; .*$"),
        *(
            (f"slow rank=0 seconds={odd}", r"^fault slow seconds=.* is no time to sleep")
            for odd in ("nan", "-1", "1e400")
        ),
        ("hang rank=1 at=lunch", r"^fault hang at=lunch is no place; use .*backward.*$"),
    ],
)
def test_faults_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_faults(text)


def test_a_fault_outside_the_layout_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = run(train("--layout", "dp=2", "--inject", "kill rank=2 step=1"), tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: fault kill rank=2 is outside dp=2")
    assert not (tmp_path / "runs").exists()
