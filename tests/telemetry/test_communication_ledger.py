"""Calls and bytes of collectives, and what a ring sends for them."""

import json

import pytest

from cuboid.telemetry.communication_ledger import Entry, Ledger, differences


def test_equal_collectives_add_up() -> None:
    ledger = Ledger()
    ledger.add("tp", "all-reduce", 4, 100)
    ledger.add("tp", "all-reduce", 4, 10, calls=3)
    ledger.add("pp", "send", 2, 7)
    assert ledger.entries == {
        ("tp", "all-reduce"): Entry(4, 130, 4, "all-reduce"),
        ("pp", "send"): Entry(1, 7, 2, "send"),
    }


def test_one_rank_and_no_calls_are_nothing() -> None:
    ledger = Ledger()
    ledger.add("tp", "all-reduce", 1, 100)
    ledger.add("tp", "all-gather", 2, 100, calls=0)
    assert ledger == Ledger()


def test_a_ring_sends_what_its_algorithm_does() -> None:
    assert Entry(1, 800, 4, "all-reduce").sent == 1200
    assert Entry(1, 800, 4, "all-gather").sent == Entry(1, 800, 4, "reduce-scatter").sent == 600
    assert Entry(1, 800, 4, "all-to-all").sent == 600
    assert Entry(1, 800, 4, "send").sent == 800


def test_taking_empties() -> None:
    ledger = Ledger()
    ledger.add("data", "all-reduce", 2, 8)
    taken = ledger.take()
    assert taken.entries
    assert not ledger.entries
    assert Ledger.from_rows(taken.rows()) == taken


def test_differences_name_both_sides() -> None:
    one, other = Ledger(), Ledger()
    one.add("tp", "all-reduce", 2, 8)
    other.add("tp", "all-reduce", 2, 16)
    other.add("pp", "send", 2, 5)
    assert differences(one, one) == []
    assert differences(one, other) == [
        "pp send: counted none, predicted 1 of 5 bytes over 2 ranks",
        "tp all-reduce: counted 1 of 8 bytes over 2 ranks, predicted 1 of 16 bytes over 2 ranks",
    ]


def test_a_line_of_a_step_is_read_back_also_as_older_runs_wrote_it() -> None:
    ledger = Ledger()
    ledger.add("tp", "all-reduce", 4, 100)
    line = ledger.as_line(3)
    assert json.loads(line)["step"] == 3 and line.endswith("\n")
    for row in (json.loads(line), json.loads(line.replace('"collectives"', '"exchanges"'))):
        assert Ledger.is_row(row) and Ledger.from_row(row) == ledger


@pytest.mark.parametrize("rows", [None, 1, [1], [{}], [{"calls": "1", "bytes": 1, "ranks": 1, "kind": "send"}]])
def test_a_line_of_something_else_is_no_row(rows: object) -> None:
    assert not Ledger.is_row({"step": 3, "collectives": rows}) and not Ledger.is_row({"step": 3})
