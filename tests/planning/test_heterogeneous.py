"""One job over different accelerators: parts of the batch by speed, against equal parts and each kind by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.heterogeneous import Line, Machines, predict_job, rank_groups
from cuboid.planning.heterogeneous_batches import share_out
from cuboid.planning.heterogeneous_search import _Search, heterogeneous_job
from cuboid.planning.question import Question
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.groups import Group, Groups, SiteLink
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

MODEL = load_model("llama3.2-1b")


def ask(cluster: ClusterSpec, global_batch: int, **fixed: object) -> Question:
    return Question(model=MODEL, cluster=cluster, global_batch=global_batch, sequence=4096, fixed=fixed)


def lab(*kinds: str, gbit: float = 3200) -> Groups:
    members = tuple(Group(name=kind, site="lab", cluster=replace(load_cluster(kind), name=kind)) for kind in kinds)
    return Groups(
        name="lab",
        groups=members,
        links=(SiteLink(between=("lab", "lab"), bandwidth_gbit=gbit, latency_ms=0.02),),
    )


def questions(groups: Groups, global_batch: int, **fixed: object) -> list[Question]:
    return [ask(group.cluster, global_batch, **fixed) for group in groups.groups]


def test_faster_replicas_take_more() -> None:
    groups = lab("h100x16", "a100x32")
    found = heterogeneous_job(groups, questions(groups, 576, pp=1), 576)
    assert found is not None
    layout = found.layout
    assert layout.world_size == 48
    check(layout, MODEL, global_batch=576, sequence=4096, world_size=48)
    first, last = layout.batch_weights[0], layout.batch_weights[-1]
    assert first > last
    assert set(layout.batch_weights[: 16 // layout.tp]) == {first}
    # Each kind's own prediction for its part, and what crosses the link beside it.
    crossing = 6 * MODEL.parameters / (3200e9 / 8)
    alone = [
        predict(ask(load_cluster(kind), replicas * weight * 576 // layout.batch_parts), part).seconds
        for kind, replicas, weight in (("h100x16", 16 // layout.tp, first), ("a100x32", 32 // layout.tp, last))
        for part in [layout.changed(dp=replicas, batch_weights=())]
    ]
    assert found.step_seconds == pytest.approx(max(alone) + crossing, rel=0.03)
    assert found.waiting == pytest.approx(1 - min(alone) / max(alone), abs=0.03)


def test_equal_kinds_take_equal_parts() -> None:
    groups = lab("h100x8", "h100x16")
    found = heterogeneous_job(groups, questions(groups, 96), 96)
    assert found is not None
    assert found.layout.batch_weights == ()
    assert found.waiting < 0.05


def test_a_slow_link_costs_time_and_what_is_decided_stays() -> None:
    fast, slow = (
        heterogeneous_job(lab("h100x8", "a100x8", gbit=gbit), questions(lab("h100x8", "a100x8"), 144), 144)
        for gbit in (3200, 10)
    )
    assert fast is not None and slow is not None
    assert slow.step_seconds > 2 * fast.step_seconds
    assert slow.layout.pp > 1, "a pipeline sends least over the link"
    groups = lab("h100x8", "a100x8")
    replicas = heterogeneous_job(groups, questions(groups, 144, pp=1), 144)
    narrow = lab("h100x8", "a100x8", gbit=10)
    over_narrow = heterogeneous_job(narrow, questions(narrow, 144, pp=1), 144)
    assert replicas is not None and over_narrow is not None
    assert over_narrow.crossing > replicas.crossing + 2
    decided = heterogeneous_job(groups, questions(groups, 144, tp=2, recompute="full"), 144)
    assert decided is not None
    assert (decided.layout.tp, decided.layout.recompute) == (2, "full")
    split = heterogeneous_job(groups, questions(groups, 144, zero=3), 144)
    assert split is not None and split.layout.zero == 3 and split.fits


def test_a_full_link_takes_as_long_whatever_the_micro_batches() -> None:
    groups = lab("h100x8", "a100x8", gbit=1)
    machines, layout = Machines(groups, tuple(questions(groups, 128))), Layout.parse("dp=8,pp=2,zero=1,schedule=gpipe")
    spans = [predict_job(machines, layout.changed(micro_batch=size), (Line((0, 1), 8),)).spans[0] for size in (1, 2, 4)]
    full = 128 * 4096 * MODEL.hidden * 2 / (1e9 / 8)
    assert min(spans) >= full


@pytest.mark.parametrize(("engine", "copies"), [("cuboid", 4), ("megatron", 1)])
def test_tensor_ranks_send_the_whole_message_together(engine: str, copies: int) -> None:
    """Without sequence parallelism those of Cuboid send a copy each, those of Megatron-LM a part each."""
    groups = lab("h100x8", "a100x8", gbit=0.1)
    machines = Machines(groups, tuple(replace(each, engine=engine) for each in questions(groups, 128)))
    seconds = {}
    for name in ("tp=1,dp=8", "tp=4,dp=2,sequence_parallel=false", "tp=4,dp=2"):
        layout = Layout.parse(f"{name},pp=2,zero=1,micro_batch=1")
        seconds[name] = predict_job(machines, layout, (Line((0, 1), layout.dp),)).spans[0]
    alone, copied, split = seconds.values()
    assert split == pytest.approx(alone, rel=0.01)
    assert copied == pytest.approx(copies * alone, rel=0.01)


def test_stages_that_stop_for_messages_take_their_time_too() -> None:
    groups = lab("h100x8", "a100x8", gbit=1)
    layout, line = Layout.parse("dp=8,pp=2,micro_batch=1"), Line((0, 1), 8)
    asked = questions(groups, 512)
    beside, stops = (
        predict_job(
            Machines(
                groups, tuple(replace(each, engine=replace(asked[0].profile, transfer_stops=stop)) for each in asked)
            ),
            layout,
            (line,),
        )
        for stop in (False, True)
    )
    message = 8 * 4096 * MODEL.hidden * 2 / (1e9 / 8)
    each = stops.spans[0] / (512 / 8)
    busiest = max(here.seconds for here in beside.pipeline_ranks)
    assert each == pytest.approx(message + busiest, rel=0.1) and stops.spans[0] > beside.spans[0]
    assert stops.pipeline_ranks[0].seconds == beside.pipeline_ranks[0].seconds, "of computing"


def test_replicas_of_one_line_may_have_other_weights() -> None:
    groups = lab("h100x8", "a100x8")
    machines = Machines(groups, tuple(questions(groups, 128)))
    first, last, equal = (
        predict_job(machines, Layout.parse(f"dp=8,pp=2{weights}"), (Line((0, 1), 8),))
        for weights in (",batch_weights=3x4:1x4", ",batch_weights=1x4:3x4", "")
    )
    assert [line.replicas for line in first.lines] == [4, 4] and equal.lines == (Line((0, 1), 8),)
    assert max(first.spans) == pytest.approx(max(last.spans)) == pytest.approx(1.5 * equal.spans[0], rel=0.05)


def test_stages_go_to_kinds_by_their_speed() -> None:
    """No layer moved from one stage to another makes the step shorter, whatever the kinds hold besides."""
    groups = lab("h100x8", "a100x8")
    asked = [replace(each, model=load_model("llama3-8b")) for each in questions(groups, 96, schedule="1f1b", pp=2)]
    found = heterogeneous_job(groups, asked, 96)
    assert found is not None and found.fits
    layout, machines = found.layout, Machines(groups, tuple(asked))
    assert layout.pp > 1 and sum(layout.layers) == 32
    kinds = {here.group: here for here in found.pipeline_ranks}
    assert kinds["h100x8"].layers > kinds["a100x8"].layers >= 1
    check(layout, asked[0].model, global_batch=96, sequence=4096, world_size=16)
    for source, target in permutations(range(layout.pp), 2):
        if layout.layers[source] > 1:
            moved = list(layout.layers)
            moved[source], moved[target] = moved[source] - 1, moved[target] + 1
            other = predict_job(machines, layout.changed(layers=tuple(moved)), found.lines)
            assert other.step_seconds >= 0.99 * found.step_seconds or not other.fits


def test_memory_of_a_kind_bounds_its_stages() -> None:
    """The faster kind has less memory: it takes as many layers as it can hold."""
    groups = lab("h100x8", "a100x8")
    small = replace(groups.groups[0], cluster=replace(groups.groups[0].cluster, memory_gib=40.0))
    groups = replace(groups, groups=(small, groups.groups[1]))
    asked = [
        replace(each, model=load_model("llama3-8b")) for each in questions(groups, 96, pp=2, tp=1, recompute="none")
    ]
    found = heterogeneous_job(groups, asked, 96)
    assert found is not None and found.fits
    held = {here.group: here for here in found.pipeline_ranks}
    assert held["h100x8"].memory <= 0.95 * 40 * 2**30 < held["a100x8"].memory
    assert held["h100x8"].idle > held["a100x8"].idle


def test_shards_go_by_the_memory_that_is_left() -> None:
    """Replicas on a small and a large kind: equal shards do not fit the small one, others do."""
    groups = lab("h100x8", "a100x8")
    fixed = {"pp": 1, "tp": 1, "zero": 1, "recompute": "full", "micro_batch": 1}
    asked = [replace(each, model=load_model("llama3-8b"), fixed=fixed) for each in questions(groups, 96)]
    found = heterogeneous_job(groups, asked, 96)
    assert found is not None and found.fits and not found.layout.shard_weights
    first, last = (here.memory for here in found.pipeline_ranks)
    assert first == pytest.approx(last, rel=0.05)
    enough = replace(groups.groups[0].cluster, memory_gib=(first / 2**30 - 2) / 0.95)
    smaller = replace(groups, groups=(replace(groups.groups[0], cluster=enough), groups.groups[1]))
    asked = [replace(each, cluster=group.cluster) for each, group in zip(asked, smaller.groups, strict=True)]
    found = heterogeneous_job(smaller, asked, 96)
    assert found is not None and found.fits
    assert found.layout.shard_weights[0] < found.layout.shard_weights[-1], "less on the small kind"


def test_lines_mix_pipelines_and_replicas() -> None:
    """Two sites with both kinds each: a pipeline through both kinds of each site, replicas across sites."""
    kinds = ("h100x8", "a100x8")
    members = tuple(
        Group(name=f"{site}-{kind}", site=site, cluster=replace(load_cluster(kind), name=kind))
        for site in ("east", "west")
        for kind in kinds
    )
    links = [(("east", "east"), 3200.0), (("west", "west"), 3200.0), (("east", "west"), 100.0)]
    groups = Groups(
        name="sites",
        groups=members,
        links=tuple(SiteLink(between=pair, bandwidth_gbit=gbit, latency_ms=5.0) for pair, gbit in links),
    )
    asked = questions(groups, 384, dp=16, pp=2)
    found = heterogeneous_job(groups, asked, 384)
    assert found is not None and found.fits
    layout = Layout.parse("dp=16,pp=2,zero=1,layers=5:11")
    both = predict_job(Machines(groups, tuple(asked)), layout, (Line((1, 0), 8), Line((3, 2), 8)))
    held = MODEL.parameters + MODEL.vocab * MODEL.hidden  # the first stage and the last have the tied table
    assert both.crossing == pytest.approx(6 * held * 15 / 16 / (100e9 / 8) + 0.01, rel=0.01)
    assert both.waiting == 0
    assert found.step_seconds <= both.step_seconds


@pytest.mark.parametrize("whole", [12, 30, 64, 97])
def test_micro_batches_are_shared_out_as_well_as_can_be(whole: int) -> None:
    replicas, fills, slopes = [2, 3], [1.0, 0.5], [1.0, 2.7]

    def last(counts: tuple[int, ...]) -> float:
        return max(fill + slope * count for fill, slope, count in zip(fills, slopes, counts, strict=True))

    ways = [(one, other) for one in range(1, whole) for other in range(1, whole) if 2 * one + 3 * other == whole]
    found = share_out(whole, replicas, fills, slopes)
    assert found is not None
    assert last(tuple(found)) == min(map(last, ways))


def test_what_fits_no_kind_is_none() -> None:
    groups = lab("h100x8", "a100x8")
    small = replace(
        groups,
        groups=(replace(groups.groups[0], cluster=replace(groups.groups[0].cluster, memory_gib=1.0)), groups.groups[1]),
    )
    assert heterogeneous_job(small, questions(small, 144), 144) is None


def test_no_node_has_ranks_of_two_groups() -> None:
    """Said of changes between groups, beside every rank by itself."""
    groups = lab("h100x16", "a100x16")
    search = _Search(Machines(groups, tuple(questions(groups, 32))), None)
    found = set()
    for stages in product((0, 1), repeat=3):
        for replicas, others, tp in product((1, 2, 4, 5, 8), (0, 1, 4, 8), (1, 2, 8)):
            lines = (Line(stages, replicas), *[Line(stages[::-1], others)] * (others > 0))
            order = rank_groups(lines, Layout(dp=replicas + others, tp=tp, pp=3))
            nodes = [order[start : start + 8] for start in range(0, len(order), 8)]
            whole = all(len(set(node)) == 1 for node in nodes)
            assert search._whole_nodes(lines, tp) == whole, (lines, tp)
            found.add(whole)
    assert found == {True, False}
