"""What a training costs and how long it takes on what a cluster file offers: parts of each group, on demand or where it
may be taken away, and islands of several groups; the best of them for an objective, and the Pareto front.

Failures are counted: those of accelerators as published, and a group that is taken away every `life_hours`. A single
group then continues from its newest checkpoint; islands lose the part of the one that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cuboid.cost.goodput import HOUR, PUBLISHED, Costs, recommend
from cuboid.errors import UserError
from cuboid.planning.choose import each_size, large_enough
from cuboid.planning.energy import kilowatt_hours, no_watts
from cuboid.planning.island_failures import failures_of, goodput_of
from cuboid.planning.islands import Ask, IslandsPlan, islands_alone
from cuboid.planning.plan import amount
from cuboid.planning.question import FEW_NODES, Question, every_size, resized_cluster, sizes
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import Group, Groups

DAY = 86400.0
Measure = Literal["cost", "energy"]
"""What is weighed against days."""
TOGETHER = 32
"""Parts of a group that are searched at once for one that is good enough."""
FAILURES = "rsc"
"""Whose published failures are counted."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One way to train."""

    groups: tuple[str, ...]
    spot: bool
    """At the price of what may be taken away."""
    accelerators: int
    layout: str
    """Those of islands with semicolons between them."""
    tokens_per_second: float
    """Without failures."""
    goodput: float
    days: float
    cost: float | None
    """In the currency of the file; None: it has no price."""
    energy: float | None
    """Kilowatt-hours at board power; None: not known."""
    islands: IslandsPlan | None = None

    def has(self, measure: Measure) -> bool:
        return (self.cost if measure == "cost" else self.energy) is not None

    def of(self, measure: Measure) -> float:
        """0 where it is not known."""
        return (self.cost if measure == "cost" else self.energy) or 0.0

    @property
    def name(self) -> str:
        return " + ".join(self.groups) + (", spot" if self.spot else "")


def offers(groups: Groups, ask: Ask, global_batch: int, tokens: float) -> list[Offer]:
    """All of them, the fastest first."""
    found = [offer for group in _each_kind(groups.groups) for offer in _of_group(group, ask, global_batch, tokens)]
    if len(groups.groups) > 1:
        found += _of_islands(groups, ask, global_batch, tokens)
    if not found:
        raise UserError(f"{groups.name} has no group that fits the model; use more memory or accelerators")
    return sorted(found, key=lambda offer: (offer.days, offer.cost or 0.0))


def _each_kind(groups: Sequence[Group]) -> Iterator[Group]:
    """Of groups that differ in their names and sites alone, the first."""
    seen = []
    for group in groups:
        like = replace(group, name="-", site="-", cluster=replace(group.cluster, name=""))
        if like not in seen:
            seen.append(like)
            yield group


def _ways(prices: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """On demand and spot: what has a price, or on demand where nothing has one."""
    ways = [spot for spot in (False, True) if all(pair[spot] is not None for pair in prices)]
    return ways or [False]


def _of_group(group: Group, ask: Ask, global_batch: int, tokens: float) -> Iterator[Offer]:
    """Of parts of a group each with its best layout."""
    small = group.cluster.nodes <= FEW_NODES
    try:
        question = ask(group.cluster, global_batch)
    except UserError:
        return
    yield from _of_parts(group, question, every_size(group.cluster) if small else sizes(group.cluster), tokens)


def _of_parts(group: Group, question: Question, parts: Sequence[int], tokens: float) -> Iterator[Offer]:
    for size, seconds, layout in each_size(question, parts):
        rate = question.global_batch * question.sequence / seconds
        for spot in _ways([(group.price, group.spot_price)]):
            between = PUBLISHED[FAILURES].seconds(size)
            if group.life_hours is not None and (spot or group.spot_price is None):
                between = 1 / (1 / between + 1 / (HOUR * group.life_hours))
            goodput = recommend(between, Costs()).fraction
            if goodput <= 0:
                continue
            days = tokens / (rate * goodput) / DAY
            price = group.spot_price if spot else group.price
            yield Offer(
                groups=(group.name,),
                spot=spot,
                accelerators=size,
                layout=layout,
                tokens_per_second=rate,
                goodput=goodput,
                days=days,
                cost=None if price is None else price * size * 24 * days,
                energy=kilowatt_hours([(group.cluster, size)], days),
            )


def fewer(
    groups: Groups,
    ask: Ask,
    global_batch: int,
    tokens: float,
    found: Sequence[Offer],
    budget: float | None,
    deadline: float | None,
) -> list[Offer]:
    """With the parts of each kind that are smaller than the smallest that is good enough, until one of them is: of
    large groups only some were looked at."""
    offered = list(found)
    for group in _each_kind(groups.groups):
        most = best(offered, "gpus", budget, deadline).accelerators
        try:
            question = ask(group.cluster, global_batch)
        except UserError:
            continue
        known = {offer.accelerators for offer in offered if offer.groups == (group.name,)}
        left = [size for size in every_size(group.cluster) if size < most and size not in known]
        steps = tokens / (global_batch * question.sequence)
        left = large_enough(question, left, (deadline or float("inf")) * DAY / steps)
        while left:
            offered += _of_parts(group, question, left[:TOGETHER], tokens)
            if best(offered, "gpus", budget, deadline).accelerators < most:
                break
            left = left[TOGETHER:]
    return offered


def _of_islands(groups: Groups, ask: Ask, global_batch: int, tokens: float) -> Iterator[Offer]:
    """The fastest islands of all groups."""
    try:
        plan = islands_alone(groups, ask, global_batch)
    except UserError:
        return
    members, own = plan.members, plan.plans
    for spot in _ways([(group.price, group.spot_price) for group in members]):
        counted = replace(plan, groups=groups if spot else _without_lives(groups))
        goodput = goodput_of(counted, failures_of(counted, PUBLISHED[FAILURES].seconds, Costs())).expected
        if goodput <= 0:
            continue
        days = tokens / (plan.tokens_per_second * goodput) / DAY
        prices = [group.spot_price if spot else group.price for group in members]
        hourly = [price * each.layout.world_size for price, each in zip(prices, own, strict=True) if price is not None]
        yield Offer(
            groups=plan.names,
            spot=spot,
            accelerators=sum(each.layout.world_size for each in own),
            layout="; ".join(str(each.layout) for each in own),
            tokens_per_second=plan.tokens_per_second,
            goodput=goodput,
            days=days,
            cost=24 * days * sum(hourly) if len(hourly) == len(own) else None,
            energy=kilowatt_hours([(each.question.cluster, each.layout.world_size) for each in own], days),
            islands=plan,
        )


def _without_lives(groups: Groups) -> Groups:
    """What is paid on demand is not taken away, where the file knows the two prices."""
    return replace(
        groups,
        groups=tuple(group if group.spot_price is None else replace(group, life_hours=None) for group in groups.groups),
    )


def front(found: Iterable[Offer], measure: Measure = "cost") -> list[Offer]:
    """Those of which no other is both as fast and as cheap, or takes as little energy, the fastest first."""
    kept: list[Offer] = []
    for offer in sorted((each for each in found if each.has(measure)), key=lambda each: (each.days, each.of(measure))):
        if not kept or offer.of(measure) < kept[-1].of(measure):
            kept.append(offer)
    return kept


def best(found: Sequence[Offer], objective: str, budget: float | None, deadline: float | None) -> Offer:
    """The fastest, the cheapest, the one with the least energy or with the fewest accelerators within a budget and a
    deadline in days."""
    priced = objective == "cost" or budget is not None
    if priced and all(offer.cost is None for offer in found):
        raise UserError(
            f"{'budget' if budget is not None else 'objective=cost'} needs a price and the cluster file has none; "
            "add price or spot_price to its groups"
        )
    allowed = [offer for offer in found if not priced or offer.cost is not None]
    if objective == "energy":
        allowed = [offer for offer in allowed if offer.energy is not None]
        if not allowed:
            raise no_watts("what has a price" if priced else "the cluster file")
    in_time = [offer for offer in allowed if deadline is None or offer.days <= deadline]
    if not in_time:
        quickest = min(allowed, key=lambda offer: offer.days)
        raise UserError(
            f"deadline={deadline:g} days is too short: {quickest.name} is fastest and takes {quickest.days:.3g}; use "
            f"deadline={quickest.days * 1.01:.3g} or more"
        )
    paid = [offer for offer in in_time if budget is None or (offer.cost or 0.0) <= budget]
    if not paid:
        cheapest = min(in_time, key=lambda offer: offer.cost or 0.0)
        least = cheapest.cost or 0.0
        raise UserError(
            f"budget={budget:g} is too small{' within the deadline' if deadline is not None else ''}: {cheapest.name} "
            f"costs least, {amount(round(least, 2))}; use budget={least * 1.01:.4g} or more"
        )
    keys: dict[str, Callable[[Offer], tuple[float, float]]] = {
        "time": lambda offer: (offer.days, offer.cost or 0.0),
        "cost": lambda offer: (offer.cost or 0.0, offer.days),
        "energy": lambda offer: (offer.energy or 0.0, offer.days),
        "gpus": lambda offer: (offer.accelerators, offer.days),
    }
    return min(paid, key=keys[objective])


def part(groups: Groups, offer: Offer) -> ClusterSpec:
    """The part of its group that an offer without islands takes."""
    group = next(group for group in groups.groups if group.name == offer.groups[0])
    if offer.accelerators == group.cluster.accelerators:
        return group.cluster
    return resized_cluster(group.cluster, offer.accelerators)
