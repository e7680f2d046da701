"""The best layouts of a space: every layout is looked at, or proved to be worse than those returned.

Shapes (how ranks and batch are divided) come in the order of the seconds that none of their layouts undercuts, some at
a time, until no shape left can be among the best. Of these, first all layouts with the schedule that needs the least
memory. What does not fit even so is out, whatever its schedule; what would be too slow even without any bubble and with
perfectly even stages is out too. The rest is tried with every schedule, and with no more layers recomputed than its
memory asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.inputs import Array, Shape, of_size
from cuboid.cost.memory import first_memory
from cuboid.cost.sharding import host_bytes
from cuboid.planning.export.engines import sayable
from cuboid.planning.question import Question
from cuboid.planning.refine import LEAST_LEFT, PLACES, least_kind, lighter, may_mix, mixable, mixed, promising
from cuboid.planning.score import (
    CHUNK,
    Distinct,
    Least,
    Scores,
    chunks,
    concatenated,
    least_fitting,
    least_in_layers,
    least_memory,
    least_scheduled,
    least_seconds,
    least_with_sums,
    likely_seconds,
    memory_of,
    score,
    score_all,
)
from cuboid.planning.space import (
    DEGREES,
    PLAIN,
    Space,
    context_ways,
    each_pair,
    scheduled,
    schedules,
    shapes,
    with_context,
    with_recompute,
    with_states,
    with_zero,
)
from cuboid.spec.layout import RECOMPUTE, Layout

EMPTY = 1_000
"""Shapes whose memory is looked at together."""
LIKELY = 64
"""Layouts of which one is likely to hold nearly as little as any."""
GUESSED = 10_000
"""Shapes that are brought into the order of what they are likely to take."""
FIRST, FEWER, AT_ONCE = 4_000, 1_000, 250_000
"""Layouts looked at before anything is known of what is good, where many are kept and where but the best is, and
together at most."""
KINDS = 12
"""Of recomputation and ZeRO together."""
BOUNDED = 3_000_000
"""Layouts whose bounds are compared together with what is known to be good: few of them are looked at."""


@dataclass(frozen=True)
class Shapes:
    """Ways to divide ranks and batch that may be within memory and time, and what is known of them before any layout is
    looked at."""

    every: Space
    bound: Array
    """Seconds that no layout of each undercuts."""
    order: NDArray[np.intp]
    """Those that are asked for, the likely best first."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Ranks of each of those."""
        return self.every.world_size[self.order]

    def take(self, which: NDArray[np.bool_]) -> "Shapes":
        """Some of those."""
        return replace(self, order=self.order[which])


def shapes_within(
    question: Question, sizes: Sequence[int], slowest: float = float("inf"), guess: bool = True
) -> Shapes:
    """The shapes of some numbers of ranks of which a step may take no longer than `slowest`. `guess`: the likely best
    first."""
    found = [_bounded(question, part, slowest) for some in _together(question, sizes) for part in chunks(some)]
    every = found[0][0].concatenated(*(some for some, _ in found[1:]))
    bound = np.concatenate([least for _, least in found])
    order = np.argsort(bound, kind="stable")
    if not len(order) or not guess:
        return Shapes(every, bound, order)
    # The sooner a good layout is known, the fewer are looked at.
    likely = likely_seconds(question, every.take(order[:GUESSED]))
    order = np.concatenate([order[np.argsort(likely, kind="stable")], order[GUESSED:]])
    return Shapes(every, bound, order)


def _together(question: Question, sizes: Sequence[int]) -> Iterator[Space]:
    """All shapes of some numbers of ranks, as many at a time as are worth asking together."""
    some: list[Space] = []
    for size in sizes:
        some.append(shapes(question, size))
        if size == sizes[-1] or sum(map(len, some)) > CHUNK // 2:
            yield some[0].concatenated(*some[1:]) if len(some) > 1 else some[0]
            some = []


def _bounded(question: Question, space: Space, slowest: float) -> tuple[Space, Array]:
    """The shapes that may be within memory and time, and the seconds that no layout of each undercuts."""
    least = least_seconds(question, space, context=False)
    soon = np.flatnonzero(least <= slowest)
    space, least = (space, least) if len(soon) == len(space) else (space.take(soon), least[soon])
    memory, least = least_fitting(question, space, least)
    soon = np.flatnonzero((memory <= question.limit) & (least <= slowest))
    return space.take(soon), least[soon]


def search(
    question: Question,
    among: int | Sequence[int] | Shapes,
    *,
    keep: int,
    objective: str = "time",
    distinct: Distinct = False,
    slowest: float = float("inf"),
    wanted: float = float("inf"),
    mixes: bool = True,
    any_will_do: bool = False,
) -> Scores:
    """The `keep` best layouts that fit, best first; none when none fits.

    `among`: a number of ranks or several, or their shapes where they are known. `distinct`: as `Distinct` says.
    `slowest`: seconds that a step may take. `wanted`: seconds beyond which nobody asks what is best. `mixes`: also
    layouts that recompute some layers more than others. `any_will_do`: not the best, but as many that fit and are no
    slower."""
    mixes = mixes and may_mix(question, objective)
    limit, guess = min(slowest, wanted), not np.isfinite(wanted)
    sizes = [among] if isinstance(among, int) else among
    among = sizes if isinstance(sizes, Shapes) else shapes_within(question, sizes, limit, guess)
    every, bound = among.every, among.bound
    order = among.order[bound[among.order] <= limit]
    numbers = _sizes(question, every)
    best = score(question, every.take(order[:0]))
    batch, many = 0, keep > 1 or len(order) > GUESSED
    guess = guess and not (any_will_do and len(order) <= FEWER)  # few are looked at together
    while len(order):
        few = (guess and batch <= int(many and slowest == float("inf"))) or not np.isfinite(limit)
        room = min((FIRST if keep > 1 else FEWER) * 8**batch, AT_ONCE) if few else BOUNDED
        stop = max(int(np.searchsorted(np.cumsum(numbers[order]), room)), 1)
        for some in _with_contexts(question, every.take(order[:stop]), limit):
            found = _search_some(question, some, keep, objective, distinct, slowest, limit, mixes)
            best = concatenated([best, found]).best(keep, objective, distinct)
            if objective != "memory" and len(best.space) == keep:
                limit = min(limit, float(best.seconds[-1]))
            if any_will_do and len(best.space) == keep:
                return best
        order, batch = order[stop:], batch + 1
        order = order[bound[order] <= limit * (1 + 1e-8)]
    return best


def any_fits(question: Question, world_size: int) -> bool:
    """Whether the search would find anything: it ends where it does, and begins where least is held."""
    every = shapes(question, world_size)
    bound = least_memory(question, every)
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] <= question.limit]
    sizes, room = _sizes(question, every), FEWER
    while len(order):
        stop = max(int(np.searchsorted(np.cumsum(sizes[order]), room)), 1)
        for some in _with_contexts(question, every.take(order[:stop]), float("inf")):
            found = _search_some(question, some, 1, "time", False, float("inf"), float("inf"), mixes=False)
            if len(found.space):
                return True
        order, room = order[stop:], min(8 * room, AT_ONCE)
    return False


def emptiest(question: Question, world_size: int) -> tuple[Layout, float] | None:
    """The layout whose fullest rank holds least, and how many bytes that is, whether or not it fits."""
    every = shapes(question, world_size)
    bound = least_memory(question, every)
    order = np.argsort(bound, kind="stable")
    best = None
    for start in range(0, len(order), EMPTY):
        if best and bound[order[start]] >= best[1]:
            break
        space = _sayable(
            question, with_states(question, with_context(question, every.take(order[start : start + EMPTY])))
        )
        space = space if _plain_allowed(question, space) else _scheduled(question, space)
        if question.tries_offload:
            away = space.offloaded()
            room = host_bytes(Shape.of(question.model), away.jobs, question.profile) <= question.host_limit
            space = space.concatenated(away.take(np.flatnonzero(np.broadcast_to(room, len(away)))))
        space = _emptier(question, space, best[1] if best else float("inf"))
        memory = memory_of(question, space)
        if len(space) and (not best or memory.min() < best[1]):
            best = space.layout(int(memory.argmin())), float(memory.min())
    return best


def _emptier(question: Question, space: Space, least: float) -> Space:
    """Those that might hold as little as `least`, and as one of them that is likely to hold least."""
    bound = np.concatenate([least_memory(question, part, split=False) for part in chunks(space)])
    likely = memory_of(question, space.take(np.argsort(bound, kind="stable")[:LIKELY]))
    return space.take(np.flatnonzero(bound <= min(least, likely.min(initial=least)) * (1 + 1e-8)))


def sayable_layouts(question: Question, world_size: int) -> Space:
    """Layouts that the target has words for, whatever they hold: of each way to divide the ranks those with the
    smallest micro-batches, of which there are most, and so none has more schedules."""
    every = shapes(question, world_size)
    ranks = np.stack([every.columns[name] for name in DEGREES if name != "micro_batch"], axis=1).tolist()
    order = np.argsort(every.columns["micro_batch"], kind="stable")
    first = {tuple(ranks[index]): index for index in reversed(order.tolist())}
    some = every.take(np.array(sorted(first.values()), dtype=np.intp))
    return _scheduled(question, _sayable(question, with_states(question, with_context(question, some))))


def _sizes(question: Question, every: Space) -> Array:
    """How many layouts each shape has, nearly."""
    kinds = KINDS if not {"zero", "recompute"} & question.fixed.keys() else 4
    pairs, place = each_pair(every)
    return np.array([kinds * len(context_ways(question, *pair)) for pair in pairs], dtype=np.float64)[place]


def _with_contexts(question: Question, some: Space, limit: float) -> Iterator[Space]:
    """Shapes with every way to bring keys and queries together that might be within the limit, some at a time."""
    some = with_context(question, some)
    if np.isfinite(limit):
        least = np.concatenate([least_seconds(question, part, True) for part in chunks(some)])
        some = some.take(np.flatnonzero(least <= limit * (1 + 1e-8)))
    each = AT_ONCE // KINDS
    for start in range(0, len(some), each):
        yield some.take(np.arange(start, min(start + each, len(some))))


def _search_some(
    question: Question,
    some: Space,
    keep: int,
    objective: str,
    distinct: Distinct,
    slowest: float,
    limit: float,
    mixes: bool,
) -> Scores:
    """The best of some shapes. `limit`: seconds above which nothing is among the best of all."""
    space, memory = _fitting(question, _within(question, some, limit, mixes))
    if not len(space):
        return score(question, space)
    plain = score_all(question, space, memory)
    best = plain.within(slowest).best(keep, objective, distinct)
    reached = limit
    good = np.ones(len(space), dtype=bool)
    if _plain_allowed(question, space) and len(best.space) == keep:
        reached = min(reached, float(best.seconds[-1]))
    if objective == "memory":
        if _plain_allowed(question, space) and len(best.space) == keep and not np.isfinite(slowest):
            good = plain.memory <= best.memory[-1] * (1 + 1e-8)
    else:
        # A layout that is worse than so many others even at its best cannot be among those kept.
        good = plain.even <= reached * (1 + 1e-8)
    tried = _scheduled(question, space.take(np.flatnonzero(good)))
    if objective != "memory":
        tried = _soon_scheduled(question, tried, reached, mixes)
    found = score_all(question, tried)
    best = found.within(slowest).best(keep, objective, distinct)
    if mixes:
        # What is too slow with all layers recomputed may be fast enough with some of them.
        best = _with_mixes(question, best, found, keep, distinct, limit).within(slowest)
        others = ~good & promising(question, plain, min(_place(best, keep, distinct), limit))
        found = score_all(question, scheduled(question, space.take(np.flatnonzero(others))))
        best = _with_mixes(question, best, found, keep, distinct, limit).within(slowest)
    return best


def _soon_scheduled(question: Question, space: Space, limit: float, mixes: bool) -> Space:
    """Those that might take no longer than `limit` under their own schedule, or with fewer layers recomputed."""
    if not np.isfinite(limit) or len(space) <= FIRST:  # few are scored sooner than they are bounded
        return space
    least = np.concatenate([least_scheduled(question, part) for part in chunks(space)])
    heavy = mixes & (space.columns["recompute"] >= least_kind(question))
    return space.take(np.flatnonzero(np.where(heavy, LEAST_LEFT, 1.0) * least <= limit * (1 + 1e-8)))


def _within(question: Question, some: Space, limit: float, mixes: bool) -> Space:
    """Shapes with every recomputation and ZeRO that might fit and take no longer than `limit`, also with only some of
    their layers recomputed: what is quickly said of them is asked first."""
    space = _soon(question, with_recompute(question, some), limit, mixes, least_in_layers, split=True)
    space = _sayable(question, with_zero(question, space))
    space = _soon(question, space, limit, mixes, least_with_sums, split=False)
    return space.take(_may_fit(question, space))


def _soon(
    question: Question,
    space: Space,
    limit: float,
    mixes: bool,
    least: Callable[[Question, Space], Array],
    split: bool,
) -> Space:
    """Those whose states may fit and that may take no longer than `limit`. `least`: seconds that each takes at least as
    it is; with `mixes` only as many layers need be recomputed as memory asks for, the others one kind less. `split`: as
    if all states were split."""
    if not np.isfinite(limit):
        return space.take(_states_fit(question, space, split)[0])
    heavy = np.flatnonzero((space.columns["recompute"] >= least_kind(question)) & mixes)
    both = space.concatenated(lighter(space.take(heavy)))  # asked at once: most of the time goes to asking
    seconds = np.concatenate([least(question, part) for part in chunks(both)])
    more = seconds[: len(space)]
    less = more.copy()
    less[heavy] = np.minimum(less[heavy], seconds[len(space) :])
    limit = limit * (1 + 1e-8)
    soon = np.flatnonzero(less <= limit)  # few are, so memory is asked of these alone
    space, more, less = space.take(soon), more[soon], less[soon]
    fits, again = _states_fit(question, space, split)
    return space.take(fits & (less + again * (more - less) <= limit))


def _states_fit(question: Question, space: Space, split: bool) -> tuple[NDArray[np.bool_], Array]:
    """Whether the states of each may fit, with what is kept, and the fraction of its layers that must be recomputed in
    full for it; what recomputes less must fit as it is. `split`: as if all states were split."""
    held = [Least.of(question, part, split) for part in chunks(space)]
    memory, again = (
        np.concatenate([of_size(each, len(part)) for each, part in zip(found, chunks(space), strict=True)])
        for found in ([each.recomputed for each in held], [each.again(question) for each in held])
    )
    fits = (memory <= question.limit) & ((space.columns["recompute"] == RECOMPUTE.index("full")) | (again == 0))
    return fits, again


def _may_fit(question: Question, space: Space) -> NDArray[np.bool_]:
    """Whether the first pipeline rank fits, with the optimizer's state offloaded where that may be."""
    space = space.offloaded() if question.tries_offload else space
    return memory_of(question, space, first_memory) <= question.limit


def _sayable(question: Question, space: Space) -> Space:
    if not question.target:
        return space
    return space.take(np.flatnonzero(sayable(question.target, space.columns, space.global_batch, question.model)))


def _scheduled(question: Question, space: Space) -> Space:
    return _sayable(question, scheduled(question, space))


def _with_mixes(question: Question, best: Scores, found: Scores, keep: int, distinct: Distinct, limit: float) -> Scores:
    """The best with those of others that are faster with some of their layers recomputed."""
    for bounds, space in mixable(question, found, min(_place(best, keep, distinct), limit)):
        if bounds[0] > min(_place(best, keep, distinct), limit):
            break
        if distinct == "size":  # one of each is kept
            known = dict(zip(best.space.world_size.tolist(), best.seconds.tolist(), strict=True))
            reached = np.array([known.get(size, np.inf) for size in space.world_size.tolist()])
            space = space.take(np.flatnonzero(bounds <= reached))
            if not len(space):
                continue
        best = concatenated([best, mixed(question, space)]).best(keep, "time", distinct)
    return best


def _place(best: Scores, keep: int, distinct: Distinct) -> float:
    """Seconds that a mix must undercut to be worth its place."""
    if distinct == "size":  # all are answers
        return float(best.seconds[-1]) if len(best.space) == keep else float("inf")
    count = min(keep, PLACES)
    return float(best.seconds[count - 1]) if len(best.space) >= count else float("inf")


def _fitting(question: Question, space: Space) -> tuple[Space, Array]:
    """What fits under some schedule, and its memory under 1F1B; with the optimizer's state offloaded where it does not
    without."""
    memory = memory_of(question, space)  # under 1F1B, which no other schedule undercuts
    fits = memory <= question.limit
    found, held = space.take(np.flatnonzero(fits)), memory[fits]
    if question.tries_offload and not fits.all():
        away = space.take(np.flatnonzero(~fits)).offloaded()
        memory = memory_of(question, away)
        fits = memory <= question.limit
        found, held = found.concatenated(away.take(np.flatnonzero(fits))), np.concatenate([held, memory[fits]])
    if not found.columns["offload"].any():
        return found, held
    room = host_bytes(Shape.of(question.model), found.jobs, question.profile) <= question.host_limit
    return found.take(np.flatnonzero(room)), held[room]


def _plain_allowed(question: Question, space: Space) -> bool:
    """Whether 1F1B is open to every number of pipeline ranks, so that its times bound those of the best schedule."""
    return all((PLAIN, 1) in schedules(question, pp) for pp in space.pipelines)
