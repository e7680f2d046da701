"""What is said of a rank's memory: by kind, of what an operation makes, and at its fullest."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.oom import out_of_memory_in
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.training.memory import (
    MemoryLog,
    Tally,
    exhaust,
    held,
    held_here,
    left_by_autograd,
    resident_peak,
    storages,
)
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step
from tests.parallel.cases import CPU, small_run


def trained(precision: str = "bf16", steps: int = 1) -> tuple[Engine, Optimizer]:
    run = small_run("dp=1", f"training.precision={precision}")
    engine = build_engine(run, 0, CPU)
    optimizer = Optimizer(engine, run.optimizer)
    for step in range(steps):
        train_step(engine, optimizer, micro_batches(make_source(run), run, step, 0, CPU), 1e-3)
    return engine, optimizer


@pytest.mark.parametrize(("precision", "weight", "master", "moment"), [("bf16", 2, 2, 4), ("float64", 8, 0, 8)])
def test_bytes_by_kind(precision: str, weight: int, master: int, moment: int) -> None:
    """A bf16 weight is half of its float32 master, of which the other half is kept beside it."""
    engine, optimizer = trained(precision)
    count = sum(part.size for unit in engine.units for part in unit.parts)
    found = held(engine.units, optimizer)
    assert found["parameters"] == weight * count
    assert found["master weights"] == master * count
    assert found["optimizer"] == pytest.approx(2 * moment * count, rel=0.01)
    assert held(engine.units, None)["optimizer"] == 0


def test_what_a_process_has_built_is_found_without_being_told() -> None:
    gc.collect()  # engines of tests before this one wait in reference cycles and would go in between
    before = held_here()
    engine, optimizer = trained()
    found, expected = held_here(), held(engine.units, optimizer)
    grown = {kind: found[kind] - before[kind] for kind in found}
    assert grown["parameters"] == expected["parameters"] and grown["optimizer"] == expected["optimizer"]
    assert grown["master weights"] == expected["master weights"]


def test_gradients_that_no_unit_has_taken_over() -> None:
    engine, _ = trained(steps=0)
    assert left_by_autograd(engine.units) == 0
    parameter = next(iter(engine.units[0].parameters.values()))
    parameter.grad = torch.zeros_like(parameter)
    assert left_by_autograd(engine.units) == parameter.grad.nbytes


def test_a_tally_follows_what_is_made_until_it_is_gone() -> None:
    given = torch.zeros(256)
    with Tally(set(), lambda: 1000) as tally:
        first = given + 1  # 1 KiB
        view = first.view(2, 128)[0]
        assert (tally.peak, tally.beside) == (2024, 1024), "a view is nothing of its own"
        del first
        second = view + 1  # 512 bytes beside the first, which its view keeps
        assert tally.peak == 1000 + 1024 + 512
        del view
        third = second + 1
        assert tally.peak == 1000 + 1024 + 512, "the first was gone before the third was made"
        del second, third


def test_what_others_count_is_not_counted_twice() -> None:
    engine, optimizer = trained()
    known = storages(engine.units, optimizer)
    run = engine.run
    tally = Tally(known, lambda: sum(held(engine.units, optimizer).values()))
    with tally:
        train_step(engine, optimizer, micro_batches(make_source(run), run, 1, 0, CPU), 1e-3)
    assert 0 < tally.beside < tally.peak
    assert tally.peak - tally.beside <= sum(held(engine.units, optimizer).values())


def test_a_row_whenever_the_peak_has_grown(tmp_path: Path) -> None:
    run = small_run("dp=1", f"output.folder={tmp_path}")
    log = MemoryLog(run, 3, CPU)
    engine, optimizer = trained()
    with log:
        log.record(1, engine, optimizer)
        log.record(2, engine, optimizer)
        peak = resident_peak()
        ballast = torch.ones(max(peak // 20, 2**26), dtype=torch.uint8)
        log.record(3, engine, optimizer)
    rows = [json.loads(line) for line in (tmp_path / "memory-00003.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1 and 2 not in [row["step"] for row in rows], "nothing had grown by then"
    assert rows[-1]["step"] == 3 or resident_peak() < 1.01 * peak, "unless the pages were there all along"
    assert rows[0]["measured"] == "resident" and rows[0]["device"] == "cpu"
    assert 0 < rows[0]["before"] <= rows[0]["peak"] <= rows[-1]["peak"]
    kinds = held(engine.units, optimizer)
    assert rows[0]["weights"] == kinds["parameters"]
    assert rows[0]["optimizer"] == kinds["optimizer"] + kinds["master weights"]
    del ballast


def test_more_than_there_is_cannot_be_had() -> None:
    with pytest.raises(RuntimeError) as lack:
        exhaust(CPU)
    assert out_of_memory_in(lack.value) is lack.value
