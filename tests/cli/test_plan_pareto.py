"""Prices, budgets and deadlines at the command line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cuboid.cli.main import main

PRICES = """
[[groups]]
name = "here"
accelerator = "a100"
nodes = 1
price = 2.0
spot_price = 1.0
life_hours = 20
[[groups]]
name = "there"
accelerator = "h100"
nodes = 1
price = 4.0
[[links]]
between = ["here", "there"]
bandwidth_gbit = 10
latency_ms = 20
"""
QUESTION = ["qwen2.5-0.5b", "prices.toml", "--global-batch", "64", "--seq", "2048", "--tokens", "1e10"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prices.toml").write_text(PRICES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_cheapest_in_time_is_a_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--objective", "cost", "--deadline", "3", "--front", "front.svg", "-o", "plan.toml", "--json"]
    assert main(["plan", *QUESTION, *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    chosen = answer["chosen"]
    assert chosen["spot"] and chosen["days"] <= 3
    assert [row["days"] for row in answer["front"]] == sorted(row["days"] for row in answer["front"])
    assert [row["cost"] for row in answer["front"]] == sorted((row["cost"] for row in answer["front"]), reverse=True)
    assert ElementTree.parse(folder / "front.svg").getroot() is not None
    table = tomllib.loads((folder / "plan.toml").read_text())
    assert table["training"]["steps"] == -(-(10**10) // (64 * 2048))
    assert main(["explain", "plan.toml", "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", *QUESTION, "--budget", "1e6"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the fastest within budget 1e+06" in shown
    assert "→" in shown


def test_least_energy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*options: str) -> dict[str, Any]:
        assert main(["plan", *options, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    offered = answer(*QUESTION, "--objective", "energy", "--deadline", "3", "--front", "front.svg")
    rows = [row["kwh"] for row in offered["front"]]
    assert rows == sorted(rows, reverse=True) and offered["chosen"]["kwh"] == rows[-1]
    assert " kWh, " in (folder / "front.svg").read_text()
    all_of_it = answer(*QUESTION)
    assert all_of_it["kwh"] == pytest.approx(all_of_it["days"] * 24 * 8 * (0.4 + 0.7))
    one_job = answer(*QUESTION, "--one-job")
    assert one_job["kwh"] == pytest.approx(one_job["days"] * 24 * 8 * (0.4 + 0.7))

    one_kind = [QUESTION[0], "h100x16", *QUESTION[2:]]
    energy = {name: answer(*one_kind, "--objective", name)["kwh"] for name in ("time", "cost", "energy")}
    assert energy["energy"] <= min(energy.values())
    assert main(["plan", *one_kind]) == 0
    assert f"at most {energy['time']:.3g} kWh, at board power" in " ".join(capsys.readouterr().out.split())

    unknown = [QUESTION[0], "tpu-v5ex8", *QUESTION[2:]]
    assert answer(*unknown)["kwh"] is None
    assert main(["plan", *unknown]) == 0
    assert "energy is not known without watts" in " ".join(capsys.readouterr().out.split())
    for options in ([], ["--deadline", "100"]):
        assert main(["plan", *unknown, *options, "--objective", "energy", "-o", "plan.toml"]) == 2
        assert "objective=energy needs the board power" in capsys.readouterr().err
    assert not (folder / "plan.toml").exists()


def test_fewest_of_several_groups(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION, "--objective", "gpus", "--deadline", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["accelerators"] == 1
    assert main(["plan", *QUESTION, "--objective", "gpus", "--days", "100", "--json"]) == 0  # as it was called


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--deadline", "0.0001"], "deadline=0.0001 days is too short"),
        (["--budget", "1"], "budget=1 is too small"),
        (["--budget", "-3"], "budget=-3 is not above 0"),
        (["--objective", "memory", "--budget", "9"], "objective=memory"),
        (["--deadline", "nan"], "deadline"),
        (["--budget", "9", "--islands", "every=64"], "islands=every=64 is not for objectives and limits"),
        (["--budget", "9", "--sensitivity"], "--sensitivity is not for objectives and limits"),
        (["--top", "3"], "top=3 is for accelerators of one group"),
        (["--one-job", "--sensitivity"], "--sensitivity is not for one job"),
        (["--one-job", "--fix", "layers=12:12"], "layers cannot be fixed: for groups --one-job chooses it"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *QUESTION, *options, "-o", "plan.toml"]) == 2
    assert sentence in capsys.readouterr().err
    assert not (folder / "plan.toml").exists()


def test_prices_need_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUESTION[:-2], "--objective", "cost"]) == 2
    assert "add --tokens 1e12" in capsys.readouterr().err
    assert main(["plan", "qwen2.5-0.5b", "a100x8", *QUESTION[2:], "--budget", "9"]) == 2
    assert "needs a price and the cluster file has none" in capsys.readouterr().err


def test_what_other_hardware_would_buy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["plan", QUESTION[0], "a100x8", *QUESTION[2:6], "--sensitivity"]
    assert main([*one, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sensitivity"]
    assert [row["gain"] for row in rows] == sorted((row["gain"] for row in rows), reverse=True)
    assert main(one) == 0
    assert "h200 in place of a100-80g: +" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *QUESTION[:6], "--sensitivity", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sensitivity"]
    assert {"links with 2 × the bandwidth", "2 × as many accelerators at here"} <= {row["what"] for row in rows}
