"""Which node of which group does what: the plan's own order, and the best order while nodes are missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest

from cuboid.errors import UserError
from cuboid.planning.heterogeneous import Line, Machines, predict_job
from cuboid.planning.heterogeneous_file import job_run, planned_lines, planned_machines
from cuboid.planning.question import Question
from cuboid.resilience.replan import TooFew
from cuboid.resilience.replan_groups import GroupReplanner, node_name
from cuboid.spec.cluster import load_cluster
from cuboid.spec.groups import Group, Groups, SiteLink
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.run import Run


def planned(layout: str, line: Line, sites: tuple[str, ...] = (), **kinds: str) -> Run:
    sites = sites or ("lab",) * len(kinds)
    pairs = combinations_with_replacement(dict.fromkeys(sites), 2)
    named = zip(kinds.items(), sites, strict=True)
    groups = Groups(
        name="lab",
        groups=tuple(Group(name=name, site=site, cluster=load_cluster(kind)) for (name, kind), site in named),
        links=tuple(SiteLink(between=pair, bandwidth_gbit=1600.0, latency_ms=0.02) for pair in pairs),
    )
    model = load_model("llama3-8b")
    asked = tuple(Question(model=model, cluster=g.cluster, global_batch=128, sequence=4096) for g in groups.groups)
    machines = Machines(groups, asked)
    job = predict_job(machines, Layout.parse(layout), (line,))
    return job_run(machines, job)


@pytest.fixture(scope="module")
def run() -> Run:
    """Four nodes: the first stages on two of old, the last on two of new."""
    return planned("dp=16,pp=2,zero=1,layers=9:23", Line((1, 0), 16), new="h100x16", old="a100x16")


def nodes(*groups: str) -> list[str]:
    return [node_name(group, f"10.0.0.{place}/{place}") for place, group in enumerate(groups)]


def test_a_plan_is_read_as_it_was_written(run: Run) -> None:
    machines = planned_machines(run)
    assert planned_lines(run, machines) == (Line((1, 0), 16),)
    assert [question.cluster.accelerator for question in machines.questions] == ["h100-80g", "a100-80g"]


def test_nodes_are_put_in_the_order_of_the_plan(run: Run) -> None:
    came = nodes("old", "new", "new", "old")
    choice, members = GroupReplanner(run, 8, lambda: False).arrange(came)
    assert (choice.nodes, choice.layout) == (4, str(run.layout))
    assert members == (came[0], came[3], came[1], came[2])


@pytest.mark.parametrize(
    ("came", "sentence"),
    [
        (("old", "old", "old", "new"), "the plan is for 2 of old and 2 of new, and the nodes that came are 3 of old"),
        (("new", "old", "old", "new"), "rank 0 of the plan is on a node of old, and the node at the rendezvous is of"),
    ],
)
def test_a_job_that_begins_with_others_is_refused(run: Run, came: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        GroupReplanner(run, 8, lambda: False).arrange(nodes(*came))


@pytest.mark.parametrize("came", [("old", "new", "new"), ("new", "new", "old", "old"), ("new", "new"), ("new", "old")])
def test_a_job_that_has_begun_is_planned_for_those_that_are_left(run: Run, came: tuple[str, ...]) -> None:
    there = nodes(*came)
    choice, members = GroupReplanner(run, 8, lambda: True).arrange(there)
    layout = Layout.parse(choice.layout)
    assert members[0] == there[0], "the leader has rank 0"
    assert set(members) <= set(there) and len(members) == choice.nodes == len(set(members))
    assert layout.world_size == 8 * choice.nodes
    assert 128 % layout.batch_unit == 0


def test_a_job_that_trains_is_not_ended_by_a_node_of_another_group(run: Run) -> None:
    """Also before its first checkpoint."""
    replanner = GroupReplanner(run, 8, lambda: False)
    replanner.arrange(nodes("old", "old", "new"))
    there = nodes("old", "old", "new", "old")
    choice, members = replanner.arrange(there)
    assert members[0] == there[0] and len(members) == choice.nodes


def test_a_node_that_the_plan_lacks_is_used_before_one_more_of_another_group(run: Run) -> None:
    there = nodes("old", "new", "new", "new", "old")
    choice, members = GroupReplanner(run, 8, lambda: True).arrange(there)
    assert choice.layout == str(run.layout)
    assert members == (there[0], there[4], there[1], there[2])


def test_every_batch_of_a_ramp_divides(run: Run) -> None:
    """The best layout for the whole batch has 16 parts or more."""
    ramped = replace(run, layout=Layout.parse("dp=4,pp=8,tp=1"), training=replace(run.training, batch_ramp="4x10"))
    for came in (("old", "new", "new"), ("new", "new")):
        choice, _ = GroupReplanner(ramped, 8, lambda: True).arrange(nodes(*came))
        trained = replace(ramped, layout=Layout.parse(choice.layout))
        assert trained.layout.world_size == choice.ranks * choice.nodes


def test_a_job_outlives_a_whole_site() -> None:
    sites = ("here", "there", "far")
    run = planned("dp=8,pp=3,zero=1", Line((0, 1, 2), 8), sites, one="h100x8", two="a100x8", three="l40sx8")
    there = nodes("one", "two")
    choice, members = GroupReplanner(run, 8, lambda: True).arrange(there)
    assert members[0] == there[0] and len(members) == choice.nodes


def test_nodes_that_cannot_hold_the_model_are_too_few() -> None:
    run = planned("dp=8,pp=3,zero=1", Line((0, 0, 1), 8), small="v100-16gx16", large="h100x8")
    with pytest.raises(TooFew, match="1 node of small cannot hold llama3-8b at global_batch=128"):
        GroupReplanner(run, 1, lambda: True).arrange(nodes("small"))


def test_a_node_with_more_accelerators_counts_as_several() -> None:
    """Eight accelerators on a node of big, four on one of small, so four ranks on each: four nodes and two."""
    run = planned("dp=8,pp=3,zero=1,layers=9:9:14", Line((0, 0, 1), 8), big="h100x16", small="gb200x8")
    there = nodes("big", "big", "big", "small")
    choice, members = GroupReplanner(run, 4, lambda: True).arrange(there)
    assert Layout.parse(choice.layout).world_size == 4 * choice.nodes
    assert set(members) <= set(there) and len(members) == choice.nodes == len(set(members))
    assert choice.why.startswith("3 nodes of big and 1 node of small: ")
