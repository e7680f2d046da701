"""The layout for the nodes that are there: the run's own where it fits, else the planner's best with the same batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cuboid.errors import UserError
from cuboid.planning.plan import planned_cluster
from cuboid.planning.question import PRECISIONS, Question
from cuboid.planning.search import search
from cuboid.spec.cluster import ClusterSpec, LinkTier, accelerator_names, accelerator_table, load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, check_supported

LOOKED_AT = 12
"""Numbers of nodes, from all of them downwards, for which a layout is sought: fewer would waste too much anyway."""
CANDIDATES = 8
"""Layouts of the planner that are tried for one number of ranks: it may offer what this model's engine refuses."""
OF_A_RAMP = 256
"""… where they must also divide smaller batches."""


UNKNOWN_GPU = "a100-80g"
"""What a GPU that the catalog does not know is taken for: layouts are compared with each other, on any of them."""


class TooFew(UserError):
    """Nodes that do not hold the run; with others it may be held."""


@dataclass(frozen=True)
class Choice:
    """How nodes are used."""

    nodes: int
    ranks: int
    """On each of them."""
    layout: str
    why: str


class Replanner:
    """Answers for one run; each number of nodes is planned once."""

    def __init__(self, run: Run, ranks_per_node: int, cluster: ClusterSpec | None = None) -> None:
        """`cluster` is of what the nodes are made; default: what the run was planned for, or this machine."""
        self._run, self._ranks = run, ranks_per_node
        self._cluster = cluster or planned_cluster(run) or cluster_here(run)
        self.choose = cache(self._choose)

    def _choose(self, nodes: int) -> Choice:
        """The best use of so many nodes; a `UserError` if none of them can hold the run."""
        own = self._run.layout
        if own.world_size == nodes * self._ranks:
            return Choice(nodes, self._ranks, str(own), f"{_nodes(nodes)}: the run's own layout {own}")
        return self.best(nodes)[0]

    def best(self, nodes: int) -> tuple[Choice, float]:
        """The planner's best use of so many nodes, whatever the run's own layout, and seconds of a step."""
        offered = nodes * self._ranks
        best: tuple[float, Choice] | None = None
        for used, ranks in self._parts(nodes):
            found = self._best(used, ranks)
            if found is None or (best is not None and best[0] <= found[0]):
                continue
            idle = offered - used * ranks
            left = f", {idle} of {offered} ranks stay idle" if idle else ""
            why = f"{_nodes(nodes)}: {found[1]} is the planner's best for the same batch{left}"
            best = found[0], Choice(used, ranks, str(found[1]), why)
        if best is None:
            raise TooFew(
                f"{_nodes(nodes)} with {self._ranks} ranks each cannot hold {self._run.model.name} at global_batch="
                f"{self._run.training.global_batch}; use more nodes or another global_batch"
            )
        return best[1], best[0]

    def _parts(self, nodes: int) -> Iterator[tuple[int, int]]:
        """(nodes, ranks on each) that might be used: all ranks of fewer and fewer nodes, fewer ranks of all."""
        for used in range(nodes, max(0, nodes - LOOKED_AT), -1):
            yield used, self._ranks
        for ranks in range(self._ranks - 1, 0, -1):
            yield nodes, ranks

    def _best(self, nodes: int, ranks: int) -> tuple[float, Layout] | None:
        """Seconds of a step, as predicted, and the layout that takes them."""
        run = self._run
        precision = run.training.precision if run.training.precision in PRECISIONS else "float32"
        question = Question(
            model=run.model,
            cluster=resized(self._cluster, nodes, ranks),
            global_batch=run.training.global_batch,
            sequence=run.training.sequence,
            precision=precision,
            optimizer=run.planned_optimizer(),
            average=run.optimizer.average,
            gradient_sums=run.training.gradient_sums,
            fp8_scaling=run.training.fp8_scaling,
            fp8_experts=run.training.fp8_experts,
        )
        for batch in batches_to_plan(run):
            keep = CANDIDATES if batch == run.training.batch_sizes.divisor else OF_A_RAMP
            scores = search(replace(question, global_batch=batch), nodes * ranks, keep=keep)
            for index in range(len(scores.space)):
                layout = scores.space.layout(index)
                if trains(run, layout):
                    return float(scores.seconds[index]) * run.training.global_batch / batch, layout
        return None


def batches_to_plan(run: Run) -> tuple[int, ...]:
    """A layout for the whole batch need not divide the smaller ones of a ramp; one for the second of these does."""
    return tuple(dict.fromkeys((run.training.global_batch, run.training.batch_sizes.divisor)))


def trains(run: Run, layout: Layout) -> bool:
    """Whether the engine trains the run so."""
    try:
        check_supported(replace(run, layout=layout))
    except UserError:
        return False
    return True


def cluster_here(run: Run, on_cpu: bool = False) -> ClusterSpec:
    """What this machine is made of, twice. `on_cpu`: the run computes there, whatever else there is."""
    if not on_cpu and run.training.device != "cpu" and (name := accelerator_here()):
        per_node = accelerator_table(name)["accelerators_per_node"] or 1
        return load_cluster(f"{name}x{2 * per_node}")
    facts = accelerator_table("cpu")
    return ClusterSpec(
        name="cpux4",
        accelerator="cpu",
        nodes=2,
        accelerators_per_node=2,
        tiers=(
            LinkTier(name="shared-memory", size=2, bandwidth=2.0, latency=50.0),
            LinkTier(name="network", size=4, bandwidth=0.1, latency=100.0),
        ),
        peak_tflops=dict(facts["peak_tflops"]),
        memory_gib=facts["memory_gib"],
        memory_bandwidth=facts["memory_bandwidth"],
    )


def accelerator_here(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """This machine's GPU by its name in the catalog, as its driver spells it; empty where there is none."""
    for file in sorted(drivers.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        spelled = re.sub(r"[^a-z0-9]", "", model[1].lower()) if model else ""
        known = {re.sub(r"[^a-z0-9]", "", alias): name for alias, name in accelerator_names().items()}
        found = [alias for alias in known if alias in spelled]
        return known[max(found, key=len)] if found else UNKNOWN_GPU
    return ""


def resized(cluster: ClusterSpec, nodes: int, ranks: int) -> ClusterSpec:
    """So many nodes of the cluster's kind with so many ranks on each: links inside a node span its ranks."""
    total, tiers = nodes * ranks, list[LinkTier]()
    for tier in cluster.tiers:
        inside = tier.size <= cluster.accelerators_per_node and nodes > 1
        size = total if tier is cluster.tiers[-1] else min(ranks if inside else tier.size, total)
        if size > (tiers[-1].size if tiers else 1) or (size == total and not tiers):
            tiers.append(replace(tier, size=size))
    name = f"{cluster.accelerator}x{total}"
    return replace(cluster, name=name, nodes=nodes, accelerators_per_node=ranks, tiers=tuple(tiers))


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
