"""States kept in memory: what is lost with a node comes back from another, and what cannot come back is passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.manifest import read_manifest
from cuboid.checkpoint.memory.folder import bytes_per_node, check_room, identity_of, node_folder
from cuboid.errors import RankError, UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from cuboid.training.run_folder import newest_kept, prepare_folder
from tests.checkpoint.jobs import SMALL
from tests.checkpoint.memory_jobs import EVENTS, Attempt
from tests.parallel.cases import small_run

FOUR = "aabb"


def run_in(folder: Path, layout: str, *more: str) -> Run:
    memory = folder / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    fields = (f"output.folder={folder / 'run'}", f"checkpoint.memory_folder={memory}", "checkpoint.memory_every=1")
    fields += ("training.steps=9", "training.global_batch=4", "checkpoint.asynchronous=false")
    return small_run(layout, *SMALL, *fields, *more)


def live(pool: Pool, run: Run, nodes: str, until: int, newest: int = 10**6, back_at: int = 0) -> list[Attempt]:
    arguments = (run, nodes, until, newest, back_at)
    return pool.run("tests.checkpoint.memory_jobs:attempt", arguments, ranks=run.layout.world_size)


def held(run: Run, node: str) -> dict[int, list[str]]:
    """Step -> data files, of what a node has published."""
    folder = node_folder(run, node) / identity_of(run)
    return {
        step_of(path): sorted(name for name in path.names() if name.startswith("data"))
        for path in checkpoints(str(folder))
    }


def lose(run: Run, node: str) -> None:
    shutil.rmtree(node_folder(run, node))


def damage(run: Run, node: str, file: str) -> None:
    path = node_folder(run, node) / identity_of(run) / "step-00000003" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Attempt]:
    """Six steps of four ranks, never stopped."""
    return live(pool, run_in(tmp_path_factory.mktemp("whole"), "dp=2,tp=2,zero=1"), FOUR, 6)


def test_a_lost_node_costs_nothing_that_was_kept(pool: Pool, tmp_path: Path, whole: list[Attempt]) -> None:
    run = run_in(tmp_path, "dp=2,tp=2,zero=1")
    first = live(pool, run, FOUR, 4)
    assert all(not report.warning and report.place == "memory" for report in first[0].reports)
    assert [report.step for report in first[0].reports] == [1, 2, 3, 4]
    everything = [f"data-{rank:05d}.bin" for rank in range(4)]
    assert held(run, "a") == held(run, "b") == {4: everything}, "two nodes: each has all"
    assert node_folder(run, "a").stat().st_mode & 0o777 == 0o700
    lose(run, "b")
    second = live(pool, run, FOUR, 6)
    assert [life.began for life in second] == [4] * 4
    assert "resuming after step 4 in memory (parts of ranks 2, 3 from node a), written on dp=2,tp=2" in second[0].said
    for before, after, unbroken in zip(first, second, whole, strict=True):
        assert before.losses + after.losses == unbroken.losses, "bit for bit"
        assert after.drawn == unbroken.drawn, "random generators too"
    assert held(run, "a") == held(run, "b") == {6: everything}, "what was fetched went with the first new state"


def test_a_part_whose_copies_are_both_gone_is_named(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "pp=2,dp=2,zero=3")
    live(pool, run, "abcd", 3)
    assert held(run, "c") == {3: ["data-00001.bin", "data-00002.bin"]}
    kept = node_folder(run, "c") / identity_of(run) / "step-00000003"
    entries = json.loads((kept / "index.json").read_bytes()).values()
    assert {chunk["file"] for entry in entries for chunk in entry["chunks"]} == {"data-00001.bin", "data-00002.bin"}
    assert len(read_manifest(kept).files) == 3, "and no node keeps the manifest of the whole"
    lose(run, "b")
    other = run_in(tmp_path, "tp=2")
    lives = live(pool, other, "ad", 5)
    assert [life.began for life in lives] == [0, 0], "the copy of rank 1's part is on node c, which nobody reached"
    assert "after step 3 cannot be used: the part of rank 1 is on no node that is left" in lives[0].said


def test_what_was_brought_to_a_node_survives_the_loss_of_who_sent_it(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=4,zero=1")
    live(pool, run, "abcd", 3)
    lose(run, "b")
    assert "(part of rank 1 from node c)" in live(pool, run, "abcd", 3)[0].said
    lose(run, "c")
    assert [life.began for life in live(pool, run, "abcd", 3)] == [3] * 4


def test_another_layout_fetches_what_it_needs(pool: Pool, tmp_path: Path, whole: list[Attempt]) -> None:
    run = run_in(tmp_path, "pp=2,dp=2,zero=3")
    live(pool, run, "abcd", 3)
    lose(run, "b")
    other = run_in(tmp_path, "tp=2,dp=2")
    lives = live(pool, other, "aecd", 5)
    assert [life.began for life in lives] == [3] * 4
    assert lives[0].losses == pytest.approx(whole[0].losses[3:5], rel=1e-9)


def test_a_node_lost_at_any_moment_of_a_save_costs_that_save_at_most(
    pool: Pool, tmp_path: Path, whole: list[Attempt], thorough: bool
) -> None:
    """Four nodes; one of them dies, memory and all, while the state after step 3 is kept."""
    for event in range(EVENTS) if thorough else (1, 5, 7):
        run = run_in(tmp_path / str(event), "dp=2,tp=2,zero=1")
        with pytest.raises(RankError, match="rank 2 died"):
            pool.run("tests.checkpoint.memory_jobs:die_in_a_save", (run, "abcd", 2, 3, event), ranks=4)
        lose(run, "c")
        lives = live(pool, run, "abcd", 4)
        assert lives[0].began in ((2, 3) if event < 8 else (3,)), event
        assert lives[0].losses == whole[0].losses[lives[0].began : 4]


def test_a_save_that_fails_costs_itself_alone(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2")
    (first, _) = pool.run("tests.checkpoint.memory_jobs:stumble", (run, "ab", 3), ranks=2)
    assert [(report.step, report.warning) for report in first.reports] == [
        (1, "no copy in memory after step 1: node b: [Errno 5] no luck"),
        (2, ""),
        (3, "no copy in memory after step 3: node b: [Errno 5] no luck"),
    ]
    assert held(run, "b").keys() == {2} and held(run, "a").keys() >= {2}
    (second, _) = live(pool, run, "ab", 5)
    assert second.began in (2, 3) and not any(report.warning for report in second.reports)
    assert held(run, "a").keys() == held(run, "b").keys() == {5}


def test_what_is_damaged_comes_from_the_other_copy_or_from_disk(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2", "checkpoint.every=2")
    first = live(pool, run, "ab", 3)
    damage(run, "a", "data-00001.bin")
    damage(run, "b", "index.json")
    kept = shutil.copytree(tmp_path, tmp_path / "aside")
    second = live(pool, run, "ab", 4)
    assert second[0].began == 3 and first[0].losses[:3]
    shutil.rmtree(tmp_path / "memory")
    shutil.copytree(kept / "memory", tmp_path / "memory")
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(kept / "run", tmp_path / "run")
    damage(run, "b", "data-00001.bin")
    third = live(pool, run, "ab", 4)
    assert "warning: the state in memory after step 3 cannot be used: the part of rank 1 " in third[0].said
    assert " does not match its checksum\n" in third[0].said
    assert "resuming after step 2, written on dp=2" in third[0].said
    assert third[0].losses[-1] == second[0].losses[-1]


def test_a_part_whose_place_no_index_tells_is_named(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2")
    live(pool, run, "ab", 3)
    damage(run, "a", "index.json")
    damage(run, "b", "index.json")
    first = live(pool, run, "ab", 1)[0]
    assert first.began == 0
    assert "step 3 cannot be used: the index of the part of rank 0 is damaged on every node that has it" in first.said


def test_only_the_past_that_the_rows_tell_of_is_gone_on_from(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2")
    live(pool, run, "ab", 3)
    assert newest_kept(run) == 0, "this node is neither a nor b"
    assert live(pool, run, "ab", 1, newest=2)[0].began == 0
    assert held(run, "a") == held(run, "b") == {1: ["data-00000.bin", "data-00001.bin"]}
    live(pool, run, "ab", 3, back_at=3)
    assert held(run, "a") == held(run, "b") == {}, "taken back"
    assert live(pool, run, "ab", 3, back_at=2)[0].began == 0
    assert list(held(run, "a")) == list(held(run, "b")) == [3], "kept after what was taken back"
    prepare_folder(run, overwrite=True)
    assert live(pool, run, "ab", 1)[0].began == 0, "started anew: it has another identity"
    assert len(list(node_folder(run, "a").iterdir())) == 1, "and what the one before had is given back"


def test_one_node_keeps_no_copies_elsewhere(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2,zero=1")
    (first, _) = live(pool, run, "aa", 2)
    assert "no copies elsewhere, because all ranks share it" in first.said
    assert held(run, "a") == {2: ["data-00000.bin", "data-00001.bin"]}
    assert live(pool, run, "aa", 3)[0].began == 2
    alone = run_in(tmp_path, "dp=1")
    assert live(pool, alone, "a", 4)[0].began == 3, "one process reads it too"


def test_too_little_room_is_refused_by_name(tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=2", "model.layers=10000", "model.hidden=8192", "model.ffn=8192")
    assert bytes_per_node(run, 1) == 2 * 24 * run.model.parameters == bytes_per_node(run, 2)
    with pytest.raises(UserError, match=r"^checkpoint.memory_every=1 needs .* GB in checkpoint.memory_folder=.*; use "):
        check_room(run, 1)
    check_room(run_in(tmp_path, "dp=2"), 1)
    with pytest.raises(UserError, match=r"^checkpoint.memory_folder=/nowhere is no folder; use one on a memory file"):
        check_room(run_in(tmp_path, "dp=2", "checkpoint.memory_folder=/nowhere"), 1)


def test_a_folder_of_somebody_else_is_not_believed(pool: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path, "dp=1")
    node_folder(run, "a").mkdir(mode=0o755)
    with pytest.raises(UserError, match=r"is not a folder of this user alone; remove it, or use"):
        live(pool, run, "a", 1)
