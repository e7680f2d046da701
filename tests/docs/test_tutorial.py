"""The tutorial, followed word for word by a shell in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment
from tests.docs.pages import ROOT, blocks, saved_files

PAGE = ROOT / "docs/tutorial.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was followed; `cuboid` is this very program."""
    folder, programs = tmp_path_factory.mktemp("try"), tmp_path_factory.mktemp("bin")
    (programs / "cuboid").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cuboid.cli.main "$@"\n')
    (programs / "cuboid").chmod(0o755)
    for name, text in saved_files(PAGE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    variables = environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", HOME=str(folder))
    for block in blocks(PAGE):
        for command in block.commands if block.language == "console" else []:
            given = ["bash", "-c", command.words]
            done = subprocess.run(given, cwd=folder, env=variables, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{command.words}\n{done.stderr}"
            for line in command.shown:
                assert line in done.stdout.splitlines(), f"{command.words} does not print {line!r}, but {done.stdout}"
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_it_says_is_so(folder: Path) -> None:
    one, eight = losses(folder / "runs/one"), losses(folder / "runs/eight")
    assert len(one) == 20 and one[-1] < one[0] - 1
    assert eight == pytest.approx(one, rel=1e-4), "the layout changes nothing but speed"
    safe = losses(folder / "runs/safe")
    assert len(safe) == 25 and safe[:20] == pytest.approx(one, rel=1e-4), "killed, started again, moved"
    (failure,) = [json.loads(line) for line in (folder / "runs/safe/failures.jsonl").read_text().splitlines()]
    assert failure["restarted"] and "rank 1" in failure["reason"]
    for name in ("report.html", "plan.html", "step.svg", "cluster.sbatch", "my-tokens"):
        assert (folder / name).exists(), name
