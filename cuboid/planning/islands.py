"""Which groups of a cluster file become islands of one training, with which layouts, and how they synchronise.

All islands take as many steps, so the slowest one sets the pace: groups are tried as the fastest one or two, three … of
them. For each number the batch is shared out, equally and by their speeds, each island gets its own best layout, and
the table [islands] is the mildest one with which the links cost less than a twentieth of the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

from cuboid.cost.island_loss import ExpectedLoss, expected_loss
from cuboid.cost.rounds import IslandTimes, Timeline, endless, rounds_over_time
from cuboid.errors import UserError
from cuboid.planning.choose import SIMULATED, fastest, resized_search, with_reasons
from cuboid.planning.energy import kilowatt_hours
from cuboid.planning.island_alternatives import Alternative, as_one_job, fastest_alone, unequal_job, without_islands
from cuboid.planning.island_batches import share, weights_by_speed
from cuboid.planning.island_links import Paths, homes_of, sent_between
from cuboid.planning.island_table import COMPUTING, island_times, mean_seconds, mildest
from cuboid.planning.meanwhile import meanwhile
from cuboid.planning.plan import Plan
from cuboid.planning.question import Question
from cuboid.planning.search import search
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import decode, field_types, parse_text, require_known
from cuboid.spec.groups import Group, Groups
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import format_weights, parse_weights
from cuboid.spec.run import Run

MORE = 1.05
"""Times the tokens in the same time for which an island more, or batches by speed, are taken."""
FEW = 4
"""Groups of which every number of the fastest is tried."""
Ask = Callable[[ClusterSpec, int], Question]
"""The user's question about a cluster, with a global batch."""


@dataclass(frozen=True, kw_only=True)
class IslandsPlan:
    """Islands that train one model, each with its own plan."""

    groups: Groups
    names: tuple[str, ...]
    """Of the groups that are islands, in the order of their numbers."""
    plans: tuple[Plan, ...]
    spec: IslandsSpec
    times: tuple[IslandTimes, ...]
    transfers: tuple[float, ...]
    """Seconds of each fragment, until all islands have fetched it."""
    decide: float
    sent: tuple[int, ...]
    """Bytes that each island sends in `every` steps."""
    computing: float
    """The fraction of its time that the slowest island computes."""
    """… but for what it waits for rounds and does between steps."""
    hidden: float
    """The fraction of rounds, from the last arrival until they are done, in which the slowest island did not wait."""
    step_seconds: float
    """Of each island's step on average, with all waiting."""
    loss: ExpectedLoss
    alone: Alternative | None = None
    """The fastest group without the others."""
    one_job: Alternative | None = None
    """All groups as one job, its collectives on the slow links."""
    unequal: Alternative | None = None
    """… with parts of the batch by the speed of each replica's accelerators, where these differ."""
    one_job_refused: str = ""
    """Why there is none."""
    notes: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[Group, ...]:
        return tuple(next(group for group in self.groups.groups if group.name == name) for name in self.names)

    @property
    def coordinator(self) -> str:
        """Where islands should meet."""
        return Paths(self.groups, self.members).coordinator.name

    def energy(self, days: float) -> float | None:
        """Kilowatt-hours at board power; None: of an island it is not known."""
        return kilowatt_hours([(plan.question.cluster, plan.layout.world_size) for plan in self.plans], days)

    @property
    def tokens_per_second(self) -> float:
        return sum(plan.question.global_batch * plan.question.sequence for plan in self.plans) / self.step_seconds

    @property
    def host_bytes(self) -> tuple[float, ...]:
        """CPU memory of a node of each island, for outer weights, momentum and what rounding lost."""
        numbers = 3 if self.spec.bits < 16 else 2
        return tuple(
            4.0 * numbers * plan.question.model.parameters / plan.question.cluster.nodes for plan in self.plans
        )

    def run(self, number: int) -> Run:
        """What one island trains, without its plan."""
        plan = self.plans[number]
        return replace(plan.run_with({}), islands=self.spec)

    def timeline(self, steps: int) -> Timeline:
        return rounds_over_time(self.spec, steps, self.times, self.transfers, self.decide)


def parse_wanted(text: str) -> dict[str, Any]:
    """`every=64,bits=4` as fields of [islands]."""
    types = {name: hint for name, hint in field_types(IslandsSpec).items() if name != "count"}
    wanted: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"islands={part} is no field with a value; write it like every=64,bits=4")
        require_known(name, types, "islands")
        wanted[name] = parse_text(value, types[name], f"islands.{name}")
    weights = parse_weights(str(wanted.get("batch_weights", "1x2")), "islands.batch_weights")
    decode(IslandsSpec, {"count": max(2, len(weights)), **wanted}, "islands")
    return wanted


def plan_islands(groups: Groups, ask: Ask, global_batch: int, wanted: Mapping[str, Any]) -> IslandsPlan:
    """`global_batch`: sequences in a step of all islands together. `wanted`: fields of [islands] the user decides."""
    with meanwhile(partial(_others, groups, ask, global_batch)) as others:
        best = _planned(groups, fastest_islands(groups, ask, global_batch, wanted))
        return _compared(best, *others(), global_batch)


def islands_alone(groups: Groups, ask: Ask, global_batch: int) -> IslandsPlan:
    """Without what else could be done, which takes as long again."""
    return _planned(groups, fastest_islands(groups, ask, global_batch, {}))


def fastest_islands(groups: Groups, ask: Ask, global_batch: int, wanted: Mapping[str, Any]) -> Candidate:
    """The best number of the fastest groups, with equal batches or with batches by their speeds."""
    seconds = _step_seconds(groups, ask, global_batch)
    by_speed = sorted((group for group in groups.groups if group.name in seconds), key=lambda each: seconds[each.name])
    ways: list[tuple[float, tuple[Group, ...], tuple[int, ...]]] = []
    for count in _counts(by_speed):
        members = tuple(group for group in groups.groups if group in by_speed[:count])
        for weights in _weights(global_batch, [1 / seconds[group.name] for group in members], wanted):
            slowest = _slowest(members, weights, seconds)
            ways.append((_most(*slowest, sum(weights), ask, global_batch), members, weights))
    if not ways and len(by_speed) > 1:
        raise UserError(
            f"islands.batch_weights={wanted['batch_weights']} has not 2 to {len(by_speed)} weights, for as many of the "
            f"groups of {groups.name} as fit the model; use one for each island"
        )
    refused: UserError | None = None
    known: dict[int, Candidate] = {}
    plans: dict[tuple[ClusterSpec, int], Plan] = {}
    # The likely fastest first: what cannot be chosen is not planned.
    for place in sorted(range(len(ways)), key=lambda place: -ways[place][0]):
        most, members, weights = ways[place]
        uneven = max(weights) > min(weights)
        if not _may_be_chosen(place, most, uneven, known):
            continue
        try:
            part = share(global_batch, sum(weights))
            group, weight = _slowest(members, weights, seconds)
            plan = _plan_of(group, weight * part, ask, plans)
            most = part * sum(weights) * plan.question.sequence / plan.seconds
            if _may_be_chosen(place, most, uneven, known):
                known[place] = _candidate(groups, members, ask, global_batch, weights, wanted, plans)
        except UserError as reason:
            refused = refused or reason
    best: Candidate | None = None
    for _, found in sorted(known.items(), key=lambda each: each[0]):
        if best is None or found.tokens_per_second > _worth(best, found) * best.tokens_per_second:
            best = found
    if best is None:
        raise refused or UserError(
            f"{groups.name} has one group that is planned whole{_why_not(groups, seconds, ask, global_batch)}; name "
            f"it, as in {groups.name}.toml:{by_speed[0].name}, or have parts chosen by --objective cost and --tokens"
        )
    return best


def _why_not(groups: Groups, planned: Mapping[str, float], ask: Ask, global_batch: int) -> str:
    """What the first of the others says."""
    other = next(group for group in groups.groups if group.name not in planned)
    try:
        fastest(ask(other.cluster, share(global_batch, len(groups.groups))))
    except UserError as reason:
        return f" (of {other.name}: {str(reason).partition(';')[0]})"
    return ""


def _slowest(members: Sequence[Group], weights: Sequence[int], seconds: Mapping[str, float]) -> tuple[Group, int]:
    return max(zip(members, weights, strict=True), key=lambda each: each[1] * seconds[each[0].name])


def _most(slowest: Group, weight: int, parts: int, ask: Ask, global_batch: int) -> float:
    """Tokens a second of islands, which take as many steps as the slowest one, if nothing else took time."""
    part = share(global_batch, parts)
    try:
        question = ask(slowest.cluster, weight * part)
    except UserError:
        return 0.0
    best = resized_search(question)
    return parts * part * question.sequence * SIMULATED / best[0] if best else 0.0


def _may_be_chosen(place: int, most: float, uneven: bool, known: Mapping[int, Candidate]) -> bool:
    """Whether a way with so many tokens a second at most can be: `_worth` says what it must be better than, and a later
    way that is better by `MORE` is chosen in place of any before it."""
    return all(
        most > found.tokens_per_second * (MORE if uneven else 1)
        if before < place
        else most * MORE >= found.tokens_per_second
        for before, found in known.items()
    )


def _worth(best: Candidate, found: Candidate) -> float:
    """How many times as fast it must be. Each island more learns a little less, and unequal ones are more to keep."""
    alike = len(found.plans) == len(best.plans) and not found.spec.batch_weights
    return 1.0 if alike else MORE


def _weights(global_batch: int, speeds: Sequence[float], wanted: Mapping[str, Any]) -> list[tuple[int, ...]]:
    if "batch_weights" in wanted:
        given = parse_weights(str(wanted["batch_weights"]), "islands.batch_weights")
        return [given] if len(given) == len(speeds) else []
    equal, uneven = (1,) * len(speeds), weights_by_speed(global_batch, speeds)
    return [equal] if max(uneven) == min(uneven) else [equal, uneven]


def _counts(by_speed: Sequence[Group]) -> list[int]:
    """How many of the fastest groups are tried: of many, all that are alike or none of them."""
    every = range(2, len(by_speed) + 1)
    if len(by_speed) <= FEW:
        return list(every)
    kinds = [group.cluster.accelerator for group in by_speed]
    return [count for count in every if count == len(by_speed) or kinds[count] != kinds[count - 1]]


def _step_seconds(groups: Groups, ask: Ask, global_batch: int) -> dict[str, float]:
    """Of groups that fit the model, with equal batches."""
    found: dict[str, float] = {}
    refused: UserError | None = None
    known: dict[ClusterSpec, float] = {}
    for group in groups.groups:
        like = replace(group.cluster, name="")
        if like not in known:
            try:
                question = ask(group.cluster, share(global_batch, len(groups.groups)))
            except UserError as reason:
                refused = reason
                continue
            scores = search(question, group.cluster.accelerators, keep=1)
            known[like] = float(scores.seconds[0]) if len(scores.space) else float("inf")
        if known[like] < float("inf"):
            found[group.name] = known[like]
    if not found:
        if refused is not None:
            raise refused
        first = groups.groups[0]
        fastest(ask(first.cluster, global_batch))  # says what does not fit
    return found


@dataclass(frozen=True)
class Candidate:
    """Islands before their bytes are counted one by one."""

    paths: Paths
    plans: tuple[Plan, ...]
    spec: IslandsSpec
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(plan.question.global_batch * plan.question.sequence for plan in self.plans) / self.step_seconds


def _candidate(
    groups: Groups,
    members: tuple[Group, ...],
    ask: Ask,
    global_batch: int,
    weights: tuple[int, ...],
    wanted: Mapping[str, Any],
    plans: dict[tuple[ClusterSpec, int], Plan],
) -> Candidate:
    part = share(global_batch, sum(weights))
    chosen = [_plan_of(group, weight * part, ask, plans) for group, weight in zip(members, weights, strict=True)]
    paths = Paths(groups, members)
    uneven = {"batch_weights": format_weights(weights)} if max(weights) > min(weights) else {}
    return Candidate(paths, tuple(chosen), *mildest(paths, chosen, {**wanted, **uneven}))


def _plan_of(group: Group, batch: int, ask: Ask, known: dict[tuple[ClusterSpec, int], Plan]) -> Plan:
    """Groups that are alike have one layout."""
    key = replace(group.cluster, name=""), batch
    if key not in known:
        known[key] = fastest(ask(group.cluster, batch))
    return replace(known[key], question=ask(group.cluster, batch))


def _planned(groups: Groups, found: Candidate) -> IslandsPlan:
    paths, spec = found.paths, found.spec
    chosen = tuple(with_reasons(plan) for plan in found.plans)
    times = tuple(island_times(plan, spec) for plan in chosen)
    runs = {str(plan.layout): replace(plan.run_with({}), islands=spec) for plan in chosen}
    layouts = [str(plan.layout) for plan in chosen]
    block_bytes = next(spec.block_bytes(run.training.weights) for run in runs.values())
    transfers, sent = [], [0] * len(chosen)
    for fragment in range(spec.fragments):
        homes = {layout: homes_of(run, fragment) for layout, run in runs.items()}
        pairs = {
            (own, other): sent_between(homes[own], homes[other], block_bytes)
            for own, other in combinations_with_replacement(runs, 2)
        }
        pairs |= {(other, own): each for (own, other), each in pairs.items()}
        between = [[pairs[own, other] for other in layouts] for own in layouts]
        transfers.append(paths.seconds(between))
        for number, row in enumerate(between):
            sent[number] += sum(each.bytes for place, each in enumerate(row) if place != number)
    prediction = endless(spec, times, transfers, paths.decide)
    seconds = mean_seconds(times, prediction)
    return IslandsPlan(
        groups=groups,
        names=tuple(group.name for group in paths.members),
        plans=chosen,
        spec=spec,
        times=times,
        transfers=tuple(transfers),
        decide=paths.decide,
        sent=tuple(sent),
        computing=max(each.step for each in times) / seconds,
        hidden=_hidden(prediction.timeline, spec),
        step_seconds=seconds,
        loss=expected_loss(chosen[0].question.model.active_parameters, len(chosen), spec.every),
    )


def _hidden(timeline: Timeline, spec: IslandsSpec) -> float:
    """Fast islands wait for slow ones however fast the link: so only what all of them wait counts."""
    found = []
    for each in timeline.rounds:
        whole = each.done - max(each.arrived)
        if spec.every < each.due <= 8 * spec.every:
            found.append(1 - min(min(each.waited), whole) / whole if whole > 0 else 1.0)
    return sum(found) / len(found)


# Without islands.


def _others(
    groups: Groups, ask: Ask, global_batch: int
) -> tuple[Alternative | UserError, Alternative | UserError, Alternative | None]:
    """The fastest group alone, one job of equal parts, one of unequal parts."""
    first = fastest_alone(groups, ask, global_batch)
    alone = without_islands(first.name, ask, first.cluster, global_batch)
    together = without_islands("one job", ask, as_one_job(groups), global_batch)
    return alone, together, unequal_job(groups, ask, global_batch)


def _compared(
    best: IslandsPlan,
    alone: Alternative | UserError,
    together: Alternative | UserError,
    unequal: Alternative | None,
    global_batch: int,
) -> IslandsPlan:
    """With what else could be done with the same groups."""
    notes = []
    batch = sum(plan.question.global_batch for plan in best.plans)
    if batch != global_batch:
        notes.append(
            f"{len(best.plans)} islands take {batch} sequences in a step, not {global_batch}, which does not divide"
        )
    left = [group.name for group in best.groups.groups if group.name not in best.names]
    if left:
        notes.append(f"without {' and '.join(left)}: with it the others are less than {MORE - 1:.0%} faster")
    if isinstance(alone, Alternative) and alone.tokens_per_second >= best.tokens_per_second:
        notes.append(f"{alone.name} alone is as fast: plan for {best.groups.name}.toml:{alone.name}")
    for other in (together, unequal):
        if isinstance(other, Alternative) and other.tokens_per_second >= best.tokens_per_second:
            notes.append(f"{other.name} over the links is as fast, and learns as one: plan it with --one-job")
    if best.computing < COMPUTING:
        notes.append(f"the links are too slow for islands to compute {COMPUTING:.0%} of the time")
    for number, held in enumerate(best.host_bytes):
        room = best.plans[number].question.cluster.host_memory_gib
        if room and held > room * 2**30:
            notes.append(
                f"{best.names[number]} needs {held / 2**30:.1f} GiB of CPU memory a node for outer weights and has "
                f"{room:g}"
            )
    one = together if isinstance(together, Alternative) else None
    return replace(
        best,
        alone=alone if isinstance(alone, Alternative) else None,
        one_job=one,
        unequal=unequal,
        one_job_refused="" if one else str(together),
        notes=tuple(notes),
    )
