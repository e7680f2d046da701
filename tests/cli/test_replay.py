"""`cuboid replay`: data or hardware, told from real runs whose steps went wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from cuboid.resilience.bad_steps import bad_steps
from cuboid.spec.run import Run
from cuboid.training.run_folder import prepare_folder
from cuboid.verification.replay import Logged, Seen, judge
from tests.cli.command import environment
from tests.launch.ports import free_port
from tests.training.cases import short_run
from tests.training.test_bad_steps import FIELDS


def replay(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["replay", str(folder), *arguments, "--json"]) == 0, capsys.readouterr()
    table: dict[str, Any] = json.loads(capsys.readouterr().out)
    return table


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def prepared(folder: Path, *fields: str) -> Run:
    saves = ("checkpoint.every=3", "checkpoint.keep=9")
    run = short_run("dp=2,pp=2", str(folder), "training.steps=10", *saves, *FIELDS, *fields)
    prepare_folder(run)
    return run


def test_a_fault_that_passed_and_a_good_step(tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepared(tmp_path)
    pool.run("tests.training.bad_step_jobs:train_poisoned", (run, frozenset({7}), 2), ranks=4)
    before = contents(tmp_path)
    bad = replay(capsys, tmp_path, "--step", "8")
    assert (bad["cause"], bad["repeatable"], bad["matches"], bad["from_step"]) == ("passing", True, False, 6)
    assert bad["logged"]["loss"] == "nan" and 2 in bad["deviating_ranks"]
    assert bad["samples"] == bad_steps(tmp_path)[0]["samples"] and bad["batch"] == 7
    assert main(["replay", str(tmp_path), "--step", "10", "--times", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "step 10 on dp=2,tp=1,pp=2, from the checkpoint after step 9, 3 times"
    assert shown[1] == "backend: gloo, 4 ranks on CPUs"
    assert shown[6] == "none: every replay gives what the run saw, and nothing is bad about it (bit for bit)"
    meeting = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--step", "8", "--json"]
    command = [sys.executable, "-m", "cuboid.cli.main", "replay", str(tmp_path), *meeting]
    nodes = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    told = "".join(node.communicate(timeout=300)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0] and json.loads(told) == bad, "on two nodes as on one"
    assert contents(tmp_path) == before, "nothing is written there"


def test_bad_data_is_bad_on_every_layout(tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that is too high makes spikes of some steps, whose updates are skipped."""
    spikes = ("resilience.spike_score=1", "resilience.spike_window=4", "resilience.most_bad_steps=100")
    run = prepared(tmp_path, *spikes, "learning_rate.peak=0.05")
    pool.run("tests.training.cases:train_rank", (run,), ranks=4)
    told = bad_steps(tmp_path)[-1]
    same = replay(capsys, tmp_path, "--step", str(told["step"]))
    assert (same["cause"], same["identical"], same["logged"]["loss"]) == ("data", True, told["loss"])
    assert same["attempts"][0]["loss"] == told["loss"] and same["batch"] == told["batch"]
    other = replay(capsys, tmp_path, "--step", str(told["step"]), "--layout", "tp=2")
    assert (other["cause"], other["matches"], other["identical"]) == ("data", True, False)


def test_what_is_no_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert capsys.readouterr().err == f"error: RUN={tmp_path} has no run.toml; name the folder of a run\n"
    prepared(tmp_path)
    assert main(["replay", str(tmp_path), "--step", "11"]) == 2
    assert capsys.readouterr().err == f"error: --step 11 is no step of {tmp_path}; use 1 to 10\n"
    prepared(tmp_path / "island-0", "islands.count=2")
    assert main(["replay", str(tmp_path / "island-0"), "--step", "1"]) == 2
    assert "islands.count=2 cannot be replayed: batches" in capsys.readouterr().err


def test_attempts_that_differ_are_the_hardware() -> None:
    run = short_run("dp=2", "unused")
    logged = Logged(Seen(math.nan, math.nan), "loss is not finite", (), (), str(run.layout))
    assert judge([Seen(1.0, 2.0), Seen(1.0, 2.0000001)], logged, run).cause == "hardware"
    assert judge([Seen(math.nan, math.nan)] * 2, logged, run).cause == "data"
    assert judge([Seen(1.0, 2.0)] * 2, logged, run).cause == "passing"
