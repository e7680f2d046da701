"""The front: machines from clusters, single layouts and arrays alike, speed, and stage costs for the simulator."""

import subprocess
import sys
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from cuboid.cost.constants import (
    Chip,
    Engine,
    Fabric,
    chip_named,
    default_fabric,
    engine_for,
    engine_named,
    fabric_named,
    tables,
)
from cuboid.cost.estimate import GIB, estimate, estimate_many, machine_of
from cuboid.cost.inputs import Jobs
from cuboid.errors import UserError
from cuboid.planning.stages import stage_costs
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import simulate
from cuboid.spec.cluster import accelerator_names, accelerator_table, load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

GPT = load_model("gpt3-175b")
SELENE = machine_of(load_cluster("a100-80gx1024"))


def test_every_accelerator_of_the_catalog_has_a_calibration() -> None:
    for name in set(accelerator_names().values()):
        chip = chip_named(name)
        assert 0 < chip.linear_efficiency["bf16"] <= 1
        assert chip.memory > 0
        assert fabric_named(default_fabric(name)).inner_bandwidth > 0


def test_every_table_names_its_source() -> None:
    for kind, entries in tables().items():
        for name, entry in entries.items():
            assert entry.get("source"), f"{kind} {name}"


def test_tables_hold_only_known_fields() -> None:
    kinds = {"chips": Chip, "fabrics": Fabric, "engines": Engine}
    for kind, cls in kinds.items():
        known = {item.name for item in fields(cls)} | {"base"}
        for name, entry in tables()[kind].items():
            assert set(entry) <= known, f"{kind} {name}"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="nanotron"):
        engine_named("nanotorn")
    with pytest.raises(UserError, match="playbook"):
        fabric_named("playbok")


def test_an_engine_may_have_a_profile_of_its_own_on_some_accelerators() -> None:
    assert engine_for("megatron", chip_named("a100-80g")).name == "megatron@a100"
    assert engine_for("megatron", chip_named("h100-80g")).name == "megatron"


def test_faster_links_make_faster_collectives() -> None:
    cluster = load_cluster("h100x64")
    tiers = (cluster.tiers[0], replace(cluster.tiers[1], bandwidth=cluster.tiers[1].bandwidth / 2))
    slow = machine_of(replace(cluster, tiers=tiers))
    assert slow.fabric.outer_bandwidth == pytest.approx(machine_of(cluster).fabric.outer_bandwidth / 2)
    assert slow.fabric.inner_bandwidth == machine_of(cluster).fabric.inner_bandwidth


def test_a_rack_of_72_is_one_node_of_the_fabric() -> None:
    assert machine_of(load_cluster("gb200x576")).fabric.node == 72
    assert machine_of(load_cluster("h100x8")).fabric.node == 8


def test_one_layout_and_many_agree() -> None:
    layout = Layout.parse("dp=8,tp=8,pp=16,zero=1")
    single = estimate(GPT, SELENE, layout, global_batch=1536, sequence=2048, engine="megatron")
    jobs = Jobs.of([layout, Layout.parse("dp=16,tp=8,pp=8,zero=1")], global_batch=1536, sequence=2048)
    many = estimate_many(GPT, SELENE, jobs, "megatron")
    assert single.seconds == pytest.approx(float(many.seconds[0]))
    assert single.memory == pytest.approx(float(many.memory[0]))
    assert sum(single.parts.values()) == pytest.approx(single.seconds)
    assert max(sum(lines.values()) for lines in single.memory_table.values()) == pytest.approx(single.memory)
    assert single.fits
    assert single.tokens == pytest.approx(1536 * 2048 / single.seconds / 1024)


def test_the_known_run_of_gpt3_on_selene_is_near() -> None:
    # Megatron-LM's README: about 32 seconds with full recomputation, tp 8, pp 16 on 1,024 A100.
    layout = Layout.parse("dp=8,tp=8,pp=16,recompute=full,sequence_parallel=false")
    result = estimate(GPT, SELENE, layout, global_batch=1536, sequence=2048, engine="megatron-2021")
    assert result.seconds == pytest.approx(32, rel=0.1)


def test_utilization_stays_below_what_was_ever_measured_on_usual_layouts() -> None:
    for text in ("dp=8,tp=8,pp=16,zero=1", "dp=16,tp=8,pp=8,zero=1", "dp=32,tp=8,pp=4,zero=1"):
        result = estimate(GPT, SELENE, Layout.parse(text), global_batch=1536, sequence=2048, engine="megatron")
        assert 0.3 < result.utilization < SELENE.chip.best_utilization["bf16"]


def test_what_does_not_fit_is_said_so() -> None:
    layout = Layout.parse("dp=1024,tp=1,pp=1")
    result = estimate(GPT, SELENE, layout, global_batch=2048, sequence=2048)
    assert not result.fits
    assert result.memory / GIB > 1000


def test_empty_pipeline_ranks_do_not_fit() -> None:
    jobs = Jobs.make(dp=1, tp=8, pp=128, global_batch=1536, sequence=2048)
    assert not bool(estimate_many(GPT, SELENE, jobs).fits)


def test_a_hundred_thousand_layouts_take_less_than_a_second() -> None:
    random = np.random.default_rng(0)
    count = 100_000
    tp, pp = 2.0 ** random.integers(0, 4, count), 2.0 ** random.integers(0, 6, count)
    jobs = Jobs.make(
        dp=1024 / (tp * pp),
        tp=tp,
        pp=pp,
        zero=random.integers(0, 4, count),
        recompute=random.integers(0, 3, count),
        micro_batch=2.0 ** random.integers(0, 3, count),
        global_batch=1536,
        sequence=2048,
    )
    # Processor time, because the machine may be shared.
    start = time.process_time()
    result = estimate_many(GPT, SELENE, jobs)
    assert time.process_time() - start < 1.0
    assert result.seconds.shape == (count,)
    assert np.all(np.isfinite(result.seconds))


def test_the_cost_room_does_not_import_torch() -> None:
    code = "import sys, cuboid.cost.estimate, cuboid.cost.published; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,tp=8,pp=8",
        "dp=4,tp=8,pp=8,schedule=interleaved,vpp=3",
        "dp=4,tp=8,pp=8,schedule=zb1p",
        "dp=4,tp=8,pp=8,schedule=zbv",
        "dp=4,tp=8,pp=8,schedule=dualpipev",
    ],
)
def test_simulating_the_stages_agrees_with_the_closed_form(text: str) -> None:
    layout = Layout.parse(text)
    machine = machine_of(load_cluster("a100-80gx256"))
    quiet = replace(engine_named("megatron-2021"), transfer_exposed=0.0)
    costs, hop = stage_costs(GPT, machine, layout, global_batch=256, sequence=2048, engine=quiet)
    schedule = make_schedule(layout.schedule, layout.pp, 64, layout.vpp)
    makespan = simulate(schedule, costs, hop).makespan
    parts = estimate(GPT, machine, layout, global_batch=256, sequence=2048, engine=quiet).parts
    closed = sum(parts[name] for name in ("compute", "tensor", "context", "expert", "host", "bubble", "transfer"))
    assert makespan == pytest.approx(closed, rel=0.06)


def test_stage_costs_take_any_split_of_the_layers() -> None:
    layout = Layout.parse("dp=1,tp=8,pp=2")
    machine = machine_of(load_cluster("a100-80gx16"))
    costs, _ = stage_costs(GPT, machine, layout, global_batch=8, sequence=2048, layers=[40, 56])
    assert costs.forward[1] > costs.forward[0]
    even, _ = stage_costs(GPT, machine, layout, global_batch=8, sequence=2048)
    assert sum(even.forward) == pytest.approx(sum(costs.forward))


@pytest.mark.parametrize("name", sorted(set(accelerator_names().values())))
def test_no_collective_is_faster_than_the_printed_link(name: str) -> None:
    per_node = accelerator_table(name)["accelerators_per_node"] or 8
    cluster = load_cluster(f"{name}x{8192 * per_node}")
    fabric = machine_of(cluster).fabric
    assert fabric.inner_bandwidth <= 1e9 * cluster.tiers[0].bandwidth
    if len(cluster.tiers) > 1:
        assert fabric.outer_bandwidth <= 1e9 * cluster.tiers[1].bandwidth


def test_cut_down_and_shared_links_are_planned_as_they_are() -> None:
    whole, cut, card = (machine_of(load_cluster(f"{name}x16")).fabric for name in ("h100", "h800", "h100-80g-pcie"))
    assert cut.inner_bandwidth == pytest.approx(whole.inner_bandwidth * 200 / 450)
    assert cut.outer_bandwidth == whole.outer_bandwidth
    assert card.inner_bandwidth == pytest.approx(whole.inner_bandwidth * 63 / 450)
    assert card.outer_bandwidth == pytest.approx(whole.outer_bandwidth / 4)
    assert card.inner_latency == pytest.approx(whole.inner_latency * 5.7 / 3.4)


def test_every_tier_of_a_cluster_is_a_level_of_its_fabric() -> None:
    cluster = load_cluster("h100x64")
    inner, outer = cluster.tiers
    leaf = replace(outer, name="leaf", size=32, latency=28.0)
    fabric = machine_of(replace(cluster, tiers=(inner, leaf, replace(outer, bandwidth=25.0)))).fabric
    plain = machine_of(cluster).fabric
    assert (fabric.node, fabric.outer_bandwidth) == (8, plain.outer_bandwidth)
    assert fabric.outer_latency == pytest.approx(2 * plain.outer_latency)
    assert [(level.inside, level.bandwidth) for level in fabric.further] == [(32, plain.outer_bandwidth / 2)]
