"""More of anything never makes the best plan slower or dearer: `python benchmarks/more_is_better.py [--cases 300]`.

Random models on random cluster files of one to three groups: more nodes, memory, bandwidth of memory or links,
arithmetic, lower prices. Compared are the fewest days, the least cost, and the fewest accelerators within a deadline;
these also with every smaller part of every group, tried one by one. Islands may lose a twentieth, where what is slower
by less is taken for being simpler, or learning more (`planning/islands.py`)."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from cuboid.cost.goodput import HOUR, PUBLISHED, Costs, recommend
from cuboid.errors import UserError
from cuboid.planning.choose import resized_search
from cuboid.planning.island_table import COMPUTING
from cuboid.planning.islands import MORE
from cuboid.planning.pareto import DAY, FAILURES, TrainingOption, best, training_options, with_smaller_parts
from cuboid.planning.question import Question, every_size, resized
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.groups import Group, Groups, SiteLink
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec

KINDS = ("h100", "a100-40g", "l40s", "rtx-3090", "rtx-2080-ti", "v100-16g", "a10g", "gh200-96g", "b200", "t4", "mi300x")
TOKENS = 1e11


def model(draw: random.Random) -> ModelSpec:
    heads = draw.choice([8, 16, 32])
    hidden = heads * draw.choice([64, 128])
    mixture = None
    if draw.random() < 0.25:
        mixture = MixtureSpec(experts=draw.choice([8, 32]), top_k=2, expert_ffn=draw.choice([512, 1024]))
    return ModelSpec(
        name="any",
        hidden=hidden,
        layers=draw.choice([6, 13, 32]),
        heads=heads,
        kv_heads=draw.choice([heads, heads // 4]),
        ffn=4 * hidden,
        vocab=draw.choice([1000, 50_000]),
        mixture=mixture,
    )


def cluster(draw: random.Random) -> ClusterSpec:
    kind = draw.choice(KINDS)
    node = load_cluster(f"{kind}x8").accelerators_per_node
    nodes = draw.choice([1, 1, 2, 3, 5, 7, 14])
    found = load_cluster(f"{kind}x{node * nodes}")
    return replace(found, memory_gib=found.memory_gib * draw.choice([0.2, 1.0, 1.0]))


def group(draw: random.Random, number: int) -> Group:
    price = draw.choice([None, 0.4, 1.0, 2.5])
    spot = None if price is None or draw.random() < 0.5 else price * draw.choice([0.2, 0.6])
    life = draw.choice([None, 5.0, 50.0])
    name = f"g{number}"
    made = replace(cluster(draw), name=name)
    return Group(name=name, cluster=made, price=price, spot_price=spot, life_hours=life)


def linked(members: tuple[Group, ...], gbit: float) -> Groups:
    links = [
        SiteLink(between=(one.name, other.name), bandwidth_gbit=gbit, latency_ms=20)
        for place, one in enumerate(members)
        for other in members[place + 1 :]
    ]
    return Groups(name="any", groups=members, links=tuple(links))


def more_nodes(groups: Groups, place: int) -> Groups:
    was = groups.groups[place].cluster
    size = (was.nodes + 1) * was.accelerators_per_node
    larger = load_cluster(f"{was.accelerator}x{size}")
    return _with(groups, place, replace(larger, name=was.name, memory_gib=was.memory_gib))


def _with(groups: Groups, place: int, made: ClusterSpec) -> Groups:
    members = list(groups.groups)
    members[place] = replace(members[place], cluster=made)
    return replace(groups, groups=tuple(members))


def _better(**factors: float) -> Callable[[Groups, int], Groups]:
    def change(groups: Groups, place: int) -> Groups:
        was = groups.groups[place].cluster
        changes: dict[str, object] = {
            name: factor * getattr(was, name) for name, factor in factors.items() if name not in ("links", "peak")
        }
        if "links" in factors:
            changes["tiers"] = tuple(
                replace(tier, bandwidth=factors["links"] * tier.bandwidth, latency=tier.latency / factors["links"])
                for tier in was.tiers
            )
        if "peak" in factors:
            changes["peak_tflops"] = {name: factors["peak"] * value for name, value in was.peak_tflops.items()}
        return _with(groups, place, replace(was, **changes))  # type: ignore[arg-type]

    return change


def cheaper(groups: Groups, place: int) -> Groups:
    members = list(groups.groups)
    was = members[place]
    lower = [None if each is None else 0.8 * each for each in (was.price, was.spot_price)]
    members[place] = replace(was, price=lower[0], spot_price=lower[1])
    return replace(groups, groups=tuple(members))


CHANGES: dict[str, Callable[[Groups, int], Groups]] = {
    "nodes": more_nodes,
    "memory": _better(memory_gib=2.0),
    "memory bandwidth": _better(memory_bandwidth=1.5),
    "links": _better(links=2.0),
    "arithmetic": _better(peak=1.5),
    "price": cheaper,
}


def asked(spec: ModelSpec, sequence: int) -> Callable[[ClusterSpec, int], Question]:
    def ask(made: ClusterSpec, batch: int) -> Question:
        precision = "bf16" if "bf16" in made.peak_tflops else "fp16"
        return Question(model=spec, cluster=made, global_batch=batch, sequence=sequence, precision=precision)

    return ask


def _least(found: list[TrainingOption]) -> dict[str, float]:
    costs = [option.cost for option in found if option.cost is not None]
    return {"days": min(option.days for option in found), "cost": min(costs, default=float("inf"))}


def smallest(groups: Groups, ask: Callable[[ClusterSpec, int], Question], batch: int, deadline: float) -> int | None:
    """The smallest part of a group that is fast enough, by trying them in order."""
    found = []
    for each in groups.groups:
        for size in every_size(each.cluster):
            best_here = resized_search(resized(ask(each.cluster, batch), size))
            if best_here is None:
                continue
            between = PUBLISHED[FAILURES].seconds(size)
            if each.life_hours is not None and each.spot_price is None:
                between = 1 / (1 / between + 1 / (HOUR * each.life_hours))
            goodput = recommend(between, Costs()).fraction
            question = ask(each.cluster, batch)
            days = TOKENS / (batch * question.sequence / best_here[0] * goodput) / DAY if goodput > 0 else float("inf")
            if days <= deadline:
                found.append(size)
                break
    return min(found, default=None)


def case(draw: random.Random) -> list[str]:
    """What is wrong with one."""
    spec, sequence, batch = model(draw), draw.choice([512, 2048]), draw.choice([8, 24, 64, 96])
    members = tuple(group(draw, number) for number in range(draw.choice([1, 1, 2, 3])))
    groups = linked(members, draw.choice([1.0, 20.0]))
    ask = asked(spec, sequence)
    told = f"{spec.hidden}x{spec.layers} {'moe ' if spec.mixture else ''}batch {batch} x {sequence} on " + " + ".join(
        f"{each.cluster.accelerator} {each.cluster.nodes}x{each.cluster.accelerators_per_node} "
        f"{each.cluster.memory_gib:.0f} GiB"
        for each in members
    )
    try:
        before = training_options(groups, ask, batch, TOKENS)
    except UserError:
        before = []
    wrong = []
    place = draw.randrange(len(members))
    for name, change in draw.sample(list(CHANGES.items()), 2):
        changed = change(groups, place)
        try:
            after = training_options(changed, ask, batch, TOKENS)
        except UserError:
            after = []
        if before and not after:
            wrong.append(f"{name}: nothing fits any more")
        if not before or not after:
            continue
        was, now = _least(before), _least(after)
        slack = 1 + 1e-9 if len(members) == 1 else MORE / COMPUTING
        # Matmuls that less lies between run at a lower clock (`Engine.heat`).
        slack = 1.05 * slack if name in ("memory bandwidth", "links") else slack
        wrong += [f"{name}: {key} {was[key]:.6g} -> {now[key]:.6g}" for key in was if now[key] > slack * was[key]]
    if before and max(each.cluster.accelerators for each in members) <= 64:
        deadline = draw.choice(before).days * draw.choice([1.0, 1.3])
        every = with_smaller_parts(groups, ask, batch, TOKENS, before, None, deadline)
        found = best(every, "gpus", None, deadline).accelerators
        by_hand = smallest(groups, ask, batch, deadline)
        if by_hand is not None and by_hand < found:
            wrong.append(f"gpus within {deadline:.4g} days: {found}, by hand {by_hand}")
    return [f"{told}: {each}" for each in wrong]


def main() -> None:
    """Tries cases, and prints those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    for number in range(options.cases):
        for each in case(random.Random(options.seed * 1_000_003 + number)):
            wrong += 1
            print(f"{number}: {each}", flush=True)
    print(f"{options.cases} cases, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
