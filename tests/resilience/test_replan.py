"""Layouts for whatever nodes are left: they fit, keep the batch, and waste little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.resilience.replan import Replanner, accelerator_here, resized
from cuboid.spec.cluster import load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run, check_supported


def run_of(model: str, layout: str, batch: int, sequence: int = 64) -> Run:
    training = {"global_batch": batch, "sequence": sequence, "precision": "float64"}
    return build_run({"model": model, "layout": layout, "training": training})


def test_the_runs_own_layout_is_kept_where_it_fits() -> None:
    choice = Replanner(run_of("tiny-llama", "dp=2,tp=2,pp=2", 16), 2).choose(4)
    assert (choice.nodes, choice.ranks, choice.layout) == (4, 2, "dp=2,tp=2,pp=2")
    assert choice.why == "4 nodes: the run's own layout dp=2,tp=2,pp=2"


def test_ranks_that_only_slow_the_others_down_stay_idle() -> None:
    choice = Replanner(run_of("tiny-llama", "dp=8", 8), 1).choose(7)
    assert choice == Replanner(run_of("tiny-llama", "dp=8", 8), 1).choose(7), "it never varies"
    assert choice.nodes * choice.ranks < 7 and "stay idle" in choice.why


def test_a_planned_run_is_planned_again_on_its_own_accelerators() -> None:
    run = run_of("llama3-8b", "dp=4,tp=8,zero=1", 64, 4096)
    small = Replanner(run, 8, load_cluster("a100-80gx32")).choose(3)
    layout = Layout.parse(small.layout)
    assert layout.world_size <= 24
    inside = resized(load_cluster("a100-80gx32"), 3, 8)
    assert [tier.size for tier in inside.tiers] == [8, 24]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("X9", "a100-80g"),
    ],
)
def test_a_run_without_a_plan_is_planned_for_the_gpus_there_are(tmp_path: Path, model: str, name: str) -> None:
    assert accelerator_here(tmp_path) == ""
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    found = accelerator_here(tmp_path)
    assert found == name or found.startswith(name.partition("-")[0]), found


def test_what_no_number_of_nodes_can_hold_is_refused() -> None:
    run = run_of("llama3.1-405b", "dp=1,tp=8,pp=8", 64, 4096)
    with pytest.raises(UserError, match=r"^1 node with 8 ranks each cannot hold llama3.1-405b at global_batch=64; use"):
        Replanner(run, 8, load_cluster("h100x64")).choose(1)


@settings(max_examples=10)
@given(
    st.sampled_from(["tiny-llama", "tiny-gpt2", "tiny-mixtral", "tiny-deepseek"]),
    st.integers(1, 7),
    st.integers(1, 3),
    st.sampled_from([6, 8, 12, 16, 24]),
)
def test_every_choice_fits(model: str, nodes: int, ranks: int, batch: int) -> None:
    run = run_of(model, "dp=1", batch)
    choice = Replanner(run, ranks).choose(nodes)
    layout = Layout.parse(choice.layout)
    assert choice.nodes <= nodes and choice.ranks <= ranks
    check(layout, run.model, global_batch=batch, sequence=64, world_size=choice.nodes * choice.ranks)
    check_supported(replace(run, layout=layout))
