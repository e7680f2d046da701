"""plan, explain, simulate and export at the command line."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cuboid.cli.main import main

QUESTION = ["llama3-8b", "h100x32", "--global-batch", "64", "--seq", "4096"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "plan.toml"
    assert main(["plan", *QUESTION, "--fix", "pp=2", "--fix", "schedule=1f1b,zero=1", "-o", str(file)]) == 0
    capsys.readouterr()
    return str(file)


def test_plan_shows_layouts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert "llama3-8b (8.03 billion parameters) on h100x32" in shown
    assert "MFU" in shown
    assert "next:" in shown


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--top", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["plans"]) == 2
    first = answer["plans"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["step"].values()))
    assert first["memory_fraction"] <= 0.95
    assert {"layout", "mfu", "bubble", "reasons", "warnings", "layers_per_stage"} <= set(first)


@pytest.mark.parametrize("objective", ["memory", "cost"])
def test_other_objectives(objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--objective", objective, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


def test_the_fewest_accelerators_for_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--objective", "gpus", "--tokens", "1e10", "--deadline", "5", "--json"]
    assert main(["plan", *QUESTION, *wanted]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plans"][0]["cluster"] != "h100x32"
    assert answer["days"] <= 5
    assert main(["plan", *QUESTION, "--tokens", "1e10"]) == 0
    assert "10 billion take" in " ".join(capsys.readouterr().out.split())


def test_a_plan_file_holds_what_was_fixed(plan_file: str) -> None:
    table = tomllib.loads(Path(plan_file).read_text())
    assert "pp=2" in table["layout"]
    assert "zero=1" in table["layout"]
    assert table["plan"]["cluster"] == "h100x32"


def test_explain(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", plan_file]) == 0
    shown = capsys.readouterr().out
    for title in ("Decision", "Traffic", "Memory", "Time", "Rivals"):
        assert f"\n{title}\n" in shown
    assert main(["explain", plan_file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["framework"]["parameters"] == 8030261248
    assert answer["best"]["step_seconds"] <= answer["step_seconds"]


def test_explain_a_layout_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpt3-175b", "a100-80gx1024", "--layout", "dp=8,tp=8,pp=16", "--global-batch", "1536", "--seq", "2048"]
    assert main(["explain", *arguments]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2.7 GB of weights + 2.7 GB of gradients + 16.4 GB of optimizer state" in shown


def test_simulate(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    assert main(["simulate", plan_file, "--trace", str(trace), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 F" in shown
    assert "micro-batches, bubble" in shown
    assert json.loads(trace.read_text())["traceEvents"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert main(["simulate", plan_file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["bubble_by_rank"]) == 2


def test_export(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    assert main(["export", plan_file, "--to", "megatron", "-o", str(script)]) == 0
    assert "--pipeline-model-parallel-size 2" in script.read_text()
    assert main(["export", plan_file, "--to", "torchtitan"]) == 2
    assert "zero=1" in capsys.readouterr().err
    assert main(["export", plan_file, "--to", "megatron", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "megatron"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["plan", "llama3-8b", "h10x8", "--global-batch", "8", "--seq", "512"],
            "unknown accelerator=h10; did you mean",
        ),
        (["plan", "llama9", "h100x8", "--global-batch", "8", "--seq", "512"], "unknown model=llama9; did you mean"),
        (["plan", "gpt3-175b", "a100x8", "--global-batch", "64", "--seq", "2048"], "cluster=a100x8 is too small"),
        (["plan", *QUESTION, "--objective", "speed"], "unknown objective=speed"),
        (["plan", *QUESTION, "--objective", "gpus"], "objective=gpus needs a deadline"),
        (["plan", *QUESTION, "--max-memory", "lots"], "max-memory=lots is not a size"),
        (["plan", *QUESTION, "--fix", "tq=8"], "unknown key tq; did you mean"),
        (["plan", *QUESTION, "--engine", "megatronn"], "engine=megatronn is unknown"),
        (["plan", *QUESTION, "-o", "/nowhere/at/all/plan.toml"], "output=/nowhere/at/all/plan.toml cannot be written"),
        (["explain", "missing.toml"], "missing.toml does not exist"),
        (["explain", "llama3-8b"], "llama3-8b is not a plan file"),
        (["explain", "llama3-8b", "h100x8", "--layout", "dp=8"], "--global-batch is missing"),
        (["simulate", "missing.toml"], "missing.toml does not exist"),
        (["export", "missing.toml", "--to", "megatron"], "missing.toml does not exist"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {sentence}")
    assert shown.err.count("\n") == 1


def test_planning_does_not_import_torch(plan_file: str) -> None:
    code = f"""
import contextlib, io, sys
from cuboid.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    for verb in (["explain"], ["simulate"], ["export", "--to", "nanotron"]):
        assert main([verb[0], {plan_file!r}, *verb[1:]]) == 0
print("torch" in sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False"
