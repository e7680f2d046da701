"""`benchmarks/chaos.py` in short: one fault of each kind that strikes from outside, and what the campaign looks at."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # its files import each other
import chaos_job  # noqa: E402
import chaos_nodes  # noqa: E402
import chaos_ranks  # noqa: E402
from hosts import Hosts, why_no_hosts  # noqa: E402

LAYOUT = "dp=2"
FIELDS = ["training.device=cpu"]
QUICK = ("torn", "clock")
KINDS = [
    kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.thorough)
    for kind in ("flip", *chaos_ranks.OUTSIDE)
    if not chaos_ranks.why_not(kind, [LAYOUT])
]
"""Those that this machine lets be tried: disks need root, clocks a compiler."""
ON_HOSTS = not why_no_hosts()


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chaos_ranks.make_reference(tmp_path_factory.mktemp("unharmed"), LAYOUT, FIELDS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> chaos_nodes.Alone:
    return chaos_nodes.Alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_one_machine_leaves_no_trace(tmp_path: Path, unharmed: Path, kind: str) -> None:
    told = chaos_ranks.RanksJob(tmp_path, 0, LAYOUT, [kind], FIELDS, random.Random(kind)).run(unharmed)
    assert told.problems == []
    assert [fault.split()[0] for fault in told.faults] == [kind]


NODES_KINDS = [["pulse", "leader"], ["filled"], ["partition"]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kinds", [kinds for kinds in NODES_KINDS if not any(chaos_nodes.why_not(kind, ON_HOSTS) for kind in kinds)]
)
def test_four_nodes_end_right(tmp_path: Path, alone: chaos_nodes.Alone, kinds: list[str]) -> None:
    hosts = Hosts(chaos_nodes.NODES + 1, "1gbit") if "partition" in kinds else None
    try:
        told = chaos_nodes.NodesJob(tmp_path, 0, kinds, hosts, random.Random(3)).run(alone)
    finally:
        if hosts is not None:
            hosts.close()
    assert told.problems == []
    assert [fault.split()[0] for fault in told.faults] == kinds


def test_what_is_lost_or_twice_or_another_is_told() -> None:
    expected: list[dict[str, Any]] = [{"step": step, "loss": 4.0} for step in (1, 2, 3)]
    other = [*expected[:2], {"step": 3, "loss": 4.0 + 1e-6}]
    found = {"same": expected, "lost": expected[::2], "twice": [*expected[:2], *expected[1:]], "other": other}
    told = {name: chaos_job.Told("ranks", LAYOUT) for name in found}
    for name, rows in found.items():
        chaos_ranks.same_rows(told[name], rows, expected, 1e-9)
    assert told["same"].problems == []
    assert told["lost"].problems == ["steps are lost or twice: [1, 3]"]
    assert told["twice"].problems == ["steps are lost or twice: [1, 2, 2, 3]"]
    assert "2.5e-07 from that of the run nothing happened to" in told["other"].problems[0]


def test_two_writers_are_seen_and_one_whose_file_was_replaced_is_none(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    rows.write_text("")
    open_for_ever = "import sys, time; file = open(sys.argv[1], 'a'); print('open', flush=True); time.sleep(600)"

    def start(_: int, environment: dict[str, str]) -> Any:
        words = [sys.executable, "-c", open_for_ever, str(rows)]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        return process

    job = chaos_job.Job(tmp_path, tmp_path / "log", start)
    try:
        job.start(0)
        rows.rename(tmp_path / "old")
        (tmp_path / "old").unlink()
        rows.write_text("")
        job.start(1)
        watch = chaos_job.WriterWatch(job)
        time.sleep(1)
        assert watch.end() == []
        job.start(2)
        watch = chaos_job.WriterWatch(job)
        time.sleep(1)
        assert "at once" in watch.end()[0]
    finally:
        job.end()
