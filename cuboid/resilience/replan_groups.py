"""Which node does what in a job over groups of different accelerators: as its plan says, or, while nodes are missing,
as the planner finds best for those that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote

from cuboid.errors import UserError
from cuboid.planning.heterogeneous import Machines, predict_job
from cuboid.planning.heterogeneous_file import AGAIN, node_groups, planned_machines, planned_nodes
from cuboid.planning.heterogeneous_search import heterogeneous_job
from cuboid.planning.question import resized_cluster
from cuboid.resilience.replan import Choice, Replanner, TooFew, batches_to_plan, trains
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import Group
from cuboid.spec.run import Run

MARK = "@"
Members = tuple[str, ...]


def node_name(group: str, name: str) -> str:
    """What a node of a group is called among the others."""
    return f"{group}{MARK}{name}" if group else name


def check_group(run: Run, group: str | None, nodes: int, ranks: int) -> None:
    """Refuses a node that says no group where the plan has several, or another one. `ranks`: on each node."""
    planned = planned_nodes(run)
    if planned is None:
        if group is not None:
            raise UserError(f"group={group} is for a plan of one job over several groups; omit it")
        return
    names, machines = list(dict.fromkeys(planned)), planned_machines(run)  # needed when a node is lost, so read now
    if unknown := [name for name in names if name not in machines.names]:
        raise UserError(
            f"plan.nodes.group={unknown[0]} is none of plan.groups, {' and '.join(machines.names)}; {AGAIN}"
        )
    if group not in names:
        told = f"group={group} is not in" if group is not None else "--group is missing for"
        raise UserError(
            f"{told} a plan over several groups; add {' or '.join(f'--group {quote(name)}' for name in names)}"
        )
    if nodes != len(planned):
        counts = " and ".join(f"{count} of {name}" for name, count in Counter(planned).items())
        raise UserError(f"nodes={nodes} are not the {len(planned)} of the plan, {counts}; use --nodes {len(planned)}")
    if ranks * nodes != run.layout.world_size:
        raise UserError(
            f"ranks-per-node={ranks} are not the {run.layout.world_size // nodes} of the plan; omit --ranks-per-node"
        )


class GroupReplanner:
    """Answers for one run. The leader comes first, as in any job: it holds rank 0."""

    def __init__(self, run: Run, ranks: int, begun: Callable[[], bool]) -> None:
        """`begun`: whether there is anything to continue; a job that begins is what its plan says, or refused."""
        planned = planned_nodes(run)
        assert planned is not None
        self._run, self._ranks, self._planned, self._begun = run, ranks, planned, begun
        self._arranged = False
        self._known: dict[tuple[tuple[str, int], ...], tuple[Choice, list[str]]] = {}

    def arrange(self, nodes: Sequence[str]) -> tuple[Choice, Members]:
        """What these nodes do, the leader's the first of them; a `UserError` where they cannot hold the run. A job that
        trains already continues with whoever comes."""
        arranged = self._arrange(nodes)
        self._arranged = True
        return arranged

    def _arrange(self, nodes: Sequence[str]) -> tuple[Choice, Members]:
        nodes = self._taken(nodes)
        came = [_group(node) for node in nodes]
        there, wanted = Counter(came), Counter(self._planned)
        first = came[0]
        if not wanted - there and self._planned[0] == first:
            why = f"{len(self._planned)} nodes: the run's own layout {self._run.layout}"
            return Choice(len(self._planned), self._ranks, str(self._run.layout), why), _members(nodes, self._planned)
        if len(nodes) >= len(self._planned) and not self._arranged and not self._begun():
            self._refuse(there, wanted, first)
        key = ((first, there.pop(first)), *sorted(there.items()))
        if key not in self._known:
            self._known[key] = self._best(dict(key), first)
        choice, order = self._known[key]
        return choice, _members(nodes, order)

    def _taken(self, nodes: Sequence[str]) -> list[str]:
        """As many as the plan has: the leader, those that the plan asks for, then others; who came first first."""
        room, chosen = Counter(self._planned), [0]
        room[_group(nodes[0])] -= 1
        for place in range(1, len(nodes)):
            if room[_group(nodes[place])] > 0:
                room[_group(nodes[place])] -= 1
                chosen.append(place)
        others = [place for place in range(len(nodes)) if place not in chosen]
        return [nodes[place] for place in sorted([*chosen, *others][: len(self._planned)])]

    def _refuse(self, there: Counter[str], wanted: Counter[str], first: str) -> None:
        if wanted - there:
            planned = " and ".join(f"{count} of {name}" for name, count in wanted.items())
            came = " and ".join(f"{count} of {name}" for name, count in there.items())
            raise UserError(f"the plan is for {planned}, and the nodes that came are {came}; start them with --group")
        raise UserError(
            f"rank 0 of the plan is on a node of {self._planned[0]}, and the node at the rendezvous is of {first}; "
            f"name a node of {self._planned[0]} in --rendezvous"
        )

    def _best(self, counts: dict[str, int], first: str) -> tuple[Choice, list[str]]:
        """Over all groups that are there, or by one group alone; the leader's takes part."""
        run, machines = self._run, planned_machines(self._run)
        names = [name for name in machines.names if counts.get(name)]
        told = " and ".join(f"{counts[name]} node{'s' * (counts[name] > 1)} of {name}" for name in names)
        found: list[tuple[float, Choice, list[str]]] = []
        if len(names) > 1:
            groups = tuple(
                replace(group, cluster=self._cluster_of(group, counts[group.name]))
                for group in machines.groups.groups
                if group.name in names
            )
            sites = {group.site for group in groups}
            links = tuple(link for link in machines.groups.links if sites.issuperset(link.between))
            spec = replace(machines.groups, groups=groups, links=links)
            asked = [
                replace(question, cluster=group.cluster)
                for group, question in zip(groups, machines.questions, strict=False)
            ]
            for batch in batches_to_plan(run):
                job = heterogeneous_job(spec, asked, batch, first=names.index(first))
                if job is None or not trains(run, job.layout):
                    continue
                seconds = predict_job(Machines(spec, tuple(asked)), job.layout, job.lines).step_seconds
                order = [names[group] for group in node_groups(job.layout, job.lines, self._ranks)]
                why = f"{told}: {job.layout} is the planner's best for the same batch"
                found.append((seconds, Choice(len(order), self._ranks, str(job.layout), why), order))
                break
        cluster = next(group.cluster for group in machines.groups.groups if group.name == first)
        try:
            choice, seconds = Replanner(run, self._ranks, cluster).best(counts[first])
        except TooFew:
            if not found:
                raise TooFew(
                    f"{told} cannot hold {run.model.name} at global_batch={run.training.global_batch}"
                ) from None
        else:
            found.append((seconds, choice, [first] * choice.nodes))
        _, choice, order = min(found, key=lambda each: each[0])
        return choice, order

    def _cluster_of(self, group: Group, nodes: int) -> ClusterSpec:
        """So many nodes of a group. One with more accelerators than the job has ranks on a node counts as several."""
        planned = group.cluster.accelerators // self._ranks
        cluster = replace(group.cluster, nodes=planned, accelerators_per_node=self._ranks)
        return replace(resized_cluster(cluster, nodes * self._ranks), name=group.name)


def _members(nodes: Sequence[str], order: Sequence[str]) -> Members:
    """Nodes in the order of their groups, who came first first."""
    left = {name: [node for node in nodes if _group(node) == name] for name in set(order)}
    return tuple(left[name].pop(0) for name in order)


def _group(node: str) -> str:
    return node.rpartition(MARK)[0]
