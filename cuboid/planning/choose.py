"""From a question to plans: search in closed form, simulate the finalists, say why the first one is first."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.compute import model_flops_per_token
from cuboid.cost.estimate import doubt
from cuboid.cost.inputs import Shape
from cuboid.errors import UserError
from cuboid.planning.no_plan import explain_nothing
from cuboid.planning.own_models import own_plan, own_plans, own_stage_seconds
from cuboid.planning.plan import GIB, Plan, make_plan, reasons, with_notes
from cuboid.planning.question import MEMORY_FRACTION, Question, every_size, resized, rounder_sizes, sizes
from cuboid.planning.refine import (
    Refined,
    StageSeconds,
    Table,
    actions,
    fitted,
    fullest,
    may_mix,
    memory_table,
    refine,
    stage_seconds,
)
from cuboid.planning.score import Scores, least_seconds, score
from cuboid.planning.search import Shapes, search, shapes_within
from cuboid.planning.space import DEGREES, Space, shapes
from cuboid.planning.traffic import bound, moved
from cuboid.spec.fitting import check
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import PythonModelSpec

SCORED = 32
"""Best different layouts in closed form, from which finalists are taken."""
FINALISTS = 8
SLOWER = 1.5
"""How many times the fastest step one may take that is chosen for its memory."""
NOT_FASTER = 0.9
"""Least fraction of one accelerator's time for the whole batch that many take together."""
BUDGET = 40_000
"""Actions of schedules simulated in all: what keeps an answer within a second."""
SMALLER = 10
"""Parts of a cluster whose costs are compared first."""
FURTHER = 1.1
"""Parts of a cluster up to so many times as large as the smallest are asked together whether they are fast enough."""
TRIED = 6
"""Shapes of each part of a cluster that are looked at first."""
SIMULATED = 1.05
"""The simulation of what is best in closed form may be faster or slower by a few percent."""
FASTER = 1.1
"""… and of few micro-batches on unequal stages faster by up to so much: none is missed that is just in time."""


def plans(question: Question, *, top: int = 5, objective: str = "time") -> list[Plan]:
    """The best plan for the whole cluster, with reasons, and others, best first: the best of each other strategy, and
    where these are few those that come next."""
    if isinstance(question.model, PythonModelSpec):
        return own_plans(question, top, objective)
    return _completed(question, _ranked(question, top, objective), top, objective)


def fastest(question: Question) -> Plan:
    """The best plan for the whole cluster, without reasons and advice."""
    own = isinstance(question.model, PythonModelSpec)
    return own_plans(question, 1, "time")[0] if own else _ranked(question, 1, "time").plans[0]


def resized_search(question: Question) -> tuple[float, str] | None:
    """Seconds and layout of the best for the whole cluster in closed form; None where none fits."""
    if isinstance(question.model, PythonModelSpec):
        own = own_plans(question, 1, "time")
        return (own[0].seconds, str(own[0].layout)) if own else None
    scores = search(question, question.cluster.accelerators, keep=1)
    return (float(scores.seconds[0]), str(scores.space.layout(0))) if len(scores.space) else None


def each_size(question: Question, sizes: Sequence[int]) -> Iterator[tuple[int, float, str]]:
    """The same of some parts of a cluster that have any, each with its number of accelerators: parts that differ in
    nothing else are searched together."""
    if isinstance(question.model, PythonModelSpec):
        for size in sizes:
            if best := resized_search(resized(question, size)):
                yield size, *best
        return
    for part, alike in _alike(replace(question, priced=True), sizes):
        known = shapes_within(part, alike)
        tried = search(part, _first_of_each(known), keep=len(alike), distinct="size")
        reached = dict(zip(tried.space.world_size.tolist(), tried.seconds.tolist(), strict=True))
        paces = {size: seconds / size for size, seconds in sorted(reached.items())}
        for size in alike:
            if size not in paces:
                alone = search(part, known.take(known.sizes == size), keep=1)
                if len(alone.space):
                    yield size, float(alone.seconds[0]) / size, str(alone.space.layout(0))
        if paces:  # one bound for all: no slower than what was tried
            paced = replace(part, priced=False, paces=tuple(paces.items()))
            found = search(paced, _paced(known, paces), keep=len(paces), distinct="size", slowest=1 + 1e-8)
            for place, size in enumerate(found.space.world_size.tolist()):
                yield size, float(found.seconds[place]) * paces[size], str(found.space.layout(place))


def large_enough(question: Question, sizes: Sequence[int], seconds: float) -> list[int]:
    """Of some parts of a cluster those that may take a step in so many seconds."""
    if isinstance(question.model, PythonModelSpec):
        return list(sizes)
    work = NOT_FASTER * _work(question)
    return [size for size in sizes if work / size <= seconds]


def _paced(known: Shapes, paces: dict[int, float]) -> Shapes:
    """Shapes of some sizes, with bounds of the time of all accelerators, as fractions of these times."""
    some = known.take(np.isin(known.sizes, list(paces)))
    whole = np.array([size * paces.get(size, 1.0) for size in known.every.world_size.tolist()])
    return replace(some, bound=known.bound / whole)


def _first_of_each(known: Shapes) -> Shapes:
    """The shapes of each size that are likely to be good."""
    seen: Counter[int] = Counter()
    chosen = np.zeros(len(known.order), dtype=bool)
    for place, size in enumerate(known.sizes.tolist()):
        seen[size] += 1
        chosen[place] = seen[size] <= TRIED
    return known.take(chosen)


def with_reasons(plan: Plan) -> Plan:
    """One without them, with reasons and warnings."""
    return with_notes(plan, reasons(plan), warnings(plan), [])


@dataclass(frozen=True)
class Ranked:
    """Plans, best first, and the layouts in closed form that they were simulated from."""

    scores: Scores
    plans: list[Plan]


def _order(plan: Plan, objective: str) -> tuple[float, float]:
    return (plan.peak, plan.seconds) if objective == "memory" else (plan.seconds, plan.peak)


def _ranked(question: Question, top: int, objective: str) -> Ranked:
    world_size = question.cluster.accelerators
    keep = max(SCORED, 4 * top)
    scores = search(question, world_size, keep=keep, distinct=True)
    if objective == "memory" and len(scores.space):
        slowest = SLOWER * float(scores.seconds[0])
        scores = search(question, world_size, keep=keep, objective=objective, distinct=True, slowest=slowest)
    if not len(scores.space):
        raise explain_nothing(question)
    found = [planned(question, entry) for entry in finalists(question, scores, top, objective)]
    if not found:
        raise explain_nothing(question)
    return Ranked(scores, sorted(found, key=lambda plan: _order(plan, objective)))


def _completed(question: Question, ranked: Ranked, top: int, objective: str, advised: bool = True) -> list[Plan]:
    """With those that do without a dimension, reasons, warnings and, unless there is none to give, advice."""

    def order(plan: Plan) -> tuple[float, float]:
        return _order(plan, objective)

    first, *others = ranked.plans
    without = _without(question, ranked.scores, first) if objective == "time" else ()
    others += [plan for plan in without if all(plan.layout != other.layout for other in others)]
    others += _of_others(question, ranked.scores, [first, *others], top, objective)
    others = _of_each(first, sorted((plan for plan in others if order(plan) >= order(first)), key=order))
    others = sorted(others[: max(top - 1, 2)], key=order)
    notes = [*warnings(first), *(idle_advice(first) if advised and objective == "time" else [])]
    return [with_notes(first, reasons(first), notes, others), *others[: top - 1]]


def _strategy(layout: Layout) -> tuple[bool, ...]:
    """What layouts have in common that a person takes for one: which dimensions they use, and whether replicas split
    the parameters."""
    return (layout.tp > 1, layout.pp > 1, layout.ep > 1, layout.zero == 3)


def _with_context(layout: Layout) -> tuple[bool, ...]:
    return (*_strategy(layout), layout.cp > 1)


def _of_each(first: Plan, others: list[Plan]) -> list[Plan]:
    """The best of each strategy but that of the first, then the best with context parallelism or without, then the
    rest."""
    chosen: list[Plan] = []
    for kind in (_strategy, _with_context, str):
        seen = {kind(plan.layout) for plan in (first, *chosen)}
        for plan in others:
            if kind(plan.layout) not in seen:
                chosen.append(plan)
                seen.add(kind(plan.layout))
    return chosen


def _of_others(question: Question, scores: Scores, known: list[Plan], top: int, objective: str) -> Iterator[Plan]:
    """The best of strategies that are not among some plans, as far as they are quickly simulated."""
    seen = {_strategy(plan.layout) for plan in known}
    for index in range(len(scores.space)):
        layout = scores.space.layout(index)
        if len(seen) < top and _strategy(layout) not in seen and actions(layout, question.global_batch) <= BUDGET:
            seen.add(_strategy(layout))
            for entry in finalists(question, scores.take(np.array([index])), 1, objective):
                yield planned(question, entry)


def _without(question: Question, scores: Scores, best: Plan) -> Iterator[Plan]:
    """The best plans that do without the pipeline or the tensor parallelism of another. `scores`: some that are known;
    none without is slower than the first of these without."""
    fixed, alike = question.fixed, scores.space.columns["recompute_layers"] == 0
    for name in ("pp", "tp"):
        if getattr(best.layout, name) == 1 or fixed.keys() & {name, "schedule", "vpp", "sequence_parallel"}:
            continue
        other = replace(question, fixed={**fixed, name: 1})
        known = np.flatnonzero(scores.space.columns[name] == 1)
        if len(known) and alike[known[0]] and scores.seconds[known[0]] <= 2 * best.seconds:
            found = scores.take(known[:1])  # the best of all that do without
        else:
            reached = scores.seconds[known[alike[known]]][:1] * (1 + 1e-8)
            slowest = min([2 * best.seconds, *reached.tolist()])
            found = search(other, question.cluster.accelerators, keep=1, slowest=slowest, mixes=False)
        if len(found.space):
            memory = memory_table(other, found.space.layout(0))
            if fullest(memory) <= question.limit:
                yield planned(question, *refine(other, [(found, 0, memory)]))


def idle_advice(plan: Plan) -> list[str]:
    """A sentence where a part of the cluster is faster than all of it, as where the batch does not divide over all."""
    best = fastest_part(plan)
    if best is None:
        return []
    used, whole = best.layout.world_size, plan.layout.world_size
    return [
        f"{used} of the {whole} accelerators are faster: {best.layout} takes {best.seconds:.4g} s a step instead of "
        f"{plan.seconds:.4g}; leave {whole - used} idle, or use a global batch that divides over them"
    ]


def fastest_part(plan: Plan) -> Plan | None:
    """The plan of a smaller part of the cluster that is faster, where there is one."""
    question, best = plan.question, None
    if {"dp", "tp", "pp"} <= question.fixed.keys():
        return None
    work = NOT_FASTER * _work(question)
    candidates = rounder_sizes(question.cluster, question.global_batch)
    slowest = SIMULATED * plan.seconds
    candidates = candidates[:20] if plan.layout.world_size <= 1024 else candidates[:1]
    candidates = [each for each in candidates if work / each <= plan.seconds]
    for size, scores in _soonest(question, candidates, slowest):
        smaller = resized(question, size)
        for entry in finalists(smaller, scores, 1):
            soon = min(0.99 * plan.seconds, best.seconds if best else float("inf"))
            if entry.seconds < soon and (part := planned(smaller, entry)).seconds < soon:
                best = part
    return best


def _soonest(question: Question, sizes: list[int], slowest: float) -> list[tuple[int, Scores]]:
    """The two of some parts of a cluster whose best layouts take least, in closed form, with these layouts: simulation
    may bring the one before the other."""
    found: list[tuple[float, int, Scores]] = []
    for part, some in _alike(question, sizes):
        scores = search(part, some, keep=SCORED // 2, distinct=True, slowest=slowest)
        for size in dict.fromkeys(scores.space.world_size.tolist()):  # best first
            of_size = scores.take(np.flatnonzero(scores.space.world_size == size))
            found.append((float(of_size.seconds[0]), int(size), of_size))
    return [(size, scores) for _, size, scores in sorted(found, key=lambda each: each[:2])[:2]]


def _alike(question: Question, sizes: Sequence[int]) -> list[tuple[Question, list[int]]]:
    """Parts of a cluster that differ in nothing but how many accelerators they have, so that one search compares their
    layouts: all but those within a node."""
    found: list[tuple[Question, list[int]]] = []
    for size in sizes:
        part = resized(question, size)
        for other, alike in found:
            if (other.machine, other.host_limit) == (part.machine, part.host_limit):
                alike.append(size)
                break
        else:
            found.append((part, [size]))
    return sorted(found, key=lambda group: -len(group[1]))


def _best_size(
    parts: Sequence[tuple[Question, Sequence[int] | Shapes]], slowest: float = float("inf")
) -> tuple[float, int] | None:
    """The fewest seconds of all layouts of some parts of a cluster, and how many ranks they take."""
    best: tuple[float, int] | None = None
    for part, among in parts:
        wanted = best[0] * (1 + 1e-8) if best else float("inf")
        scores = search(part, among, keep=1, slowest=slowest, wanted=wanted)
        if len(scores.space):
            found = float(scores.seconds[0]), int(scores.space.world_size[0])
            best = min(best, found) if best else found
    return best


def finalists(question: Question, scores: Scores, top: int, objective: str = "time") -> list[Refined]:
    """Different layouts, simulated; those that turn out too full recompute more, or are replaced by the next."""
    found: list[tuple[Scores, int, Table]] = []
    spent = 0
    for index in _different(scores):
        layout = scores.space.layout(index)
        cost = actions(layout, question.global_batch)
        if len(found) >= top and (len(found) >= max(FINALISTS, top + 3) or spent + cost > BUDGET):
            break
        spent += cost
        chosen, memory = layout, memory_table(question, layout)
        if may_mix(question, objective):
            chosen, memory = fitted(question, layout, memory)
        if fullest(memory) > question.limit:  # known sooner than its time
            continue
        known = (scores, index) if chosen == layout else (score(question, Space.of([chosen], question)), 0)
        found.append((*known, memory))
    return refine(question, found)


def _different(scores: Scores) -> Iterator[int]:
    """Positions, best first, but no more than three schedules for the same ranks and micro-batch before all others."""
    seen: Counter[tuple[int, ...]] = Counter()
    later = []
    degrees = np.stack([scores.space.columns[name] for name in DEGREES], axis=1)
    for index, row in enumerate(degrees.tolist()):
        seen[tuple(row)] += 1
        if seen[tuple(row)] > 3:
            later.append(index)
        else:
            yield index
    yield from later


def predict(question: Question, layout: Layout) -> Plan:
    """The plan of one given layout, whether or not it fits."""
    if layout.batch_weights or (layout.shard_weights and isinstance(question.model, PythonModelSpec)):
        return _predict_unequal(question, layout)
    if isinstance(question.model, PythonModelSpec):
        return own_plan(question, layout)
    check(layout, question.model, global_batch=question.global_batch, sequence=question.sequence)
    scores = score(question, Space.of([layout], question))
    (refined,) = refine(question, [(scores, 0, memory_table(question, layout))])
    found = planned(question, replace(refined, layout=layout))  # scores know nothing of weights
    return with_notes(found, reasons(found), warnings(found), [])


def _predict_unequal(question: Question, layout: Layout) -> Plan:
    """On ranks that are all alike everybody waits for the replica with the largest part of the batch. Of models of
    one's own shards are taken to be equal."""
    check(layout, question.model, global_batch=question.global_batch, sequence=question.sequence)
    alike, batch = layout.as_replica(layout.busiest_replica, question.global_batch)
    if isinstance(question.model, PythonModelSpec):
        alike = alike.changed(shard_weights=())
    found = predict(replace(question, global_batch=batch), alike)
    utilization = found.utilization * question.global_batch / batch
    found = replace(found, question=question, layout=layout, utilization=utilization)
    return with_notes(found, reasons(found), warnings(found), [])


def pipeline_seconds(question: Question, layout: Layout) -> StageSeconds:
    """Seconds of every stage for one micro-batch, of the first replica."""
    layout, batch = layout.as_replica(0, question.global_batch)
    question = replace(question, global_batch=batch)
    own = isinstance(question.model, PythonModelSpec)
    return own_stage_seconds(question, layout) if own else stage_seconds(question, layout)


def planned(question: Question, refined: Refined) -> Plan:
    """A finalist as a plan. Where the closed forms of the cost model say less than the links alone need for what the
    engine will send, by its own count, the links are right."""
    per_token = float(model_flops_per_token(Shape.of(question.model), np.array(question.sequence)))
    plan = make_plan(question, refined, 0.0)
    if question.profile.own_collectives and not question.untrainable(plan.layout):
        missing = max(bound(moved(plan)) - plan.seconds, 0.0)
        plan = replace(plan, parts={**plan.parts, "data": plan.parts["data"] + missing})
    peak = question.machine.chip.peak["float32" if question.precision == "float32" else "bf16"]
    return replace(plan, utilization=plan.tokens * per_token / peak)


def warnings(plan: Plan) -> list[str]:
    """What the user should know before believing or starting the plan."""
    question = plan.question
    found = [doubt(question.cluster.accelerator, question.cost_precision, plan.utilization, question.precision)]
    if plan.memory_fraction > 1:
        more = plan.peak / GIB - question.cluster.memory_gib
        found.append(
            f"the fullest rank would hold {plan.memory_fraction:.0%} of its memory, {more:.1f} GiB too many: this plan "
            "does not fit"
        )
    elif plan.memory_fraction > MEMORY_FRACTION:
        found.append(
            f"the fullest rank holds {plan.memory_fraction:.0%} of its memory; above 95 % fragmentation may end the run"
        )
    if plan.host_memory > question.host_limit:
        found.append(
            f"offload=true needs {plan.host_memory / GIB:.1f} GiB of host memory a rank, and "
            f"host_memory_gib={question.cluster.host_memory_gib:g} of {question.cluster.accelerators_per_node} ranks "
            "is too little: this plan does not fit"
        )
    untrainable = question.untrainable(plan.layout)
    if untrainable:
        found.append(f"Cuboid's engine cannot train this plan yet: {untrainable}")
    elif reason := question.lacks_fp8(plan.layout):
        found.append(f"Cuboid's engine trains this plan in bf16, not in fp8: {reason}")
    return [sentence for sentence in found if sentence]


def cheapest(question: Question, *, top: int = 5) -> list[Plan]:
    """The plans that take the least accelerator time per token, on any part of the cluster."""
    parts = _alike(replace(question, priced=True), sizes(question.cluster))
    # What costs least is seldom large: once that is known, few layouts of the larger parts are looked at.
    parts = [(part, half) for part, some in parts for half in (some[:SMALLER], some[SMALLER:]) if half]
    best = _best_size(parts)
    if best is None:
        raise explain_nothing(question)
    return plans(resized(question, best[1]), top=top)


def _work(question: Question) -> float:
    """Seconds of a step on one accelerator with all the memory in the world: nearly as much as many take together."""
    alone = resized(replace(question, memory_limit=float("inf"), fixed={}), 1)
    return float(least_seconds(alone, shapes(alone, 1), context=False).min())


def _within(question: Question, sizes: list[int], slowest: float) -> Iterator[tuple[int, Shapes]]:
    """The parts of a cluster that have a layout within so many seconds, in closed form, smallest first, and the shapes
    of which it may be."""
    while sizes:
        # Some at a time: nearly always all but the last few take too long, which one search says of all of them.
        some = [size for size in sizes if size <= FURTHER * sizes[0]]
        for part, alike in sorted(_alike(question, some), key=lambda group: group[1]):
            known = shapes_within(part, alike, slowest)
            while (found := _smallest(part, known, slowest)) is not None:
                yield found, known.take(known.sizes == found)
                known = known.take(known.sizes > found)
        sizes = sizes[len(some) :]


def _smallest(question: Question, among: Shapes, slowest: float) -> int | None:
    """The fewest ranks of a layout within so many seconds."""
    found, sizes = None, sorted(set(among.sizes.tolist()))
    while sizes:
        some = sizes if found is None else sizes[: (len(sizes) + 1) // 2]
        known = among.take((among.sizes >= some[0]) & (among.sizes <= some[-1]))
        scores = search(question, known, keep=1, slowest=slowest, any_will_do=True)
        if len(scores.space):
            found = int(scores.space.world_size[0])
            sizes = [size for size in some if size < found]
        else:
            sizes = sizes[len(some) :]
    return found


def fewest(question: Question, *, tokens: float, days: float, top: int = 5) -> list[Plan]:
    """The plans for the least accelerators that train so many tokens in so many days."""
    steps = tokens / (question.global_batch * question.sequence)
    seconds = days * 86400 / steps
    enough = large_enough(question, every_size(question.cluster), seconds)
    for accelerators, among in _within(question, enough, FASTER * seconds):
        smaller = resized(question, accelerators)
        # Those that may be fast enough are fewer than those an answer is made of.
        scores = search(smaller, among, keep=max(SCORED, 4 * top), distinct=True, slowest=FASTER * seconds)
        soon = [entry for entry in finalists(smaller, scores, top) if entry.seconds <= seconds]
        if any(planned(smaller, entry).seconds <= seconds for entry in soon):
            ranked = _ranked(smaller, top, "time")
            if ranked.plans[0].seconds <= seconds:
                return _completed(smaller, ranked, top, "time", advised=False)  # no smaller part is fast enough
    parts = _alike(question, sizes(question.cluster))
    quickest = _best_size(parts)
    if quickest is None:
        raise explain_nothing(question)
    best = _ranked(resized(question, quickest[1]), 1, "time").plans[0]
    raise UserError(
        f"days={days:g} is too short for tokens={tokens:.4g} on {question.cluster.name}; "
        f"use days={1.001 * steps * best.seconds / 86400:.4g} or more accelerators"
    )
