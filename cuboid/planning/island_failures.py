"""How often the islands of a plan are lost, and how long each is then away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cuboid.cost.goodput import HOUR, Costs
from cuboid.cost.island_goodput import IslandFailures, IslandGoodput, island_goodput
from cuboid.cost.rounds import transfer_seconds
from cuboid.planning.islands import IslandsPlan


def goodput_of(plan: IslandsPlan, islands: Sequence[IslandFailures]) -> IslandGoodput:
    return island_goodput(islands, plan.spec.grace_seconds)


def failures_of(plan: IslandsPlan, between: Callable[[int], float], costs: Costs) -> list[IslandFailures]:
    """Each island fails as its accelerators do, and as often as its whole group is taken away. `between`: mean seconds
    between failures of so many accelerators."""
    found = []
    for group, own in zip(plan.members, plan.plans, strict=True):
        rate = 1 / between(own.layout.world_size)
        if group.life_hours is not None:
            rate += 1 / (HOUR * group.life_hours)
        state = 8.0 * own.question.model.parameters  # outer weights and momentum in float32
        links = [plan.groups.link(group, other) for other in plan.members if other is not group]
        uplink = plan.groups.uplink(group) or float("inf")
        fetch = min(transfer_seconds(state, min(link.rate, uplink), link.latency) for link in links)
        enter = max(fetch, plan.spec.every * plan.step_seconds)  # as many rounds later as there are fragments
        down = costs.detect + costs.restart + enter
        found.append(IslandFailures(1 / rate, down, plan.spec.every / 2 * plan.step_seconds))
    return found
