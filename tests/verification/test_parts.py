"""`benchmarks/parts.py` in short: all parts of a recipe at once on a layout of each kind, and what the table says."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from tests.cost.test_score_card import module

module("at_once")  # which the other imports
PARTS = module("parts")


@pytest.mark.parametrize("group", ["tp", "pp", "cp", "ep", "hybrid", "5d"])
def test_all_parts_together(pool: Pool, group: str) -> None:
    layout = PARTS.LAYOUTS[group][-1 if group in ("pp", "hybrid") else 0]
    found = PARTS.prove(pool, PARTS.Case("all", group, (layout,)))
    assert 0 < found["error"] < 1 and not {"differs", "failed", "refused"} & found.keys(), found


def test_sums_in_bf16(pool: Pool) -> None:
    found = PARTS.prove(pool, PARTS.Case("bf16-sums", "ep", ("dp=2,tp=2,ep=4,zero=3",)))
    assert "error" in found and not {"differs", "failed", "refused"} & found.keys(), found


def test_all_parts_resume(pool: Pool) -> None:
    found = PARTS.prove(pool, PARTS.Case("all", "resume", ("dp=2,tp=2,zero=3", "tp=2,pp=2,schedule=zbv")))
    assert 0 < found["error"] < 1 and not {"differs", "failed", "refused"} & found.keys(), found


def test_what_is_refused_and_what_differs_is_told(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    refused = PARTS.prove(pool, PARTS.Case("bf16-sums", "resume", ("dp=2", "tp=2")))
    assert refused["refused"].startswith("training.precision=bf16 is too coarse")
    wrong = {"part": "muon", "group": "tp", "layouts": ("tp=2",), "error": 3e5, "differs": "gradient_error 3e-4"}
    PARTS.show([refused, wrong, {**wrong, "part": "adamw"} | {"error": 1e-6}], ["tp", "resume"])
    said = capsys.readouterr().out
    assert "| muon | 0 of 1 | – |" in said and "| bf16-sums | – | – |" in said and "refused: bf16-sums" in said


def test_every_part_is_refused_nowhere() -> None:
    """Construction alone: each makes a run on each layout, but for coarse sums in a chain."""
    for case in PARTS.cases(PARTS.PARTS, PARTS.GROUPS):
        if (case.part, case.group) != ("bf16-sums", "resume"):
            assert case.runs()
