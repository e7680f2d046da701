"""`cuboid plan --one-job`, and what other commands make of the plan that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main

KINDS = """
[[groups]]
name = "new"
accelerator = "h100"
site = "lab"

[[groups]]
name = "old"
accelerator = "a100"
site = "lab"

[[links]]
between = ["lab", "lab"]
bandwidth_gbit = 1600.0
latency_ms = 0.02
"""
QUESTION = ["plan", "llama3-8b", "kinds.toml", "--one-job", "--global-batch", "128", "--seq", "4096"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kinds.toml").write_text(KINDS)
    return tmp_path


def test_a_plan_says_what_sits_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "-o", "plan.toml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "layers=" in shown and "with equal stages" in shown and "alone:" in shown
    assert "on each node of new: cuboid train plan.toml --nodes 2 --rendezvous HOST:29400 --group new" in shown
    assert main([*QUESTION, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["explain", "plan.toml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {key: value for key, value in answer.items() if key != "alone"}
    assert answer["tokens_per_second"] > answer["alone"]["new"]
    assert sum(here["layers"] for here in told["pipeline_ranks"]) == 32
    assert sorted(told["nodes"]) == ["new", "old"]


def test_what_is_pasted_into_a_shell_is_quoted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "kinds.toml").write_text(KINDS.replace('"new"', '"new; ls"'))
    assert main([*QUESTION, "-o", "a plan.toml"]) == 0
    assert "cuboid train 'a plan.toml' --nodes 2 --rendezvous HOST:29400 --group 'new; ls'" in capsys.readouterr().out


def test_other_commands_take_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--fix", "pp=2", "-o", "plan.toml"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.toml"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 F0" in shown and "micro-batches in" in shown
    assert main(["simulate", "plan.toml", "--picture", "step.svg", "--trace", "step.json", "--json"]) == 0
    assert [line["groups"] for line in json.loads(capsys.readouterr().out)["lines"]] == [["old", "new"]]
    assert (folder / "step.svg").read_text().startswith("<svg")
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    assert main(["explain", "plan.toml", "--engine", "megatron"]) == 2
    assert "engine=megatron is not for a plan of one job over several groups" in capsys.readouterr().err
    assert main(["map", "plan.toml", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["nodes"]
    assert [(row["nodes"], row["ranks"], row["pipeline_ranks"]) for row in rows] == [
        ([0, 0], [0, 7], [0, 0]),
        ([1, 1], [8, 15], [1, 1]),
    ]
    assert main(["explain", "plan.toml", "--layout", "dp=8,pp=2,zero=1,layers=16:16", "--json"]) == 0
    equal = json.loads(capsys.readouterr().out)
    assert main(["explain", "plan.toml", "--json"]) == 0
    assert equal["step_seconds"] > 1.3 * json.loads(capsys.readouterr().out)["step_seconds"]
    assert main(["export", "plan.toml", "--to", "megatron"]) == 2
    assert "plans one job over several groups" in capsys.readouterr().err
    assert main(["explain", "plan.toml", "--layout", "dp=4,pp=4"]) == 2
    assert "does not sit on the same ranks" in capsys.readouterr().err


def test_what_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--global-batch", "128", "--seq", "4096"]
    assert main(["plan", "llama3-8b", "h100x8", "--one-job", *asked]) == 2
    assert "--one-job is for a cluster file with several groups" in capsys.readouterr().err
    assert main([*QUESTION, "--objective", "cost"]) == 2
    assert "objective=cost is not for one job over several groups" in capsys.readouterr().err
    for field, sentence in (
        ("cp=2", "cp=2 is not tried for one job over several groups; use cp=1"),
        ("schedule=gpipe", "schedule=gpipe is not tried for one job over several groups; use schedule=1f1b or"),
        ("zero=0", "zero=0 is not tried for one job over several groups; use zero=1, zero=2 or zero=3"),
    ):
        assert main([*QUESTION, "--fix", field]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["plan", "llama3-405b", "kinds.toml", "--one-job", *asked]) == 2
    assert "no job over new and old fits llama3-405b" in capsys.readouterr().err
    assert not (folder / "plan.toml").exists()


def test_a_plan_that_somebody_broke_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--fix", "pp=2", "-o", "plan.toml"]) == 0
    whole = (folder / "plan.toml").read_text()
    for old, new, sentence in (
        ('groups = ["old", "new"]', 'groups = ["old", "other"]', "does not name a group for each of pp=2"),
        ("lines = [{replicas = 8", "lines = [{replicas = 3", "do not add up to dp=8"),
    ):
        assert old in whole
        (folder / "broken.toml").write_text(whole.replace(old, new))
        assert main(["explain", "broken.toml"]) == 2
        assert sentence in capsys.readouterr().err
