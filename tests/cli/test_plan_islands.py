"""A cluster file of several groups at the command line: planned, written, and trained by two islands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cuboid.cli.main import main
from tests.cli.command import environment, rows
from tests.launch.ports import free_port

TWO_HOSTS = """
[[groups]]
name = "left"
accelerator = "cpu"
accelerators_per_node = 2
[[groups]]
name = "right"
accelerator = "cpu"
accelerators_per_node = 1
[[links]]
between = ["left", "right"]
bandwidth_gbit = 1
latency_ms = 1
"""
QUESTION = ["tiny-llama", "sites.toml", "--global-batch", "8", "--seq", "64"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sites.toml").write_text(TWO_HOSTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_of_islands_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--islands", "every=2,delay=1,bits=8", "-o", "plan.toml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [island["name"] for island in answer["islands"]] == ["left", "right"]
    place = f"127.0.0.1:{free_port()}"
    short = ["training.steps=4", "data.source=python-stdlib", "training.device=cpu", "output.folder=runs"]
    settings = [part for field in short for part in ("--set", field)]
    settings += ["--islands-rendezvous", place, "--oversubscribe"]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "cuboid.cli.main", "train", "plan.toml", "--island", str(number), *settings],
            cwd=folder,
            env=environment(),
        )
        for number in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    for number, island in enumerate(answer["islands"]):
        text = (folder / f"runs/island-{number}/run.toml").read_text()
        assert f'layout = "{island["layout"]}"' in text
        assert "global_batch = " + ("5" if number == 0 else "3") in text, "by their speeds"
        told = [row["islands"] for row in rows(folder / f"runs/island-{number}/metrics.jsonl") if "islands" in row]
        assert told[-1]["islands"] == 2
        if island["layout"] == "dp=1,tp=1,pp=1":  # rank 0 sends all
            assert told[0]["sent_bytes"] == pytest.approx(island["sent_bytes"], rel=0.6)


def test_it_says_what_it_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--tokens", "1e9"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "on 2 islands of sites, 8 × 64 tokens by their speeds" in shown
    assert main(["plan", *QUESTION, "--islands", "batch_weights=1:1"]) == 0
    assert "on 2 islands of sites, 4 × 64 tokens each" in " ".join(capsys.readouterr().out.split())
    assert "one job over the links:" in shown
    assert "arXiv 2503.09799 expect a loss" in shown
    assert "1 billion tokens take" in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--objective", "memory"], "objective=memory is for accelerators of one group"),
        (["--for-engine", "megatron"], "name one group, as in sites.toml:left"),
        (["--islands", "every=0"], "islands.every=0 is too small"),
        (["--islands", "delay=40"], "islands.delay=40 is not over before"),
        (["--fix", "tp=64"], "tp=64"),
    ],
)
def test_what_cannot_work_is_refused(
    options: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *QUESTION, *options]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["plan", "tiny-llama", "cpux2", *QUESTION[2:], "--islands", "every=4"]) == 2
    assert "--islands every=4 is for a cluster file with several groups" in capsys.readouterr().err


def test_a_plan_is_explained_drawn_and_survives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--islands", "every=4,fragments=2", "-o", "plan.toml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["explain", "plan.toml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_seconds"] == answer["step_seconds"]
    assert [island["layout"] for island in told["islands"]] == [island["layout"] for island in answer["islands"]]
    assert any("left ↔ right: 1 Gbit/s × 0.88" in line for line in told["formulas"])
    assert main(["explain", "plan.toml", "--island", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == answer["islands"][1]["layout"]
    assert main(["simulate", "plan.toml", "--picture", "rounds.svg", "--trace", "rounds.json"]) == 0
    shown = capsys.readouterr().out
    assert "left" in shown and "right" in shown
    assert (folder / "rounds.svg").exists()
    assert json.loads((folder / "rounds.json").read_text())["traceEvents"]
    assert main(["simulate", "plan.toml", "--json"]) == 0
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert [each["due"] for each in rounds] == [2, 4, 6, 8, 8]
    assert main(["simulate", "plan.toml", "--island", "0"]) == 0
    assert "micro-batches" in capsys.readouterr().out
    assert main(["goodput", "plan.toml", "--mtbf-hours", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["one_job"] < found["expected"] < 1
    assert found["expected"] == pytest.approx(found["simulated"], abs=0.02)
    assert main(["goodput", "plan.toml", "--gpus", "8"]) == 2
    assert main(["explain", "plan.toml", "--island", "7"]) == 2
    assert main(["goodput", "plan.toml", "--picture", "x.svg"]) == 2
    assert "not for a plan of islands" in capsys.readouterr().err


def test_an_island_that_is_not_in_the_plan_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "-o", "plan.toml"]) == 0
    assert main(["train", "plan.toml", "--island", "2", "--islands-rendezvous", "localhost:1"]) == 2
    assert "island=2 is not in the plan; use island=0 to island=1" in capsys.readouterr().err
    assert main(["export", "plan.toml", "--to", "megatron"]) == 2
    assert "plans several islands" in capsys.readouterr().err


def test_unequal_replicas_are_one_of_the_ways(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (
        TWO_HOSTS.replace("cpu", "h100", 1)
        .replace("cpu", "a100")
        .replace("bandwidth_gbit = 1", "bandwidth_gbit = 3200")
    )
    (folder / "sites.toml").write_text(kinds)
    question = ["qwen2.5-0.5b", "sites.toml", "--global-batch", "1440", "--seq", "2048"]
    assert main(["plan", *question, "-o", "plan.toml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "one job of unequal parts over the links" in shown
    assert main(["explain", "plan.toml", "--json"]) == 0
    unequal = json.loads(capsys.readouterr().out)["unequal"]
    assert "batch_weights=" in unequal["layout"]


def test_a_job_file_of_an_island(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "-o", "plan.toml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    launch = ["launch", "slurm", "plan.toml", "--set", "data.source=python-stdlib"]
    assert main([*launch, "--island", "1", "--islands-rendezvous", "site-a:29700", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == answer["islands"][1]["layout"]
    assert told["name"] == "tiny-llama-island-1"
    assert "cuboid train plan.toml --island 1 --islands-rendezvous site-a:29700" in told["text"]
    assert main(launch) == 2
    assert "islands.count=2 needs --island" in capsys.readouterr().err
    assert main([*launch, "--island", "1"]) == 2
    assert "needs --islands-rendezvous" in capsys.readouterr().err
