"""The same options for the same things: every command spells what it has in common with others alike."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from cuboid.cli.main import GROUPS, OLD_SPELLINGS, VERBS, main, module_of

SIMULATED = ["--layout", "dp=8,tp=2,pp=4", "--global-batch", "256", "--seq", "8192", "--json"]


def options_of(verb: str) -> dict[str, list[str]]:
    """Name of a parameter -> its spellings; those of arguments have no dashes."""
    application = typer.Typer(add_completion=False)
    application.command()(import_module(f"cuboid.cli.{module_of(verb)}").command)
    parameters: list[Any] = typer.main.get_command(application).params
    return {parameter.name: list(parameter.opts) for parameter in parameters}


@pytest.mark.parametrize("verb", VERBS)
def test_what_commands_have_in_common_is_spelled_alike(verb: str) -> None:
    spellings = list(options_of(verb).values())
    shown = {option for each in spellings for option in each}
    assert "--json" in shown
    for pair in (["-o", "--output"], ["--seq", "--sequence"]):
        assert pair in spellings or not shown & set(pair), pair
    assert not shown & {"--dtype", "--out", "--model-name", "--batch-size", "--format"}
    for old, new in OLD_SPELLINGS.get(verb, {}).items():
        assert new in shown and old not in shown


@pytest.mark.parametrize("verb", ["plan", "explain", "simulate", "map"])
def test_a_model_is_followed_by_its_cluster(verb: str) -> None:
    spellings = [each for each in options_of(verb).values() if not each[0].startswith("-")]
    assert spellings[0][0] in ("model", "plan") and spellings[1][0] in ("cluster", "place")


def test_old_spellings_still_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--dtype", "int8"]) == main(["verify", "--dtype=int8"]) == 2
    assert capsys.readouterr().err.count("Invalid value for '--precision': 'int8'") == 2
    assert main(["export", "plan.toml", "--to", "megatron", "--dtype", "bf16"]) == 2
    assert "precision=bf16 is for models" in capsys.readouterr().err
    rows = tmp_path / "runs.csv"
    rows.write_text("tp,pp,seq,gpu\n1,1,1024,H100\n", encoding="utf-8")
    assert main(["estimate", "--rows", str(rows), "--out", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").exists()


def test_a_value_is_not_taken_for_an_old_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "none", "--dtype", "bf16"]) == 2
    assert "No such option: --dtype" in capsys.readouterr().err


def test_a_plan_or_a_model_a_cluster_and_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    fixed = ["--fix", "dp=8,tp=2,pp=4", "--global-batch", "256", "--seq", "8192"]
    assert main(["plan", "llama3-8b", "h100x64", *fixed, "-o", str(plan)]) == 0
    capsys.readouterr()
    for verb in ("simulate", "explain", "map"):
        named = SIMULATED if verb != "map" else ["--layout", "dp=8,tp=2,pp=4", "--json"]
        assert main([verb, "llama3-8b", "h100x64", *named]) == 0
        said = capsys.readouterr().out
        assert main([verb, str(plan), "--layout", "dp=8,tp=2,pp=4", "--json"]) == 0
        assert capsys.readouterr().out == said
        assert main([verb, "llama3-8b"]) == 2
        assert f"write cuboid {verb} llama3-8b h100x64 --layout" in capsys.readouterr().err


def test_a_cluster_named_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "llama3-8b", "h100x64", "--layout", "dp=64", "--cluster", "h100x8"]) == 2
    assert "--cluster h100x8 is given twice" in capsys.readouterr().err


def test_the_help_shows_every_command_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(verb for verbs in GROUPS.values() for verb in verbs) == sorted(VERBS)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [shown.index(f"\n{title}:\n") for title in GROUPS] == sorted(
        shown.index(f"\n{title}:\n") for title in GROUPS
    )
    assert all(f"\n  {verb} " in shown for verb in VERBS)
