"""Plans of islands: against the engine's own count of bytes, the time of rounds, and what people must be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuboid.cost.rounds import transfer_seconds
from cuboid.errors import UserError
from cuboid.planning.island_alternatives import as_one_job
from cuboid.planning.island_batches import share, weights_by_speed
from cuboid.planning.island_file import dump_islands_plan, load_islands_plan
from cuboid.planning.island_links import Paths, Sent, homes_of, sent_between
from cuboid.planning.island_table import COMPUTING
from cuboid.planning.islands import IslandsPlan, parse_wanted, plan_islands
from cuboid.planning.question import Question
from cuboid.spec.block_owners import wire_bytes
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import GBIT, Groups, load_groups
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.run import Run
from cuboid.spec.training import TrainingSpec

SITES = """
[[groups]]
name = "oregon"
accelerator = "h100"
nodes = {nodes}
price = 2.5
[[groups]]
name = "paris"
accelerator = "a100"
nodes = 4
uplink_gbit = {uplink}
[[links]]
between = ["oregon", "paris"]
bandwidth_gbit = {gbit}
latency_ms = 70
"""


def groups_of(folder: Path, nodes: int = 2, gbit: float = 5, uplink: float = 10) -> Groups:
    path = folder / "sites.toml"
    path.write_text(SITES.format(nodes=nodes, gbit=gbit, uplink=uplink))
    return load_groups(str(path))


def ask(cluster: ClusterSpec, global_batch: int) -> Question:
    return Question(model=load_model("llama3-8b"), cluster=cluster, global_batch=global_batch, sequence=8192)


def planned(groups: Groups, wanted: dict[str, Any] | None = None, global_batch: int = 256) -> IslandsPlan:
    return plan_islands(groups, ask, global_batch, wanted or {})


def test_islands_hide_a_slow_link(tmp_path: Path) -> None:
    plan = planned(groups_of(tmp_path))
    assert plan.names == ("oregon", "paris")
    assert plan.computing >= COMPUTING
    assert plan.one_job is not None
    assert plan.tokens_per_second > 5 * plan.one_job.tokens_per_second
    slowest = max(own.seconds for own in plan.plans)
    assert plan.step_seconds == pytest.approx(slowest / plan.computing)
    assert sum(own.question.global_batch for own in plan.plans) == 256
    assert plan.loss.over_dp < 0.01


def test_a_slower_link_needs_a_longer_interval_or_fewer_bits(tmp_path: Path) -> None:
    fast, slow = (planned(groups_of(tmp_path, gbit=gbit)) for gbit in (5, 0.2))
    assert (slow.spec.every, -slow.spec.bits, slow.spec.delay) > (fast.spec.every, -fast.spec.bits, fast.spec.delay)
    assert slow.step_seconds >= fast.step_seconds * (1 - 1e-9)
    crawl = planned(groups_of(tmp_path, gbit=0.0005))
    assert crawl.computing < COMPUTING
    assert any("too slow" in note for note in crawl.notes)
    assert any("alone is as fast" in note for note in crawl.notes)


def test_what_the_user_decides_stays(tmp_path: Path) -> None:
    wanted = parse_wanted("every=48, bits=16,delay=3,momentum=0.8")
    spec = planned(groups_of(tmp_path), wanted).spec
    assert (spec.every, spec.bits, spec.delay, spec.momentum, spec.count) == (48, 16, 3, 0.8, 2)
    for text, sentence in {
        "evry=4": "did you mean islands.every",
        "every": "write it like every=64",
        "count=3": "unknown key islands.count",
        "bits=four": "islands.bits",
    }.items():
        with pytest.raises(UserError, match=sentence):
            parse_wanted(text)


def test_a_group_that_all_would_wait_for_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    table = SITES.format(nodes=4, uplink=10, gbit=5).replace('accelerator = "a100"', 'accelerator = "h100"')
    third = '[[groups]]\nname = "attic"\naccelerator = "l40s"\nnodes = 1\n'
    links = "".join(
        f'[[links]]\nbetween = ["attic", "{site}"]\nbandwidth_gbit = 1\nlatency_ms = 9\n'
        for site in ("oregon", "paris")
    )
    path.write_text(table + third + links)
    plan = planned(load_groups(str(path)))
    assert plan.names == ("oregon", "paris")
    assert any("without attic" in note for note in plan.notes)


def test_batches_follow_the_speeds_of_islands(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, nodes=6)
    uneven, equal = planned(groups), planned(groups, {"batch_weights": "1:1"})
    assert [own.question.global_batch for own in equal.plans] == [128, 128]
    assert uneven.spec.weight_of(0) > uneven.spec.weight_of(1)
    assert uneven.tokens_per_second > 1.2 * equal.tokens_per_second
    steps = [own.seconds for own in uneven.plans]
    assert max(steps) < 1.15 * min(steps), "nobody waits for long"
    run = uneven.run(1)
    assert run.training.global_batch % run.islands.weight_of(1) == 0


@pytest.mark.parametrize(
    ("batch", "speeds", "weights"),
    [
        (512, [1.0, 1.0], (1, 1)),
        (512, [3.0, 1.0], (3, 1)),
        (96, [2.0, 1.0, 1.0], (2, 1, 1)),
        (8, [1.9, 1.0], (5, 3)),
        (7, [100.0, 1.0], (6, 1)),
        (1, [2.0, 1.0], (1, 1)),
        (512, [2.0] + [1.0] * 39, (1,) * 40),
    ],
)
def test_weights_are_round_and_near_the_speeds(batch: int, speeds: list[float], weights: tuple[int, ...]) -> None:
    assert weights_by_speed(batch, speeds) == weights


@pytest.mark.parametrize(("batch", "count", "own"), [(512, 2, 256), (1024, 3, 352), (3, 3, 1), (2, 3, 1), (100, 3, 32)])
def test_a_batch_that_does_not_divide_is_rounded(batch: int, count: int, own: int) -> None:
    assert share(batch, count) == own


def test_weights_of_more_islands_than_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch_weights=2:1:1 has not 2 to 2 weights"):
        planned(groups_of(tmp_path), {"batch_weights": "2:1:1"})


def test_bytes_are_those_the_engine_counts() -> None:
    spec = IslandsSpec(count=2, fragments=3, bits=4)
    training = TrainingSpec(global_batch=12, sequence=64)
    run = Run(model=load_model("tiny-llama"), layout=Layout.parse("tp=2,dp=2"), training=training, islands=spec)
    other = replace(run, layout=Layout.parse("pp=2,dp=3,zero=3"))
    for fragment in range(3):
        of_ranks = [wire_bytes(run, fragment, rank, other) for rank in range(4)]
        here, there = homes_of(run, fragment), homes_of(other, fragment)
        sent = sent_between(here, there, spec.block_bytes("float32"))
        assert sent.bytes == sum(sent for sent, _ in of_ranks)
        assert sent == sent_between(there, here, spec.block_bytes("float32"))
        assert sent.connections >= 6


def test_the_narrowest_of_links_and_uplinks_counts(tmp_path: Path) -> None:
    sent = [[Sent(10**9, 4)] * 2] * 2
    for gbit, uplink in ((5, 10), (10, 2)):
        groups = groups_of(tmp_path, gbit=gbit, uplink=uplink)
        found = Paths(groups, groups.groups).seconds(sent)
        assert found == transfer_seconds(10**9, min(gbit, uplink) * GBIT, 0.07, 4) + 0.07


def test_groups_of_one_site_share_its_links(tmp_path: Path) -> None:
    text = SITES.format(nodes=2, gbit=4, uplink=1000)
    third = '[[groups]]\nname = "lyon"\nsite = "paris"\naccelerator = "a100"\nnodes = 4\n'
    inside = '[[links]]\nbetween = ["paris", "paris"]\nbandwidth_gbit = 400\nlatency_ms = 0.1\n'
    path = tmp_path / "shared.toml"
    path.write_text(text + third + inside)
    groups = load_groups(str(path))
    found = Paths(groups, groups.groups).seconds([[Sent(10**9, 1)] * 3] * 3)
    assert found == transfer_seconds(2 * 10**9, 4 * GBIT, 0.07, 2) + 0.07


def test_one_job_is_as_slow_as_its_worst_part(tmp_path: Path) -> None:
    cluster = as_one_job(groups_of(tmp_path, gbit=8))
    assert (cluster.accelerators, cluster.accelerator) == (16 + 32, "a100-80g")
    assert cluster.tiers[-1].size == 48
    assert cluster.tiers[-1].bandwidth == pytest.approx(1.0 / 16)


def test_the_file_holds_it_all(tmp_path: Path) -> None:
    plan = planned(groups_of(tmp_path))
    path = tmp_path / "plan.toml"
    path.write_text(dump_islands_plan(plan, 1e11))
    again, run = load_islands_plan(path)
    assert replace(again, groups=plan.groups, plans=plan.plans) == plan
    assert [str(own.layout) for own in again.plans] == [str(own.layout) for own in plan.plans]
    assert [own.seconds for own in again.plans] == pytest.approx([own.seconds for own in plan.plans])
    assert again.groups.link(*again.members) == plan.groups.link(*plan.members)
    assert again.members[0].price == 2.5
    assert run.training.steps == pytest.approx(1e11 / (2 * 128 * 8192), abs=1)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('count = 2\nbatch_weights = "', 'count = 3\nbatch_weights = "1:', "islands.count=3 is not what the plan has"),
        ("decide_seconds", "decides_seconds", "plan.decide_seconds is missing"),
        ("transfer_seconds = [", "transfer_seconds = [1.0, ", "fragments; plan it anew"),
        ("[plan.islands.oregon.times]", "[plan.islands.oregon.tims]", "plan.times is missing"),
    ],
)
def test_a_broken_file_is_refused_by_name(before: str, after: str, sentence: str, tmp_path: Path) -> None:
    text = dump_islands_plan(planned(groups_of(tmp_path)))
    assert before in text
    path = tmp_path / "plan.toml"
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(UserError, match=sentence):
        load_islands_plan(path)
