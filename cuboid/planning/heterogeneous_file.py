"""The run file of one job over several groups, which `cuboid train` takes unchanged.

layout = "dp=8,pp=2,zero=1,layers=9:23"
[plan]                                # step time, and which ranks are in which group
ranks_per_node = 8
[[plan.nodes]]                        # in the order of their ranks
group = "old"
nodes = 1
[[plan.lines]]                        # replicas, and the group of each of their pipeline ranks
[[plan.pipeline_ranks]]               # each pipeline rank of each line: layers, seconds, memory
[[plan.groups]]                       # from the cluster file"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import ceil, gcd
from pathlib import Path
from shlex import quote
from typing import Any

from cuboid.errors import UserError
from cuboid.planning.heterogeneous import HeterogeneousJob, Line, Machines, predict_job, rank_groups
from cuboid.planning.plan import GIB, make_plan, to_choose
from cuboid.planning.question import Question
from cuboid.planning.refine import Refined
from cuboid.planning.stages import held
from cuboid.readers import read_toml
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import convert, decode, encode
from cuboid.spec.groups import OWN, Group, Groups, SiteLink
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, dump_run, load_run

LINES = "lines"
AGAIN = "write it anew with cuboid plan … --one-job -o"


def plans_one_job(run_table: Mapping[str, object]) -> bool:
    """Whether a run file has a plan of one job over several groups."""
    plan = run_table.get("plan")
    return isinstance(plan, Mapping) and LINES in plan


def node_size(machines: Machines) -> int:
    """Ranks of a node: the greatest common divisor of the accelerators per node of all groups."""
    return gcd(*(question.cluster.accelerators_per_node for question in machines.questions))


def node_groups(layout: Layout, lines: Sequence[Line], size: int) -> list[int]:
    """The group of each node, in the order of their ranks."""
    return rank_groups(lines, layout)[::size]


def dump_job_plan(machines: Machines, job: HeterogeneousJob, train_tokens: float = 0.0) -> str:
    """The run file. Its first lines name what the user still has to choose."""
    run = job_run(machines, job)
    if train_tokens:
        run = replace(run, training=replace(run.training, steps=ceil(train_tokens / job.tokens)))
    lines = [*to_choose(run), *start_lines(run, "THIS")]
    return "".join(f"# {line}\n" for line in lines) + dump_run(run)


def start_lines(run: Run, file: str) -> list[str]:
    """The commands that start its nodes."""
    nodes = planned_nodes(run)
    assert nodes is not None
    place = f"--nodes {len(nodes)} --rendezvous HOST:29400"
    size = run.layout.world_size // len(nodes)
    several = [
        f"a node of {group.name} has {group.cluster.accelerators_per_node} accelerators: it counts as "
        f"{group.cluster.accelerators_per_node // size} nodes, each started with its own CUDA_VISIBLE_DEVICES"
        for group in planned_machines(run).groups.groups
        if group.name in nodes and group.cluster.accelerators_per_node > size
    ]
    first = f"HOST is a node of {nodes[0]}, which has rank 0"
    return [
        f"on each node of {name}: cuboid train {quote(file)} {place} --group {quote(name)}"
        + (f" ({first})" if not number else "")
        for number, name in enumerate(dict.fromkeys(nodes))
    ] + several


def job_run(machines: Machines, job: HeterogeneousJob) -> Run:
    question = machines.first
    layers = held(question.model, job.layout, question.sequence).counts
    parts = {"compute": job.step_seconds}
    refined = Refined(layout=job.layout, parts=parts, memory=({"weights": 0.0},), layers=layers, bubble=0.0)
    return make_plan(question, refined, 0.0).run_with(_table(machines, job))


def _table(machines: Machines, job: HeterogeneousJob) -> dict[str, object]:
    names, size = machines.names, node_size(machines)
    order = [names[group] for group in node_groups(job.layout, job.lines, size)]
    pipeline_ranks = []
    for here in job.pipeline_ranks:
        row = encode(here)
        row |= {"memory_gib": here.memory / GIB, "room_gib": here.room / GIB}
        pipeline_ranks.append({key: value for key, value in row.items() if key not in ("memory", "room")})
    return {
        "name": machines.groups.name,
        "engine": machines.first.engine,
        "precision": machines.first.precision,
        "step_seconds": job.step_seconds,
        "tokens_per_second": job.tokens_per_second,
        "ranks_per_node": size,
        "nodes": [{"group": name, "nodes": len(list(same))} for name, same in groupby(order)],
        LINES: [{"replicas": line.replicas, "groups": [names[group] for group in line.groups]} for line in job.lines],
        "pipeline_ranks": pipeline_ranks,
        "groups": [_group(group) for group in machines.groups.groups],
        "links": [encode(link) for link in machines.groups.links],
    }


def _group(group: Group) -> dict[str, object]:
    cluster = {**encode(group.cluster), "tiers": [encode(tier) for tier in group.cluster.tiers]}
    return {**{key: value for key, value in encode(group).items() if key in OWN}, "cluster": cluster}


# The run file, read.


def planned_nodes(run: Run) -> list[str] | None:
    """The group of each node in the order of their ranks; None where the run has no plan of several groups."""
    if LINES not in run.plan:
        return None
    rows = convert(run.plan.get("nodes", []), list[dict[str, object]], "plan.nodes")
    found: list[str] = []
    for row in rows:
        count = convert(row.get("nodes"), int, "plan.nodes.nodes")
        if not 1 <= count <= 1 << 20:
            raise UserError(f"plan.nodes.nodes={count} is no number of nodes; {AGAIN}")
        found += [convert(row.get("group"), str, "plan.nodes.group")] * count
    if not found or run.layout.world_size % len(found):
        raise UserError(f"plan.nodes are {len(found)} for {run.layout.world_size} ranks; {AGAIN}")
    return found


def planned_machines(run: Run) -> Machines:
    """The groups that the run was planned for."""
    table = run.plan
    groups = []
    for row in _rows(table, "groups"):
        if "cluster" not in row:
            raise UserError(f"plan.groups.cluster is missing; {AGAIN}")
        cluster = decode(ClusterSpec, convert(row["cluster"], dict[str, object], "plan.groups.cluster"), "plan.groups")
        groups.append(decode(Group, {**row, "cluster": cluster}, "plan.groups"))
    links = tuple(decode(SiteLink, row, "plan.links") for row in _rows(table, "links"))
    spec = Groups(name=convert(table.get("name", "groups"), str, "plan.name"), groups=tuple(groups), links=links)
    return Machines(spec, tuple(_question(run, group.cluster) for group in spec.groups))


def _question(run: Run, cluster: ClusterSpec) -> Question:
    training = run.training
    return Question(
        model=run.model,
        cluster=cluster,
        global_batch=training.global_batch,
        sequence=training.sequence,
        precision=convert(run.plan.get("precision"), str, "plan.precision"),
        optimizer=run.planned_optimizer(),
        average=run.optimizer.average,
        gradient_sums=training.gradient_sums,
        fp8_scaling=training.fp8_scaling,
        fp8_experts=training.fp8_experts,
    )


def planned_lines(run: Run, machines: Machines) -> tuple[Line, ...]:
    found = []
    for row in _rows(run.plan, LINES):
        members = convert(row.get("groups"), list[str], "plan.lines.groups")
        unknown = [name for name in members if name not in machines.names]
        if unknown or len(members) != run.layout.pp:
            raise UserError(
                f"plan.lines.groups={members} does not name a group for each of pp={run.layout.pp}; {AGAIN}"
            )
        replicas = convert(row.get("replicas"), int, "plan.lines.replicas")
        found.append(Line(tuple(map(machines.names.index, members)), replicas))
    if sum(line.replicas for line in found) != run.layout.dp or min(line.replicas for line in found) < 1:
        raise UserError(f"plan.lines.replicas do not add up to dp={run.layout.dp}; {AGAIN}")
    return tuple(found)


def load_job_plan(path: str | Path) -> tuple[Machines, HeterogeneousJob] | None:
    """The plan in a run file, with its prediction computed once more; None where it is no plan of one job over
    groups."""
    if not plans_one_job(dict(read_toml(path))):
        return None
    run = load_run(path)
    machines = planned_machines(run)
    return machines, predict_job(machines, run.layout, planned_lines(run, machines))


def _rows(table: Mapping[str, Any], key: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = convert(table.get(key), list[dict[str, object]], f"plan.{key}")
    if not rows:
        raise UserError(f"plan.{key} is empty; {AGAIN}")
    return rows
