"""Nothing that a rank or the store does grows with the square of the ranks: `benchmarks/scale.py` at small sizes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL, LARGE = 64, 256


def load(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package."""
    specification = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[name] = loaded
    specification.loader.exec_module(loaded)
    return loaded


load("counted_store")
SCALE: Any = load("scale")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    found: list[Any] = [*SCALE.count(SMALL), *SCALE.count(LARGE)]
    return found


def test_no_phase_grows_faster_than_ranks_and_their_logarithm(rows: list[Any]) -> None:
    assert SCALE.too_fast(rows) == []
    assert {row.phase for row in rows} == {*SCALE.PHASES, "watch"}


def test_a_rank_does_as_much_in_a_large_job_as_in_a_small_one(rows: list[Any]) -> None:
    for small in (row for row in rows if row.ranks == SMALL and row.phase != "watch"):
        large = next(row for row in rows if (row.ranks, row.phase) == (LARGE, small.phase))
        assert large.calls / LARGE == pytest.approx(small.calls / SMALL, rel=0.1)
        assert large.most_calls <= 1.1 * small.most_calls, "the root of the tree has as many below it"
        assert large.groups == small.groups
        assert large.keys_left <= 1, "what was told last"


def test_what_a_node_keeps_in_memory_of_index_and_manifest_does_not_grow(rows: list[Any]) -> None:
    small, large = (row.node_bytes for row in rows if row.phase == "memory save")
    assert 0 < large < 1.02 * small, "numbers of ranks have more digits"


def test_what_grows_with_the_square_is_found(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is told what every rank wants, as an all-gather would do."""

    def told_to_all(rank: Any) -> None:
        rank.group.broadcast(rank.group.gather(b"x" * 100))

    monkeypatch.setattr(SCALE.Rank, "resume", told_to_all)
    again = [row for row in [*SCALE.count(SMALL), *SCALE.count(LARGE)] if row.phase == "resume"]
    (problem,) = SCALE.too_fast(again)
    assert problem.startswith("bytes in resume grow as ranks^")
