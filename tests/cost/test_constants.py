"""What a measured cluster changes: ranks that share cores, and ports that ranks of a host share."""

from dataclasses import replace

import pytest

from cuboid.cost.communication import all_gather, all_reduce, group, reduce_scatter, transfer
from cuboid.cost.constants import Fabric, chip_named, engine_named, profiled, slowed
from cuboid.cost.estimate import Machine, estimate, machine_of
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.layers import hop
from cuboid.errors import UserError
from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

FABRIC = Fabric(
    name="test",
    node=2,
    inner_bandwidth=1e9,
    outer_bandwidth=5e7,
    alone=1e8,
    outer_latency=0.0,
    inner_latency=0.0,
    curve={"all_reduce": [0.1, 0.1, 0.05], "all_gather": [0.1, 0.1, 0.05], "reduce_scatter": [0.2, 0.2, 0.1]},
    delay={"all_reduce": [1e-3, 1e-3, 3e-3], "all_gather": [1e-3, 1e-3, 3e-3], "reduce_scatter": [1e-3, 1e-3, 3e-3]},
)
MODEL = load_model("tiny-llama")


def test_delays_and_curves_are_those_of_the_nodes() -> None:
    whole = group(FABRIC, number(8), number(1))
    assert float(all_reduce(FABRIC, number(8e6), whole)) == pytest.approx(2 * (3e-3 + 7e6 / 5e7))
    assert float(all_gather(FABRIC, number(8e6), whole)) == pytest.approx(3e-3 + 7e6 / 5e7)
    assert float(reduce_scatter(FABRIC, number(8e6), whole)) == pytest.approx(3e-3 + 7e6 / 1e8)


def test_a_rank_that_sends_alone_has_the_whole_port() -> None:
    one, two = transfer(FABRIC, number(1e8), number(1), number([1, 2]))
    assert (one, two) == (pytest.approx(1.0), pytest.approx(2.0))


def test_a_pipeline_inside_and_across_hosts_counts_both_kinds_of_hops() -> None:
    layouts = [Layout(pp=8), Layout(pp=4, tp=2)]
    jobs = Jobs.of(layouts, global_batch=8, sequence=64)
    engine = engine_named("cuboid@cpu").in_precision("float32")
    seconds = hop(Shape.of(MODEL), jobs, FABRIC, engine)
    size = 4 * 64 * MODEL.hidden
    assert seconds[0] == pytest.approx(3 / 7 * size / 1e8 + 4 / 7 * size / 1e9)
    assert seconds[1] == pytest.approx(size / 2 / 5e7)


def test_a_pipeline_on_shared_cores_waits_only_for_what_one_rank_cannot_do_faster() -> None:
    """One micro-batch through eight ranks on two cores takes one core's time; dp uses both."""
    own = chip_named("cpu")
    layout = Layout(pp=8, micro_batch=8)
    apart = estimate(MODEL, Machine(own, FABRIC), layout, global_batch=8, sequence=64, precision="float32")
    shared = Machine(replace(own, together=0.25), FABRIC)
    close = estimate(MODEL, shared, layout, global_batch=8, sequence=64, precision="float32")
    busy, quick = (found.parts["compute"] + found.parts["bubble"] for found in (apart, close))
    assert quick == pytest.approx(0.25 * busy, rel=0.05)


def test_the_simulation_of_a_plan_sees_shared_cores_too() -> None:
    cluster = load_cluster("cpux8")
    layout = Layout(pp=8, micro_batch=8)

    def seconds(together: float) -> float:
        question = Question(
            model=MODEL,
            cluster=replace(cluster, measured={"chip": {"together": together}}),
            global_batch=8,
            sequence=64,
            precision="float32",
        )
        plan = predict(question, layout)
        return plan.parts["compute"] + plan.parts["host"] + plan.parts["bubble"]

    assert seconds(0.25) == pytest.approx(0.25 * seconds(1.0), rel=0.1)


def test_float32_keeps_no_master_weights_and_twice_the_activations() -> None:
    narrow = engine_named("cuboid@cpu")
    wide = narrow.in_precision("float32")
    assert (wide.weight_bytes, wide.optimizer_bytes) == (4, 8)
    assert wide.kept_ffn == 2 * narrow.kept_ffn
    assert wide.in_precision("float32") == wide


@pytest.mark.parametrize(
    ("model", "cluster", "layout"),
    [
        ("tiny-llama", "cpux8", "dp=2,tp=2,pp=2"),
        ("tiny-mixtral", "cpux8", "dp=8,ep=4,zero=1"),
        ("llama3-8b", "h100x64", "dp=8,tp=4,pp=2,zero=1"),
    ],
)
def test_on_a_slowed_cluster_every_part_of_a_step_takes_so_many_times_as_long(
    model: str, cluster: str, layout: str
) -> None:
    precision = "float32" if cluster.startswith("cpu") else "bf16"
    sizes = {"global_batch": 64, "sequence": 128, "precision": precision}
    question = Question(model=load_model(model), cluster=load_cluster(cluster), **sizes)
    machine = question.machine
    slower = slowed(question.cluster, 7.5, machine.chip, machine.fabric, question.profile)
    before, after = (predict(each, Layout.parse(layout)) for each in (question, replace(question, cluster=slower)))
    assert after.seconds == pytest.approx(7.5 * before.seconds, rel=1e-9)
    assert after.parts == pytest.approx(
        {name: 7.5 * value for name, value in before.parts.items()}, rel=1e-6, abs=1e-12
    )
    assert (after.peak, after.utilization) == (before.peak, pytest.approx(before.utilization))


def test_profiles_with_older_names_of_constants_are_read() -> None:
    older = {"engine": {"own_exchanges": False, "grouped_narrow": 2.0}}
    found = profiled(engine_named("cuboid"), replace(load_cluster("cpux8"), measured=older), "engine")
    assert (found.own_collectives, found.grouped_fp8) == (False, 2.0)


def test_a_measurement_is_not_negative() -> None:
    for value in (-3.0, 0.0):
        cluster = replace(load_cluster("h100x16"), measured={"fabric": {"outer_bandwidth": value}})
        with pytest.raises(UserError, match=f"measured.fabric.outer_bandwidth={value:g} is no measurement; omit it"):
            machine_of(cluster)
