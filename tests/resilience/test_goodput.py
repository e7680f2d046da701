"""Where the time of a run went: every second in one place, over any chain of attempts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.resilience.goodput import Attempt, Goodput, Spent, carry_over, find_attempt, note_attempt, read_spent
from cuboid.telemetry.heartbeat import PHASE_SINCE, PHASES, SPENT, Heartbeat

seconds = st.floats(0, 1000)


def test_the_first_attempt_begins_with_nothing_but_its_start() -> None:
    assert carry_over(Spent(), Spent(), Attempt(100.0, 103.0)) == Spent(until=100.0)


def test_what_lies_between_two_commands_is_no_loss() -> None:
    before = Spent(steps=50.0, set_up=10.0, until=160.0)
    after = carry_over(before, before, Attempt(1000.0, 1004.0))
    assert after == replace(before, stopped=840.0, until=1000.0)
    assert after.goodput == pytest.approx(50 / 60)


def test_a_failure_costs_the_steps_done_again_and_the_way_to_the_next_start() -> None:
    newest = Spent(steps=50.0, set_up=10.0, until=160.0)
    kept = Spent(steps=42.0, set_up=10.0, until=151.0)
    after = carry_over(newest, kept, Attempt(90.0, 167.5))
    assert after == Spent(steps=42.0, set_up=10.0, lost_steps=8.0, restarts=7.5, until=167.5)


@given(st.lists(st.tuples(seconds, seconds, seconds, st.booleans()), min_size=1, max_size=12))
def test_every_second_is_in_one_place(attempts: list[tuple[float, float, float, bool]]) -> None:
    """Each attempt steps for a while, loses a part of that, and another starts later, by the same command or a new
    one."""
    clock, command = 5000.0, 5000.0
    spent, kept = Spent(), Spent()
    for steps, lost, gap, same_command in attempts:
        spent = carry_over(spent, kept, Attempt(command, clock))
        kept = replace(spent, steps=spent.steps + max(0.0, steps - lost))
        clock += steps
        spent = replace(spent, steps=spent.steps + steps, until=clock)
        clock += gap
        command = command if same_command else clock
    assert spent.total + spent.stopped == pytest.approx(spent.until - 5000.0)
    assert 0 <= spent.goodput <= 1


def _heartbeat(**phases: float) -> Heartbeat:
    """One that has spent so long in its phases."""
    heartbeat = Heartbeat()
    for name, value in phases.items():
        heartbeat.words[SPENT + PHASES.index(name)] = int(value * 1e9)  # type: ignore[arg-type]
    return heartbeat


def test_the_book_is_kept_from_attempt_to_attempt(tmp_path: Path) -> None:
    heartbeats = tmp_path / "heartbeats"
    heartbeats.mkdir()
    start = time.time()
    note_attempt(heartbeats, Attempt(start - 100, start - 100))
    heartbeat = Heartbeat()
    heartbeat.folder = heartbeats
    book = Goodput(tmp_path, [], 0, heartbeat)
    heartbeat.words[SPENT + PHASES.index("step")] += int(60e9)
    heartbeat.words[SPENT + PHASES.index("save")] += int(5e9)
    time.sleep(0.01)
    first = book.now()
    assert first.steps == pytest.approx(60) and first.saves == pytest.approx(5)
    assert first.set_up == pytest.approx(35, abs=30) and first.total == pytest.approx(100, abs=30)
    earlier = replace(first, steps=25.0, until=first.until - 40)
    rows = [{"step": 1, "spent": earlier.as_row()}, {"step": 2, "spent": first.as_row()}]
    again = Goodput(tmp_path, rows, 1, heartbeat)
    assert again.now().lost_steps == pytest.approx(35, abs=0.1)
    assert again.now().steps == pytest.approx(25, abs=0.1)
    written = read_spent(tmp_path)
    assert written is not None and written.lost_steps == pytest.approx(35, abs=0.1)
    third = Goodput(tmp_path, rows[:1], 1, heartbeat)
    assert third.now().lost_steps == pytest.approx(35, abs=0.1), "also where no row was written in between"
    third.rewind(rows[:1], 0)
    assert third.now().lost_steps == pytest.approx(60, abs=0.1) and third.now().steps == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("days", [30, -30])
def test_a_wall_clock_that_is_set_costs_no_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """While the ranks train, and before they are started again."""
    heartbeats, right = tmp_path / "heartbeats", time.time
    heartbeats.mkdir()
    began = Attempt(right(), right())
    heartbeat = Heartbeat()
    heartbeat.folder = heartbeats
    for jumped in (False, True):
        note_attempt(heartbeats, replace(began, ranks=began.now))
        book = Goodput(tmp_path, [], 0, heartbeat)
        monkeypatch.setattr(time, "time", lambda: right() + days * 86400)
        spent = book.now()
        assert spent.total < 60 and spent.stopped < 60, jumped
        book.write()


def test_ranks_without_a_supervisor_count_from_their_own_start() -> None:
    heartbeat = _heartbeat(step=30.0)
    assert time.time() - find_attempt(heartbeat).command == pytest.approx(
        30 + (time.monotonic_ns() - heartbeat.words[PHASE_SINCE]) / 1e9, abs=29
    )


def test_a_line_for_people() -> None:
    spent = Spent(steps=90.0, set_up=4.0, saves=0.01, lost_steps=2.0, restarts=4.0)
    assert spent.told() == (
        "goodput 90.0 %: 90.0 of 100.0 s in steps that count (4.0 s set up, 2.0 s lost steps, 4.0 s restarts)"
    )
    assert json.loads(json.dumps(spent.as_row()))["steps"] == 90.0


def test_damaged_books_are_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "goodput.json").write_text('{"steps": 3')
    assert read_spent(tmp_path) is None
    Goodput(tmp_path, [{"step": 1}, {"step": 2, "spent": {"unknown": 1}}], 2, Heartbeat())
    assert read_spent(tmp_path) is not None


def test_who_reads_an_attempt_while_it_is_noted_finds_the_old_one_or_the_new(tmp_path: Path) -> None:
    """Ranks that torchrun started read it while the first of them writes it."""
    note_attempt(tmp_path, Attempt(1.0, 1.0, 1.0))
    with (tmp_path / "attempt.json").open() as old:
        note_attempt(tmp_path, Attempt(2.0, 2.0, 2.0))
        assert json.loads(old.read()) == {"command": 1.0, "ranks": 1.0, "clock": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["attempt.json"]
