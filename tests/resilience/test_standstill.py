"""Deadlocks in set-up and in the first step are named soon, and ranks that compute or compile for long are not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuboid.errors import HangError
from cuboid.launch.pool import fork_server
from cuboid.resilience.goodput import failures
from cuboid.resilience.standstill import Standstill, core_seconds
from cuboid.resilience.watchdog import Watchdog
from cuboid.spec.run import ResilienceSpec, Run, build_run
from cuboid.telemetry.heartbeat import Reading, Waiting
from tests.cli.command import SHORT, rows, run, train
from tests.resilience.stuck_jobs import begin

STUCK = "resilience.stuck_seconds=3"


def watched(tmp_path: Path, job: str, ranks: int = 2) -> tuple[Watchdog, int]:
    """A job of the file beside this one under a watchdog, until it is over; how many ranks came to its end."""
    made: Run = build_run(
        {"model": "tiny-llama", "layout": f"dp={ranks}", "output": {"folder": str(tmp_path / "run")}},
        ["training.global_batch=8", STUCK],
    )
    context = fork_server()
    with Watchdog(made, list(range(ranks))) as watchdog:
        started = [
            context.Process(
                target=begin, args=(rank, ranks, str(watchdog.folder), job, str(tmp_path / "run")), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        done = len(list(watchdog.folder.glob("done-*")))
    return watchdog, done


CASES = {
    "opposite_order": "ranks 0–1 wait for each other in a circle, in step 1, in its forward pass: rank 0 in the "
    "all-reduce of the data-parallel ranks 0–1, rank 1 in the all-reduce of the tensor-parallel ranks 0–1",
    "different_kinds": "ranks of one group are in different collectives, while it sets up: rank 0 in the all-reduce of "
    "all ranks, rank 1 in the all-gather of all ranks",
    "missing_in_set_up": "rank 1 hangs while it sets up: rank 0 waits for it in the making of the communicator "
    "of all ranks",
}


@pytest.mark.parametrize("job", CASES)
def test_a_real_deadlock_is_named_with_its_ranks_and_collectives(tmp_path: Path, job: str) -> None:
    watchdog, _ = watched(tmp_path, job)
    with pytest.raises(HangError) as caught:
        watchdog.explain()
    said = str(caught.value)
    assert said.startswith(CASES[job]), said
    assert "limit 3.0 s (resilience.stuck_seconds=3: no rank computes, compiles or reads)" in said
    stacks = [(tmp_path / f"run/hang-00001/rank-{rank:05d}.txt").read_text() for rank in (0, 1)]
    assert all(f", in {job}" in text or f"in {job}" in text for text in stacks)
    report = json.loads((tmp_path / "run/hang-00001/report.json").read_text())
    assert sorted(report["culprits"]) == ([1] if job == "missing_in_set_up" else [0, 1])


def test_devices_that_hang_leave_their_flight_records_and_name_the_collective(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    watchdog, _ = watched(tmp_path, "hang_on_the_device")
    assert watchdog.hang is not None
    assert (
        "; not ended on the device: ranks 0–1 in nccl:all_gather 7 of ranks 0–1; silent for" in watchdog.hang.sentence
    )
    folder = tmp_path / "run/hang-00001"
    assert sorted(path.name for path in folder.glob("flight-*")) == ["flight-0", "flight-1"]
    assert not list((tmp_path / "run").glob("flight-*")), "they lie beside the stacks"
    report = json.loads((folder / "report.json").read_text())
    assert report["open_collectives"] == dict.fromkeys(("0", "1"), "nccl:all_gather 7 of ranks 0–1")


@pytest.mark.parametrize("job", ["busy_for_long", "compile_elsewhere"])
def test_a_rank_that_works_for_long_is_waited_for_and_told_of(
    tmp_path: Path, job: str, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdog, done = watched(tmp_path, job)
    assert watchdog.hang is None and done == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: rank 1 works in step 1")]
    assert len(told) == 1, "once in a silence"
    assert "and the others wait: rank 0 in the all-reduce of all ranks; so far for 3 s, limit resilience" in told[0]


def test_ranks_that_hang_in_set_up_and_in_the_first_step_are_named_and_started_again(tmp_path: Path) -> None:
    faults = "hang rank=1 at=set-up; hang rank=2 step=1 at=backward"
    fields = [*SHORT, "checkpoint.every=3", "resilience.stuck_seconds=6"]
    result = run(train("--layout", "dp=2,pp=2", "--inject", faults, fields=fields), tmp_path)
    folder = tmp_path / "runs/default"
    assert result.returncode == 0, result.stderr
    assert len(rows(folder / "metrics.jsonl")) == 3
    first, second = failures(folder)
    assert first.reason.startswith("rank 1 hangs while it sets up, in the join of all ranks"), first.reason
    assert second.reason.startswith("rank 2 hangs in step 1, in its backward pass of stage 1: rank"), second.reason
    assert "resilience.stuck_seconds=6" in first.reason and "resilience.stuck_seconds=6" in second.reason


@pytest.fixture
def working() -> Iterator[int]:
    """The id of a process that computes until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


def judged(readings: list[Reading], working: int) -> bool:
    """Of ranks that have been silent for ten seconds, in which `working` has had a core for a while."""
    standstill = Standstill(ResilienceSpec(stuck_seconds=5))
    assert standstill.look(2.0, lambda: readings) is None
    before = core_seconds(working)
    assert before is not None
    while (core_seconds(working) or 0.0) < before + 0.05:  # its own time: other tests may have the cores meanwhile
        time.sleep(0.01)
    return standstill.look(10.0, lambda: readings) is not None


def test_a_device_that_has_marks_to_pass_and_passes_none_stands_still(working: int) -> None:
    waits = Reading(0, working, "step", 1, waiting=Waiting("device", None), device_left=3)
    spins = Reading(1, working, "step", 1, "forward", device_left=2)
    assert judged([waits], working)
    assert judged([waits, spins], working), "a host that spins in a call that waits for its device does not work"

    def works(reading: Reading) -> bool:
        return not judged([waits, reading], working)

    assert works(Reading(1, working, "step", 1, "forward")), "its device waits for the host"
    assert works(Reading(1, working, "step", 1, waiting=Waiting("device", None))), "it computes"
    assert works(Reading(1, working, "set-up", activity="reading"))
    assert works(Reading(1, state="?")), "it has not begun"
    assert not works(Reading(1, working, "step", 1, state="T"))
    assert works(Reading(1, working, "save", 1, waiting=Waiting("save", None))), "a thread writes"


def test_nodes_of_which_one_still_works_wait() -> None:
    told: list[bool] = []

    def everywhere(stands: bool) -> bool:
        told.append(stands)
        return len(told) > 1

    standstill = Standstill(ResilienceSpec(stuck_seconds=5), everywhere)
    readings = [Reading(0, 1, waiting=Waiting("join", None))]
    assert standstill.look(10.0, lambda: readings) is None, "another node has not said so yet"
    standstill._next = 0.0
    assert standstill.look(10.0, lambda: readings) is not None
    assert standstill.look(0.2, lambda: readings) is None
    assert told == [True, True, False]
    assert standstill.look(0.2, lambda: readings) is None and len(told) == 3, "nothing new to tell"


def test_what_a_rank_did_before_it_hung_does_not_count_for_long() -> None:
    worked = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass\ntime.sleep(600)"]
    )
    try:
        standstill = Standstill(ResilienceSpec(stuck_seconds=4))
        readings = [Reading(0, worked.pid, "step", 1, "backward")]
        assert standstill.look(2.0, lambda: readings) is None
        while core_seconds(worked.pid) < 0.3:  # type: ignore[operator]
            time.sleep(0.1)
        assert standstill.look(4.0, lambda: readings) is None, "it has worked in this silence"
        until = time.monotonic() + 50
        while standstill.look(8.0, lambda: readings) is None:
            assert time.monotonic() < until, "what it did would excuse it for more than a minute"
            time.sleep(0.2)
    finally:
        worked.kill()
        worked.wait()
