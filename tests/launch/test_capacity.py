"""What this machine cannot start is refused before anything starts; what it can is not."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.capacity import (
    FILES,
    FILES_PER_RANK,
    PROCESS_BYTES,
    SLOT_BYTES,
    TASKS,
    Room,
    check_generation,
    check_ranks,
    check_run,
    room_here,
    state_bytes,
)
from cuboid.spec.generation import GenerationSpec, parse_layout
from cuboid.spec.model import load_model
from cuboid.spec.run import build_run
from tests.cli.command import Training, environment

EACH = PROCESS_BYTES + SLOT_BYTES
LARGE = Room(memory=1 << 50, tasks=1 << 40, files=1 << 40, cores=1 << 20)


@pytest.mark.parametrize(
    ("room", "sentence"),
    [
        (replace(LARGE, files=FILES + FILES_PER_RANK * 8 - 1), "opens 75 files and may open 74; use at most 7 ranks,"),
        (
            replace(LARGE, tasks=8 * TASKS - 1),
            "are 64 processes and threads, and 63 more may be started; use at most 7",
        ),
        (
            replace(LARGE, memory=8 * EACH - 1),
            "take at least 0.646 GB of memory (0.081 GB for each process), and 0.646",
        ),
    ],
)
def test_what_is_too_little_is_named_and_what_would_work(room: Room, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_ranks(8, "layout=dp=8", room=room)
    check_ranks(7, "layout=dp=7", room=room)


def test_just_enough_is_enough() -> None:
    just = Room(memory=8 * EACH + 5, tasks=8 * TASKS, files=FILES + FILES_PER_RANK * 8, cores=1)
    check_ranks(8, "layout=dp=8", held=5, room=just)
    with pytest.raises(UserError, match="weights"):
        check_ranks(8, "layout=dp=8", held=6, holding="weights", room=just)


def test_many_ranks_on_few_cores_are_refused() -> None:
    """They would have the memory, and wait for each other until a watchdog ends them."""
    check_ranks(32, "layout=dp=32", room=replace(LARGE, cores=2))
    sentence = "layout=dp=256 starts 256 ranks on this machine, which has 2 cores for them; use at most 32 ranks (16 a "
    with pytest.raises(UserError, match=re.escape(sentence) + r"core\), more nodes, or --oversubscribe to try it"):
        check_ranks(256, "layout=dp=256", room=replace(LARGE, cores=2))


def test_a_person_may_insist_on_memory_and_cores_and_not_on_what_the_system_enforces() -> None:
    check_ranks(80, "layout=dp=80", oversubscribe=True, room=replace(LARGE, memory=0, cores=1))
    with pytest.raises(UserError, match="files"):
        check_ranks(8, "layout=dp=8", oversubscribe=True, room=replace(LARGE, files=20))


def test_what_all_ranks_hold_follows_the_layout() -> None:
    def held(layout: str, *fields: str) -> int:
        run = build_run({"model": "tiny-llama", "layout": layout}, ["training.device=cpu", *fields])
        return state_bytes(run) // run.model.parameters

    assert held("dp=1") == 16 and held("tp=2,pp=2") == 16
    assert [held(f"dp=4,zero={zero}") for zero in range(4)] == [64, 4 * 8 + 8, 4 * 4 + 12, 16]
    assert held("dp=1", "training.precision=float64") == 32 and held("dp=1", "training.precision=bf16") == 14


def test_ranks_of_other_nodes_do_not_count_here() -> None:
    """A model of a terabyte on a thousand nodes: each starts one rank with a thousandth of it."""
    run = build_run({"model": "llama3-8b", "layout": "dp=1024,zero=3"}, ["training.global_batch=1024"])
    check_run(run, 1)
    with pytest.raises(UserError, match="starts 1024 ranks on this machine"):
        check_run(run, 1024)


def test_a_generation_counts_its_weights() -> None:
    spec = GenerationSpec(
        model=load_model("llama3-405b"), layout=parse_layout("tp=8"), weights="", device="cpu", slots=1, length=8
    )
    with pytest.raises(UserError, match=r"which take at least 1,\d{3} GB .*; use a smaller model, more nodes, or"):
        check_generation(spec)


def test_rehearsals_on_few_cores_are_started() -> None:
    run = build_run({"model": "tiny-llama", "layout": "dp=4,tp=2,pp=2"})
    check_run(run, 16)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_container_count(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    top = tmp_path / "sys/fs/cgroup"
    if version == 2:
        (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
        memory = pids = top / "job"
        (top / "job/step").mkdir(parents=True)
        names = ("memory.max", "memory.current", "inactive_file")
        (top / "job/step/memory.max").write_text("max\n")
    else:
        (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n8:cpu,pids:/\n0::/\n")
        memory, pids = top / "memory/job", top / "pids"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder in (memory, pids):
        folder.mkdir(parents=True, exist_ok=True)
    (memory / names[0]).write_text("1000000\n")
    (memory / names[1]).write_text("700000\n")
    (memory / "memory.stat").write_text(f"anon 5\n{names[2]} 200000\n")
    (pids / "pids.max").write_text("100\n")
    (pids / "pids.current").write_text("40\n")
    if version == 2:
        (memory / "cpu.max").write_text("100000 100000\n")
    else:
        (pids / "cpu.cfs_quota_us").write_text("50000\n")
        (pids / "cpu.cfs_period_us").write_text("100000\n")
    found = room_here(tmp_path)
    assert (found.memory, found.tasks, found.cores) == (500000, 60, 1)


def test_without_limits_of_a_container_the_machine_decides(tmp_path: Path) -> None:
    found = room_here(tmp_path)
    assert 0 < found.memory <= psutil.virtual_memory().total and found.tasks > 1000
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.files == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--layout", "dp=65536", "--set", "training.global_batch=65536"],
        ["verify", "--layout", "dp=65536"],
        ["verify", "--resume", "dp=2 -> dp=65536"],
        ["probe", "--ranks", "65536"],
        ["probe", "--device", "cuda"],
        ["verify", "--device", "cuda"],
        ["train", "--set", "training.device=cuda"],
    ],
)
def test_commands_refuse_before_anything_starts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(command) == 2
    shown = capsys.readouterr()
    assert re.search(r"starts 65536 ranks on this machine, .*; use at most \d+ ranks|no usable GPU; use", shown.err)
    assert shown.err.count("\n") == 1 and shown.out == ""
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_limit_of_open_files_is_met_before_ranks_meet_it(tmp_path: Path) -> None:
    limited = f"ulimit -n 60; exec {sys.executable} -m cuboid.cli.main train --layout dp=8"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "for which one process opens 75 files and may open 60; use at most 5 ranks" in done.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_take_as_much_as_is_counted(tmp_path: Path) -> None:
    """The numbers are the least that ranks take: else something would be refused that runs."""
    with_ranks = Training(tmp_path, "dp=2")
    try:
        with_ranks.wait_for_a_step(3)
        launcher = psutil.Process(with_ranks.command.pid)
        ranks = [psutil.Process(rank) for rank in with_ranks.ranks()]
        assert len(ranks) == 2
        for rank in ranks:
            assert rank.memory_full_info().uss > 0.9 * PROCESS_BYTES
            assert rank.num_threads() >= TASKS
        assert launcher.num_fds() >= FILES + 2 * FILES_PER_RANK - 3
    finally:
        os.killpg(with_ranks.command.pid, 9)
        with_ranks.command.communicate()
    with_ranks.assert_nothing_is_left()
