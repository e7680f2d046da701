"""The summary of what ranks exchanged: the busiest rank of each kind, and who is not as predicted."""

from __future__ import annotations

import json
from pathlib import Path

from cuboid.planning.collectives import predicted_ledger
from cuboid.spec.run import Run, build_run
from cuboid.telemetry.communication_ledger import Ledger
from cuboid.training.communication import summarize
from cuboid.training.communication_log import CommunicationLog


def counted_run(folder: Path, layout: str = "dp=2,pp=2") -> Run:
    return build_run({"model": "tiny-llama", "layout": layout, "output": {"folder": str(folder)}})


def write(run: Run, rank: int, ledger: Ledger) -> None:
    with CommunicationLog(run, rank, ledger) as log:
        log.record(1)


def test_as_predicted(tmp_path: Path) -> None:
    run = counted_run(tmp_path)
    for rank in range(4):
        write(run, rank, predicted_ledger(run, rank))
    summary = summarize(run)
    assert (summary.ranks, summary.unforeseen) == (4, [])
    assert all(row.counted == row.predicted for row in summary.rows)
    busiest = max(predicted_ledger(run, rank).entries["data", "all-reduce"].bytes for rank in range(4))
    assert [row.counted.bytes for row in summary.rows if row.dimension == "data" and row.counted] == [busiest]


def test_a_rank_that_differs_is_named(tmp_path: Path) -> None:
    run = counted_run(tmp_path)
    for rank in range(4):
        ledger = predicted_ledger(run, rank)
        if rank == 2:
            ledger.add("cp", "all-to-all", 2, 64)
        write(run, rank, ledger)
    assert summarize(run).unforeseen == ["rank 2 cp all-to-all: counted 1 of 64 bytes over 2 ranks, predicted none"]


def test_files_of_ranks_that_are_no_more_are_left_out(tmp_path: Path) -> None:
    wide = counted_run(tmp_path)
    for rank in range(4):
        write(wide, rank, predicted_ledger(wide, rank))
    narrow = counted_run(tmp_path, "dp=2")
    for rank in range(2):
        write(narrow, rank, predicted_ledger(narrow, rank))
    summary = summarize(narrow)
    assert (summary.ranks, summary.unforeseen) == (2, [])


def test_nothing_is_written_where_nothing_is_counted(tmp_path: Path) -> None:
    with CommunicationLog(counted_run(tmp_path), 0, None) as log:
        log.record(1)
    assert not list(tmp_path.iterdir())


def test_a_line_is_a_step(tmp_path: Path) -> None:
    run, ledger = counted_run(tmp_path), Ledger()
    with CommunicationLog(run, 3, ledger) as log:
        for step in (1, 2):
            ledger.add("pp", "send", 2, 10)
            log.record(step)
    lines = [json.loads(line) for line in (tmp_path / "communication-00003.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["collectives"] == [{"dimension": "pp", "kind": "send", "ranks": 2, "calls": 1, "bytes": 10}]
