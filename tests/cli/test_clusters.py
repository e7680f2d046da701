"""`cuboid clusters`: what is known by name, and what a file says and omits."""

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main

SITES = """
[[groups]]
name = "a"
accelerator = "l40s"
nodes = 2
[[groups]]
name = "b"
accelerator = "rtx-4090"
price = 0.5
[[links]]
between = ["a", "b"]
bandwidth_gbit = 1
latency_ms = 20
"""


def test_accelerators_and_links_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {row["name"]: row for row in found["accelerators"]}
    assert {"l40s", "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000", "mi300x", "b200", "gb200"} <= set(names)
    assert names["rtx-4090"]["aliases"] == ["rtx4090"]
    assert all(row["source"]["memory_gib"] for row in names.values())
    assert all(row["bandwidth"] > 0 and row["source"]["bandwidth"] for row in found["links"])
    assert main(["clusters"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_a_file_is_shown_with_what_it_omits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    assert main(["clusters", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["site"], row["accelerator"]) for row in found["groups"]] == [
        ("a", "a", "l40s"),
        ("b", "b", "rtx-4090"),
    ]
    assert found["links"] == [{"between": ["a", "b"], "bandwidth_gbit": 1.0, "latency_ms": 20.0}]
    assert "price of a is not given: what it costs is not said" in found["omitted"]
    assert found["omitted"][0].startswith("tiers of a are not given: taken are pcie4")
    assert main(["clusters", str(path)]) == 0
    assert "! price of a is not given" in capsys.readouterr().out


def test_a_command_for_one_kind_takes_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    assert main(["map", "--layout", "dp=16", "--cluster", f"{path}:a"]) == 0
    assert main(["map", "--layout", "dp=16", "--cluster", str(path)]) == 2
    assert "takes one kind; name one of them, as in" in capsys.readouterr().err
