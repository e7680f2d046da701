"""Ranks on the cores near their GPU: real processes on this machine's cores, and a made-up description of its cards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.launch.rank import Binding, parse_cores

CARD = "0000:1b:00.0"


def machine(root: Path, near: str, node: int = 0, online: str = "", group: str = "") -> Path:
    """What Linux tells of a machine with one card; default: all cores of this one."""
    card, system = root / f"sys/bus/pci/devices/{CARD}", root / "sys/devices/system/cpu"
    for folder in (card, system, root / "proc/self", root / "sys/fs/cgroup/job"):
        folder.mkdir(parents=True)
    (card / "local_cpulist").write_text(f"{near}\n")
    (card / "numa_node").write_text(f"{node}\n")
    (system / "online").write_text(online or ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    (root / "proc/self/cgroup").write_text("0::/job\n")
    if group:
        (root / "sys/fs/cgroup/job/cpuset.cpus.effective").write_text(group)
    return root


def bound(pool: Pool, root: Path, address: str = CARD) -> tuple[Binding | None, list[set[int]]]:
    """What the rank says, and where its threads may run after that."""
    found: tuple[Binding | None, list[set[int]]] = pool.run("tests.launch.jobs:bind", (str(root), address), ranks=1)[0]
    return found


def test_a_rank_and_all_its_threads_stay_near_their_card(pool: Pool, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    binding, cores = bound(pool, machine(tmp_path, str(core), node=1))
    assert binding == Binding(1, (core,))
    assert len(cores) > 1 and all(each == {core} for each in cores), "a thread that was there before follows"
    assert binding.as_json() == {"node": 1, "cores": str(core)}
    assert "1 core of NUMA node 1" in binding.sentence


def test_cores_of_a_container_are_all_there_are(pool: Pool, tmp_path: Path) -> None:
    here = sorted(os.sched_getaffinity(0))
    group = ",".join(map(str, here))
    binding, _ = bound(pool, machine(tmp_path, str(here[0]), online="0-4095", group=group))
    assert binding is not None


@pytest.mark.parametrize(
    "case",
    [
        {"near": "0-4095"},  # all cores are near
        {"near": "4000-4095"},  # none is
        {"near": "0", "node": -1},  # one node, or nobody knows
        {"near": "0", "online": "0-4095"},  # somebody has bound the rank: it has fewer than there are
    ],
)
def test_where_there_is_nothing_to_gain_or_another_has_the_say_it_stays(
    pool: Pool, tmp_path: Path, case: dict[str, object]
) -> None:
    binding, cores = bound(pool, machine(tmp_path, **case))  # type: ignore[arg-type]
    assert binding is None
    assert all(each == os.sched_getaffinity(0) for each in cores)


def test_a_card_the_system_does_not_know_leaves_it_where_it_is(pool: Pool, tmp_path: Path) -> None:
    assert bound(pool, machine(tmp_path, "0"), "0000:ff:00.0")[0] is None


def test_lists_of_cores_are_read_as_linux_writes_them() -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == set()
