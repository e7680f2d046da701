"""Days, cost and energy of a training on each option of a cluster file: parts of each group, on demand or spot, and
islands of several groups; the Pareto front of these options, and the best one for an objective.

Days include failures: those of accelerators as published, and the loss of a whole group every `life_hours`. A single
group then resumes from its newest checkpoint; islands continue without the lost one."""

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
from cuboid.planning.meanwhile import meanwhile
from cuboid.planning.plan import amount
from cuboid.planning.question import FEW_NODES, Question, every_size, resized_cluster, sizes
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import Group, Groups

DAY = 86400.0
Measure = Literal["cost", "energy"]
"""The axis beside days."""
TOGETHER = 32
"""Sizes of a part of a group that are searched at once."""
FAILURES = "rsc"
"""The published failure rates that are assumed."""


@dataclass(frozen=True, kw_only=True)
class TrainingOption:
    """One way to train."""

    groups: tuple[str, ...]
    spot: bool
    """At spot prices, where the group may be lost."""
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


def training_options(groups: Groups, ask: Ask, global_batch: int, tokens: float) -> list[TrainingOption]:
    """The fastest first."""

    def alone() -> list[TrainingOption]:
        return [option for group in _distinct(groups.groups) for option in _of_group(group, ask, global_batch, tokens)]

    if len(groups.groups) == 1:
        found = alone()
    else:
        with meanwhile(alone) as answer:
            of_islands = list(_of_islands(groups, ask, global_batch, tokens))
            found = answer() + of_islands
    if not found:
        raise UserError(f"{groups.name} has no group that fits the model; use more memory or accelerators")
    return sorted(found, key=lambda option: (option.days, option.cost or 0.0))


def _distinct(groups: Sequence[Group]) -> Iterator[Group]:
    """The first of all groups that differ only in name and site."""
    seen = []
    for group in groups:
        like = replace(group, name="-", site="-", cluster=replace(group.cluster, name=""))
        if like not in seen:
            seen.append(like)
            yield group


def _spot_or_not(prices: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """Which of on demand (False) and spot (True) have a price; on demand where neither has one."""
    priced = [spot for spot in (False, True) if all(pair[spot] is not None for pair in prices)]
    return priced or [False]


def _of_group(group: Group, ask: Ask, global_batch: int, tokens: float) -> Iterator[TrainingOption]:
    """Parts of a group, each with its best layout."""
    small = group.cluster.nodes <= FEW_NODES
    try:
        question = ask(group.cluster, global_batch)
    except UserError:
        return
    yield from _of_parts(group, question, every_size(group.cluster) if small else sizes(group.cluster), tokens)


def _of_parts(group: Group, question: Question, parts: Sequence[int], tokens: float) -> Iterator[TrainingOption]:
    for size, seconds, layout in each_size(question, parts):
        rate = question.global_batch * question.sequence / seconds
        for spot in _spot_or_not([(group.price, group.spot_price)]):
            between = PUBLISHED[FAILURES].seconds(size)
            if group.life_hours is not None and (spot or group.spot_price is None):
                between = 1 / (1 / between + 1 / (HOUR * group.life_hours))
            goodput = recommend(between, Costs()).fraction
            if goodput <= 0:
                continue
            days = tokens / (rate * goodput) / DAY
            price = group.spot_price if spot else group.price
            yield TrainingOption(
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


def with_smaller_parts(
    groups: Groups,
    ask: Ask,
    global_batch: int,
    tokens: float,
    found: Sequence[TrainingOption],
    budget: float | None,
    deadline: float | None,
) -> list[TrainingOption]:
    """Adds smaller parts of each group, until one of them meets budget and deadline: of large groups only some sizes
    were searched so far."""
    options = list(found)
    for group in _distinct(groups.groups):
        most = best(options, "gpus", budget, deadline).accelerators
        try:
            question = ask(group.cluster, global_batch)
        except UserError:
            continue
        known = {option.accelerators for option in options if option.groups == (group.name,)}
        left = [size for size in every_size(group.cluster) if size < most and size not in known]
        steps = tokens / (global_batch * question.sequence)
        left = large_enough(question, left, (deadline or float("inf")) * DAY / steps)
        while left:
            options += _of_parts(group, question, left[:TOGETHER], tokens)
            if best(options, "gpus", budget, deadline).accelerators < most:
                break
            left = left[TOGETHER:]
    return options


def _of_islands(groups: Groups, ask: Ask, global_batch: int, tokens: float) -> Iterator[TrainingOption]:
    """The fastest islands of all groups."""
    try:
        plan = islands_alone(groups, ask, global_batch)
    except UserError:
        return
    members, own = plan.members, plan.plans
    for spot in _spot_or_not([(group.price, group.spot_price) for group in members]):
        counted = replace(plan, groups=groups if spot else _without_lives(groups))
        goodput = goodput_of(counted, failures_of(counted, PUBLISHED[FAILURES].seconds, Costs())).expected
        if goodput <= 0:
            continue
        days = tokens / (plan.tokens_per_second * goodput) / DAY
        prices = [group.spot_price if spot else group.price for group in members]
        hourly = [price * each.layout.world_size for price, each in zip(prices, own, strict=True) if price is not None]
        yield TrainingOption(
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
    """A group that is paid on demand is not lost, if the file has a spot price too."""
    return replace(
        groups,
        groups=tuple(group if group.spot_price is None else replace(group, life_hours=None) for group in groups.groups),
    )


def front(found: Iterable[TrainingOption], measure: Measure = "cost") -> list[TrainingOption]:
    """The Pareto front: options that no other option beats in both days and `measure`; the fastest first."""
    kept: list[TrainingOption] = []
    for option in sorted((each for each in found if each.has(measure)), key=lambda each: (each.days, each.of(measure))):
        if not kept or option.of(measure) < kept[-1].of(measure):
            kept.append(option)
    return kept


def best(
    found: Sequence[TrainingOption], objective: str, budget: float | None, deadline: float | None
) -> TrainingOption:
    """The option with the least days, cost, energy or accelerators that is within the budget and the deadline
    (days)."""
    priced = objective == "cost" or budget is not None
    if priced and all(option.cost is None for option in found):
        raise UserError(
            f"{'budget' if budget is not None else 'objective=cost'} needs a price and the cluster file has none; "
            "add price or spot_price to its groups"
        )
    allowed = [option for option in found if not priced or option.cost is not None]
    if objective == "energy":
        allowed = [option for option in allowed if option.energy is not None]
        if not allowed:
            raise no_watts("what has a price" if priced else "the cluster file")
    in_time = [option for option in allowed if deadline is None or option.days <= deadline]
    if not in_time:
        quickest = min(allowed, key=lambda option: option.days)
        raise UserError(
            f"deadline={deadline:g} days is too short: {quickest.name} is fastest and takes {quickest.days:.3g}; use "
            f"deadline={quickest.days * 1.01:.3g} or more"
        )
    paid = [option for option in in_time if budget is None or (option.cost or 0.0) <= budget]
    if not paid:
        cheapest = min(in_time, key=lambda option: option.cost or 0.0)
        least = cheapest.cost or 0.0
        raise UserError(
            f"budget={budget:g} is too small{' within the deadline' if deadline is not None else ''}: {cheapest.name} "
            f"costs least, {amount(round(least, 2))}; use budget={least * 1.01:.4g} or more"
        )
    keys: dict[str, Callable[[TrainingOption], tuple[float, float]]] = {
        "time": lambda option: (option.days, option.cost or 0.0),
        "cost": lambda option: (option.cost or 0.0, option.days),
        "energy": lambda option: (option.energy or 0.0, option.days),
        "gpus": lambda option: (option.accelerators, option.days),
    }
    return min(paid, key=keys[objective])


def cluster_of(groups: Groups, option: TrainingOption) -> ClusterSpec:
    """The accelerators of an option without islands."""
    group = next(group for group in groups.groups if group.name == option.groups[0])
    if option.accelerators == group.cluster.accelerators:
        return group.cluster
    return resized_cluster(group.cluster, option.accelerators)
