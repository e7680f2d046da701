"""Every layout worth a look, as columns of numbers.

Omitted is only what another layout of the space is never worse than, in time and in memory: schedules without a
pipeline, GPipe (as long as 1F1B and fuller), ZeRO without replicas, and no sequence parallelism where it is possible;
and offloading, which the search tries where a layout does not fit without. What the user fixes is never skipped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.inputs import Jobs
from cuboid.planning.question import Question
from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, SCHEDULES, STAGES_PER_RANK, Layout
from cuboid.spec.partition import longest_stage

Column = NDArray[np.int64]
DEGREES = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "sequence_parallel")
STATES = ("cp_method", "cp_inner", "recompute", "zero", "shard", "schedule", "vpp", "offload", "recompute_layers")
NAMES = (*DEGREES, *STATES)
PLAIN = SCHEDULES.index("1f1b")


@dataclass(frozen=True)
class Space:
    """Layouts in columns; recompute and schedule are positions in their lists of names."""

    columns: dict[str, Column]
    global_batch: int
    sequence: int
    layers: tuple[int, ...] = ()
    """Of each stage, where they are decided, which a search leaves to the engine."""

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def take(self, which: NDArray[Any]) -> "Space":
        """Some of the layouts, by position or by mask."""
        where = np.flatnonzero(which) if which.dtype == bool else which
        columns = {name: column.take(where) for name, column in self.columns.items()}
        return Space(columns, self.global_batch, self.sequence, self.layers)

    def offloaded(self) -> "Space":
        """The same layouts with the optimizer's state in CPU memory."""
        columns = {**self.columns, "offload": np.ones_like(self.columns["offload"])}
        return Space(columns, self.global_batch, self.sequence)

    def concatenated(self, *others: "Space") -> "Space":
        """These and those."""
        columns = {
            name: np.concatenate([column, *(other.columns[name] for other in others)])
            for name, column in self.columns.items()
        }
        return Space(columns, self.global_batch, self.sequence)

    @cached_property
    def jobs(self) -> Jobs:
        """The layouts as the cost model reads them."""
        return Jobs.make(**self.columns, global_batch=self.global_batch, sequence=self.sequence)

    @property
    def world_size(self) -> Column:
        """Ranks of each."""
        return self.columns["dp"] * self.columns["tp"] * self.columns["pp"] * self.columns["cp"]

    @property
    def pipelines(self) -> list[int]:
        """The numbers of pipeline ranks that occur."""
        return sorted(set(self.columns["pp"].tolist()))

    def layout(self, index: int) -> Layout:
        """One of them."""
        values: dict[str, Any] = {name: int(column[index]) for name, column in self.columns.items()}
        values["cp_method"] = CONTEXT_METHODS[values["cp_method"]]
        values["schedule"] = SCHEDULES[values["schedule"]]
        values["recompute"] = RECOMPUTE[values["recompute"]]
        for name in ("sequence_parallel", "offload"):
            values[name] = bool(values[name])
        return Layout(**values, layers=self.layers)

    @classmethod
    def of(cls, layouts: list[Layout], question: Question) -> "Space":
        """Given layouts, whose stages hold as many layers as one another's."""
        rows: list[dict[str, Any]] = [{name: getattr(layout, name) for name in NAMES} for layout in layouts]
        for row in rows:
            row["cp_method"] = CONTEXT_METHODS.index(row["cp_method"])
            row["schedule"] = SCHEDULES.index(row["schedule"])
            row["recompute"] = RECOMPUTE.index(row["recompute"])
            row["offload"] = row["offload"] and not question.on_cpu  # there it changes nothing
        columns = {name: np.array([row[name] for row in rows], dtype=np.int64) for name in NAMES}
        return cls(columns, question.global_batch, question.sequence, layouts[0].layers if layouts else ())


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, smallest first."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def degrees(question: Question, world_size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Every (dp, tp, pp, cp, ep) that the model, the batch and the cluster allow."""
    model, fixed = question.model, question.fixed
    experts = model.mixture.experts if model.mixture else 1

    def allowed(name: str, options: Sequence[int]) -> list[int]:
        return [value for value in options if name not in fixed or fixed[name] == value]

    # Every rank holds two chunks of a sequence, unless there is but one rank.
    chunks = gcd(question.sequence // 2, world_size) if question.sequence % 2 == 0 else 1
    context = divisors(chunks) if "cp" in question.explores or "cp" in fixed else (1,)
    expert = divisors(experts) if "ep" in question.explores or "ep" in fixed else (1,)
    for tp in allowed("tp", divisors(gcd(model.heads, model.ffn, world_size))):
        for pp in allowed("pp", [pp for pp in divisors(world_size // tp) if pp <= model.layers]):
            for cp in allowed("cp", [cp for cp in context if world_size // (tp * pp) % cp == 0]):
                dp = world_size // (tp * pp * cp)
                if question.global_batch % dp or fixed.get("dp", dp) != dp:
                    continue
                for ep in allowed("ep", [ep for ep in expert if dp * cp * tp % ep == 0]):
                    yield dp, tp, pp, cp, ep


def context_ways(question: Question, tp: int, cp: int) -> list[tuple[int, int]]:
    """Every (position of the method, ranks that trade heads) for a number of context-parallel ranks."""
    fixed, heads = question.fixed, question.model.heads // tp
    if cp == 1:
        return [(CONTEXT_METHODS.index("ring"), 1)]
    inner: dict[str, Sequence[int]] = {
        "ring": [1],
        "allgather": [1],
        "ulysses": [cp],
        "hybrid": divisors(cp)[1:-1],
    }
    return [
        (position, size)
        for position, method in enumerate(CONTEXT_METHODS)
        for size in inner[method]
        if fixed.get("cp_method", method) == method and fixed.get("cp_inner", size) == size and heads % size == 0
    ]


def shapes(question: Question, world_size: int) -> Space:
    """Every way to divide the ranks and the batch. What else a layout decides is left at what takes least time: no
    recomputation, no ZeRO, 1F1B; context-parallel ranks trade heads, which nothing is computed in blocks for."""
    ranks = list(degrees(question, world_size))
    ways = {key: _micro_batches(question, *key) for key in {(dp, tp, cp) for dp, tp, _, cp, _ in ranks}}
    each = [ways[dp, tp, cp] for dp, tp, _, cp, _ in ranks]
    rows = np.array(ranks, dtype=np.int64).reshape(len(ranks), 5)
    rows = np.repeat(rows, [len(batches) for batches in each], axis=0)
    table = np.hstack([rows, np.concatenate([*each, np.empty((0, 2), dtype=np.int64)])])
    columns = dict(zip(DEGREES, table.T, strict=True))
    ones = np.ones(len(table), dtype=np.int64)
    columns |= {"cp_method": CONTEXT_METHODS.index("ulysses") * ones, "cp_inner": columns["cp"]}
    columns |= {"recompute": 0 * ones, "zero": 0 * ones, "shard": 0 * ones}
    columns |= {"schedule": PLAIN * ones, "vpp": ones, "offload": int(question.fixed_offload) * ones}
    columns["recompute_layers"] = 0 * ones
    return Space(columns, question.global_batch, question.sequence)


def _micro_batches(question: Question, dp: int, tp: int, cp: int) -> NDArray[np.int64]:
    """Every (micro-batch, sequence parallelism) that some ranks allow."""
    fixed = question.fixed
    sizes = _divisors(question.global_batch // dp)
    if "micro_batch" in fixed:
        sizes = sizes[sizes == fixed["micro_batch"]]
    found = np.zeros((len(sizes), 2), dtype=np.int64)
    found[:, 0] = sizes
    if tp > 1 and fixed.get("sequence_parallel", True):
        found[:, 1] = sizes * question.sequence // cp % tp == 0
        found = found[found[:, 1] > 0] if "sequence_parallel" in fixed else found
    return found


@lru_cache(maxsize=4096)
def _divisors(number: int) -> NDArray[np.int64]:
    return np.array(divisors(number), dtype=np.int64)


def each_pair(space: Space) -> tuple[list[tuple[int, int]], NDArray[np.intp]]:
    """The different (tp, cp) of a space, and for every layout the place of its own."""
    widest = int(space.columns["cp"].max(initial=0)) + 1
    keys = space.columns["tp"] * widest + space.columns["cp"]
    known = np.bincount(keys) > 0
    return [divmod(key, widest) for key in np.flatnonzero(known).tolist()], (np.cumsum(known) - 1)[keys]


def with_context(question: Question, space: Space) -> Space:
    """Every shape with every way to bring keys and queries together."""
    pairs, place = each_pair(space)
    ways = [np.array(context_ways(question, *pair), dtype=np.int64).reshape(-1, 2) for pair in pairs]
    counts = np.array([len(each) for each in ways], dtype=np.intp)
    number = counts[place]
    row = np.repeat(np.arange(len(space)), number)
    # Of a row's ways the first stands where those of its pair begin.
    begin = (np.cumsum(counts) - counts)[place] - (np.cumsum(number) - number)
    flat = np.concatenate([*ways, np.empty((0, 2), dtype=np.int64)])[begin[row] + np.arange(len(row))]
    columns = {**space.take(row).columns, "cp_method": flat[:, 0], "cp_inner": flat[:, 1]}
    return Space(columns, space.global_batch, space.sequence)


def with_recompute(question: Question, space: Space) -> Space:
    """Every shape with every kind of recomputation."""
    fixed = question.fixed
    kinds = [RECOMPUTE.index(fixed["recompute"])] if "recompute" in fixed else list(range(len(RECOMPUTE)))
    each = space.take(np.repeat(np.arange(len(space)), len(kinds)))
    again = np.full(len(each), fixed.get("recompute_layers", 0), dtype=np.int64)
    recompute = np.tile(np.array(kinds, dtype=np.int64), len(space))
    columns = {**each.columns, "recompute": recompute, "recompute_layers": again}
    return Space(columns, question.global_batch, question.sequence)


def with_zero(question: Question, space: Space) -> Space:
    """Everything with every kind of ZeRO."""
    # Copies of an expert sit on tensor-parallel ranks too, so there ZeRO has something to split even without replicas.
    tensor = space.columns["tp"] if question.model.mixture else 1
    replicated = space.columns["dp"] * space.columns["cp"] * tensor > 1
    shared = _crossed(question, space.take(replicated), alone=False)
    return shared.concatenated(_crossed(question, space.take(~replicated), alone=True))


def with_states(question: Question, space: Space) -> Space:
    """Every shape with every kind of recomputation and of ZeRO."""
    return with_zero(question, with_recompute(question, space))


def bases(question: Question, world_size: int) -> Space:
    """Everything but the schedule, which is 1F1B here where that is allowed."""
    return with_states(question, with_context(question, shapes(question, world_size)))


def _crossed(question: Question, space: Space, alone: bool) -> Space:
    """Everything with every kind of ZeRO; `alone` says that there are no replicas to share with."""
    fixed = question.fixed
    shard = fixed.get("shard", 0)
    stages = [fixed["zero"]] if "zero" in fixed else ([0] if alone else [0, 1, 2, 3])
    stages = [zero for zero in stages if zero or not shard]
    if shard:
        space = space.take(space.columns["dp"] % shard == 0)
        split, ep = shard * space.columns["tp"] * space.columns["cp"], space.columns["ep"]
        space = space.take((split % ep == 0) | (ep % split == 0))
    each = space.take(np.repeat(np.arange(len(space)), len(stages)))
    zero = np.tile(np.array(stages, dtype=np.int64), len(space))
    columns = {**each.columns, "zero": zero, "shard": np.where(zero > 0, shard, 0)}
    return Space(columns, question.global_batch, question.sequence)


def schedules(question: Question, pp: int) -> list[tuple[int, int]]:
    """Every (position of the schedule, stages per rank) for a number of pipeline ranks."""
    fixed, layers = question.fixed, question.model.layers
    if "schedule" in fixed:
        names = [fixed["schedule"]]
    elif pp == 1 and "vpp" not in fixed:
        names = ["1f1b"]
    else:
        names = [name for name in SCHEDULES if name != "gpipe"]
    found = []
    for name in names:
        number = STAGES_PER_RANK[name]
        for vpp in [number] if number else range(2, layers // pp + 1):
            if vpp * pp > layers or fixed.get("vpp", vpp) != vpp:
                continue
            again = fixed.get("recompute_layers", 0)  # as many as a stage has would be all of them
            if not again or again < longest_stage(question.model, pp * vpp, question.sequence):
                found.append((SCHEDULES.index(name), vpp))
    return found


def scheduled(question: Question, space: Space) -> Space:
    """Every base with every schedule."""
    parts: list[NDArray[np.int64]] = []
    options: list[NDArray[np.int64]] = []
    for pp in space.pipelines:
        pairs = np.array(schedules(question, pp), dtype=np.int64).reshape(-1, 2)
        where = np.flatnonzero(space.columns["pp"] == pp)
        parts.append(np.repeat(where, len(pairs)))
        options.append(np.tile(pairs, (len(where), 1)))
    chosen = space.take(np.concatenate(parts)) if parts else space
    pairs = np.concatenate(options) if options else np.empty((0, 2), dtype=np.int64)
    columns = {**chosen.columns, "schedule": pairs[:, 0], "vpp": pairs[:, 1]}
    return Space(columns, space.global_batch, space.sequence)
