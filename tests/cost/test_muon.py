"""What Muon costs, beside the exact counts of `spec.matrix_owners`."""

from __future__ import annotations

import numpy as np
import pytest

from cuboid.cost.communication import ONE
from cuboid.cost.constants import Engine, engine_for
from cuboid.cost.estimate import machine_of
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.memory import communicators, rank_memory
from cuboid.cost.muon import matrices, matrix_time, work
from cuboid.cost.sharding import owned_parameters
from cuboid.cost.step import step_time
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.matrix_owners import Matrix, arithmetic, stage_buckets
from cuboid.spec.model import load_model
from cuboid.spec.run import build_run

MODELS = ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "gpt3-175b"]
SEQUENCE = 2048
NONE = number(0)


def owners(model: str, layout: str) -> list[Matrix]:
    training = {"global_batch": 64, "sequence": SEQUENCE}
    run = build_run({"model": model, "layout": layout, "optimizer": {"kind": "muon"}, "training": training})
    return [matrix for bucket in stage_buckets(run, 0) for matrix in bucket]


def jobs_of(layout: str, batch: int = 64) -> Jobs:
    return Jobs.of([Layout.parse(layout)], global_batch=batch, sequence=SEQUENCE)


def engine(name: str = "h100-80gx64", muon: bool = True) -> Engine:
    found = engine_for("cuboid", machine_of(load_cluster(name)).chip)
    return found.with_muon() if muon else found


@pytest.mark.parametrize("model", MODELS)
def test_arithmetic_is_that_of_every_matrix(model: str) -> None:
    shape = Shape.of(load_model(model))
    found = owners(model, "dp=1")
    each = work(shape, 5)
    dense = float(shape.dense_layers)
    total = dense * each.dense + (float(shape.layers) - dense) * each.mixture
    flops = [arithmetic(matrix.rows, matrix.columns, 5) for matrix in found]
    assert float(total) == pytest.approx(sum(flops))
    assert float(each.largest) == max(flops)
    assert float(each.elements) == max(matrix.rows * matrix.columns for matrix in found)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["dp=1", "dp=4,tp=4,zero=1", "dp=4,tp=2,zero=3,shard=2"])
def test_elements_of_a_rank_are_those_of_its_spans(model: str, layout: str) -> None:
    shape, jobs = Shape.of(load_model(model)), jobs_of(layout)
    kept: dict[int, int] = {}
    for matrix in owners(model, layout):
        for span in matrix.spans:
            for rank in span.ranks:
                kept[rank] = kept.get(rank, 0) + span.size
    owned = owned_parameters(jobs, matrices(shape, jobs, shape.layers, ONE))
    assert np.mean(list(kept.values())) == pytest.approx(float(owned[0]), rel=1e-3)  # padding of shards


@pytest.mark.parametrize("layout", ["dp=1", "dp=4,tp=2,zero=1", "dp=2,tp=2,pp=2,zero=3"])
def test_matrices_have_one_moment(layout: str) -> None:
    shape, jobs = Shape.of(load_model("llama3-8b")), jobs_of(layout)
    layers = shape.layers / jobs.pp
    with_muon, with_adamw = (
        rank_memory(shape, jobs, engine(muon=kind), layers, NONE, ONE, NONE).optimizer for kind in (True, False)
    )
    spared = 4 * owned_parameters(jobs, matrices(shape, jobs, layers, ONE))
    assert with_adamw - with_muon == pytest.approx(spared)


def test_a_stage_has_a_communicator_where_none_comes_to_the_same_ranks() -> None:
    shape = Shape.of(load_model("llama3-8b"))
    more = [
        float((communicators(shape, jobs, True).collective - communicators(shape, jobs).collective)[0])
        for jobs in map(jobs_of, ("dp=2,tp=2,pp=2", "dp=2,tp=2", "dp=4,pp=2", "tp=4,pp=2"))
    ]
    assert more == [1, 0, 0, 0]


def test_a_step_takes_longer_by_arithmetic_and_travel() -> None:
    cluster = load_cluster("h100-80gx64")
    machine, shape = machine_of(cluster), Shape.of(load_model("llama3-8b"))

    def seconds(layout: str, muon: bool, batch: int) -> float:
        jobs = jobs_of(layout, batch)
        step = step_time(shape, jobs, machine.chip, machine.fabric, engine(muon=muon), "bf16")
        return float(np.ravel(step.total)[0])

    few, many = (
        seconds("dp=8,tp=2,zero=1", True, batch) / seconds("dp=8,tp=2,zero=1", False, batch) for batch in (16, 1024)
    )
    assert few > 1.02, "a step of few tokens waits for the update"
    assert 1 < many < 1.02, "one of two million hardly does"
    spread, alone = (
        float(
            np.ravel(matrix_time(shape, jobs_of(layout), machine.chip, machine.fabric, engine(), shape.layers, ONE))[0]
        )
        for layout in ("dp=8,tp=2,zero=1", "dp=1")
    )
    assert spread < alone / 4, "each matrix is orthogonalised once, and sixteen ranks do sixteen of them"
    assert float(matrix_time(shape, jobs_of("dp=1"), machine.chip, machine.fabric, engine(muon=False), ONE, ONE)) == 0
