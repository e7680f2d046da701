"""The planner beside Sailor's measured runs: `python benchmarks/sailor.py [--json]`.

36 rows of `benchmarks/published/sailor.csv`, nine of them on mixed RTX 3090, RTX 2080 Ti and Titan RTX. Each is asked
as `cuboid explain` asks: `predict` where accelerators are alike, `predict_job` with the groups of `sailor.toml` where
they are not. `benchmarks/fit_sailor.py` has fitted accelerators and links on single layers, and the engine on the rows
of equal accelerators that a hash of their ids does not hold out; no mixed row was ever fitted."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from published_rows import FOLDER, held_out

from cuboid.planning.choose import predict
from cuboid.planning.heterogeneous import Line, Machines, predict_job
from cuboid.planning.question import Question, resized_cluster
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.groups import Groups, load_groups
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec

GIB = 2.0**30
OPT = ModelSpec(
    name="opt-350m",
    hidden=1024,
    layers=24,
    heads=16,
    ffn=4096,
    vocab=50304,
    norm="layernorm",
    positions="learned",
    max_positions=2050,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
# Its loss is taken over the hidden states, without a head; the rows of its embedding beyond those are counted, for a
# rank, as positions.
NEO = replace(
    OPT,
    name="gpt-neo-2.7b",
    hidden=2560,
    layers=32,
    heads=20,
    kv_heads=20,
    head_dim=128,
    ffn=10240,
    vocab=2560,
    max_positions=13_984,
)
MODELS = {"opt-350m": OPT, "gpt-neo-2.7b": NEO}
TF32 = {"gh200-96g": 494.7}
"""Accelerators whose multiplications of float32 ran in TF32: the container's default."""


@dataclass(frozen=True)
class Row:
    values: dict[str, str]

    @property
    def id(self) -> str:
        return self.values["id"]

    @property
    def ranks(self) -> list[list[str]]:
        """Of each stage the accelerator of each replica, or one for all."""
        return [stage.split() for stage in self.values["ranks"].split(" | ")]

    @property
    def mixed(self) -> bool:
        return len({name for stage in self.ranks for name in stage}) > 1

    @property
    def layout(self) -> Layout:
        tp, pp, dp, micro_batch = (int(self.values[name]) for name in ("tp", "pp", "dp", "mbs"))
        layers = tuple(map(int, self.values["layers"].split(":"))) if pp > 1 else ()
        return Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, layers=layers, sequence_parallel=False)

    @property
    def seconds(self) -> float:
        return float(self.values["step_s"])

    @property
    def memory(self) -> float:
        return float(self.values["mem_gb"])


def rows() -> list[Row]:
    with (FOLDER / "sailor.csv").open(newline="", encoding="utf-8") as opened:
        return [Row(values) for values in csv.DictReader(opened)]


def question(row: Row, cluster: ClusterSpec) -> Question:
    return Question(
        model=MODELS[row.values["model"]],
        cluster=cluster,
        global_batch=int(row.values["gbs"]),
        sequence=int(row.values["seq"]),
        precision="float32",
        engine="sailor-neo" if row.values["model"] == NEO.name else "sailor",
    )


def alike(row: Row) -> ClusterSpec:
    (name,) = {name for stage in row.ranks for name in stage}
    cluster = load_cluster(f"{name}x{row.layout.world_size}")
    return replace(cluster, peak_tflops={**cluster.peak_tflops, "float32": TF32[name]})


def machines(row: Row) -> Machines:
    """The groups with as many nodes as the row has of each."""
    found = load_groups(str(FOLDER / "sailor.toml"))
    tp = int(row.values["tp"])
    groups = []
    for group in found.groups:
        count = sum(stage.count(group.name) for stage in row.ranks)
        if count:
            node = resized_cluster(group.cluster, tp)
            between = replace(load_cluster(f"{group.name}x16").tiers[-1], size=tp * count)
            tiers = (*node.tiers, between) if count > 1 else node.tiers
            groups.append(replace(group, cluster=replace(node, nodes=count, tiers=tiers)))
    nodes = {group.name: group.cluster.nodes for group in groups}
    # Each node has a port of its own.
    links = tuple(
        replace(link, bandwidth_gbit=link.bandwidth_gbit * min(nodes[name] for name in link.between))
        for link in found.links
        if set(link.between) <= nodes.keys()
    )
    kept = Groups(name="lab", groups=tuple(groups), links=links)
    return Machines(kept, tuple(question(row, group.cluster) for group in kept.groups))


def lines(row: Row, names: Sequence[str]) -> list[Line]:
    """A line for each replica."""
    replicas = range(row.layout.dp)
    return [Line(tuple(names.index(stage[replica]) for stage in row.ranks), 1) for replica in replicas]


def predicted(row: Row) -> tuple[float, float]:
    """Seconds of a step and GiB of the fullest rank."""
    if not row.mixed:
        plan = predict(question(row, alike(row)), row.layout)
        return plan.seconds, plan.peak / GIB
    known = machines(row)
    job = predict_job(known, row.layout, lines(row, known.names))
    return job.step_seconds, max(rank.memory for rank in job.pipeline_ranks) / GIB


REPEATED = ("sailor-mit-n3-d1", "sailor-alps-neo-n4-d4")
"""Rows that do not count a second time: the first has the numbers of `n6-d2`, the second the layers of `n4-d4` of
OPT, and for its step the time of that row's sum of gradients."""


@dataclass(frozen=True)
class Scored:
    row: Row
    seconds: float
    memory: float

    @property
    def time_error(self) -> float:
        return self.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.memory / self.row.memory - 1


def score(every: Sequence[Row]) -> list[Scored]:
    return [Scored(row, *predicted(row)) for row in every]


def median(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))


def kinds(scored: Sequence[Scored]) -> Iterator[tuple[str, list[Scored]]]:
    """Every row, without those that repeat others, alike and mixed, fitted and held out."""
    once = [each for each in scored if each.row.id not in REPEATED]
    yield "all 36 rows", list(scored)
    yield "each once", once
    yield "alike, fitted", [each for each in once if not each.row.mixed and not held_out(each.row.id)]
    yield "alike, held out", [each for each in once if not each.row.mixed and held_out(each.row.id)]
    yield "mixed, none fitted", [each for each in once if each.row.mixed]


def main() -> None:
    """Prints every row and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the medians as one JSON object")
    options = parser.parse_args()
    scored = score(rows())
    found = {
        name: {
            "rows": len(some),
            "time_median": median([each.time_error for each in some]),
            "memory_median": median([each.memory_error for each in some]),
        }
        for name, some in kinds(scored)
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for each in scored:
        row = each.row
        print(
            f"{row.id:26s} {row.seconds:8.3f} s {each.seconds:8.3f} {each.time_error:+6.1%}"
            f"  {row.memory:6.2f} GiB {each.memory:6.2f} {each.memory_error:+7.1%}"
        )
    for name, figures in found.items():
        print(f"{name:20s} {figures['rows']:3.0f} rows: time {figures['time_median']:.1%}", end="")
        print(f", memory {figures['memory_median']:.1%}")


if __name__ == "__main__":
    main()
