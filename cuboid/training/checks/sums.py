"""Sums: a reduced gradient is the sum of the parts of all ranks that hold the same elements, and the gradient norm is
that of the gradients which the optimizer gets.

The check does not use the layout's process groups, which may be wrong: any rank that holds the same elements of a
parameter has a part of its gradient. Gradients are compared as sketches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.ranks import coordinates
from cuboid.spec.sharding import Part
from cuboid.training.checks.check import wrap
from cuboid.training.checks.gather_rows import RowGather, Rows
from cuboid.training.checks.hypotheses import (
    UNKNOWN,
    Axes,
    Hypothesis,
    count_named,
    fitted_factor,
    named_factor,
    sum_hypotheses,
)
from cuboid.training.checks.located import Located, module_of
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.checks.sketch import NUMBERS, sketch, stride_of
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
"""How far a sum may be off, of the size of its parts, by the precision it is summed in."""
CLOSE = {torch.float64: 1e-6, torch.float32: 0.02, torch.bfloat16: 0.1}
"""How much of an error a cause may leave unexplained."""
NORM = {torch.float64: 1e-9, torch.float32: 1e-3}


class Held(NamedTuple):
    """Elements of a parameter, of which a rank has a part of the gradient, or the sum of all parts."""

    kind: Literal["part", "sum", "norm"]
    name: str
    dimension: int = 0
    first: int = 0
    last: int = 0
    adds: bool = True
    """Whether tensor ranks that hold the same have parts, or all of them the same gradient."""
    is_shared: bool = False
    start: int = 0
    stop: int = 0
    """Of a shard: the elements of the rank's part of the parameter."""

    @property
    def elements(self) -> tuple[str, int, int, int]:
        return self.name, self.dimension, self.first, self.last


def _held(kind: Literal["part", "sum"], part: Part) -> Held:
    cut = part.slice
    shared = cut.sharing != "own"
    return Held(kind, part.name, cut.dimension, cut.start, cut.stop, not shared or cut.partial_gradient, shared)


def _shard(shard: OptimizerShard) -> Held:
    return _held("sum", shard.part)._replace(start=shard.start, stop=shard.stop)


KINDS: dict[str, Callable[[Held], bool]] = {
    "all": lambda _: True,
    "parameters that several tp ranks hold": lambda held: held.is_shared,
    "parameters that are split or on one tp rank": lambda held: not held.is_shared,
    "experts": lambda held: ".experts." in held.name,
}
"""Groups of gradients that a wrong norm may count too often or not at all."""


class Sums:
    def __init__(self, engine: Engine) -> None:
        self._rows: Rows = {}
        self._own: dict[Held, list[Tensor]] = {}
        """By micro-batch, in the order in which they were collected."""
        self._undo: list[Callable[[], None]] = []
        self._engine = engine
        self._row_gather, self._part_gather = RowGather(engine), RowGather(engine)
        self._counted: list[bool] = []
        """For each shard of this rank: whether no lower rank has the same elements, so that it counts in the norm."""
        self._units: list[Unit] = []
        """Those that this step checks."""

    def begin(self, sampled: SampledStep) -> None:
        self._rows, self._own = {}, {}
        self._units = [unit for unit in self._engine.units if unit.uses and sampled.includes(unit)]
        for unit in self._units:
            self._attach(unit)

    def _attach(self, unit: Unit) -> None:
        plain, before = unit.collect, dict[str, Tensor]()

        def collect(reduces: bool = True) -> None:
            for part in unit.parts:
                gradient = unit.parameters[part.name].grad
                own = torch.zeros(NUMBERS, dtype=torch.float64, device=self._engine.device)
                if gradient is not None:
                    own = sketch(gradient, stride=stride_of(part.size))
                    if unit.adds_in_place:  # the sum of all micro-batches so far
                        own, before[part.name] = own - before.get(part.name, 0.0), own
                self._own.setdefault(_held("part", part), []).append(own)
            plain(reduces)

        self._undo.append(wrap(unit, "collect", collect))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def see_gradients(self, result: StepResult) -> None:
        factor = result.loss_scale or 1.0
        self._rows[Held("norm", "")] = self._squares(result, factor)
        for held, own in self._own.items():
            self._rows[held] = torch.stack(own).sum(0) / factor
        for unit in self._units:
            for shard in unit.optimizer_shards():
                stride = stride_of(shard.part.size)
                self._rows[_shard(shard)] = sketch(shard.gradient, shard.start, stride) / factor

    def _squares(self, result: StepResult, factor: float) -> Tensor:
        """(16,): the norm that the optimizer uses, then the sums of squares of this rank's gradients by `KINDS`."""
        shards = [shard for unit in self._engine.units if unit.uses for shard in unit.optimizer_shards()]
        held = [_shard(shard) for shard in shards]
        if not self._counted:
            self._counted = self._counts(held)
        squares = torch.zeros(NUMBERS, dtype=torch.float64, device=self._engine.device)
        squares[0] = result.gradient_norm
        counted = [(one, shard) for one, shard, counts in zip(held, shards, self._counted, strict=True) if counts]
        if counted:
            norms = torch._foreach_norm([shard.gradient for _, shard in counted], 2, torch.float64)
            each = torch.stack([norm.to(squares.device) for norm in norms]).square() / factor**2
            is_of = torch.tensor([[among(one) for one, _ in counted] for among in KINDS.values()], dtype=torch.float64)
            squares[1 : len(KINDS) + 1] = is_of.to(squares.device) @ each
        return squares

    def _counts(self, held: list[Held]) -> list[bool]:
        """Communicated once: shards stay where they are."""
        world = self._engine.groups.world
        if world.handle is None:
            return [True] * len(held)
        everywhere: list[list[Held]] = [[] for _ in range(world.size)]
        dist.all_gather_object(everywhere, held, group=world.handle)
        before = {(*each.elements, each.start, each.stop) for rank in everywhere[: world.index] for each in rank}
        return [(*each.elements, each.start, each.stop) not in before for each in held]

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        device = engine.device
        gathered = self._row_gather.gather({held: row.to(device) for held, row in self._rows.items()}, NUMBERS)
        found = list(self._wrong_sums(gathered, step))
        # Ranks communicate the parts of single micro-batches only where a sum is wrong; all ranks find the same.
        found = [self._with_micro_batches(each, gathered) for each in found[:1]] + found[1:]
        return found + list(self._wrong_norm(gathered, step))

    # Sums over ranks.

    def _axes(self, rank: int) -> Axes:
        place = coordinates(rank, self._engine.run.layout)
        return {"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp}

    def _wrong_sums(self, gathered: list[Rows], step: int) -> Iterator[Located]:
        dtypes = {part.name: unit.sums_in for unit in self._engine.units for part in unit.parts}
        usual = next(iter(dtypes.values()))
        parts: dict[tuple[str, int, int, int], dict[int, Tensor]] = {}
        sums: dict[tuple[str, int, int, int], dict[int, dict[tuple[int, int], Tensor]]] = {}
        adds: dict[tuple[str, int, int, int], bool] = {}
        # In the order of a backward pass: the last stage first.
        for rank in sorted(range(len(gathered)), key=lambda rank: -self._axes(rank)["pp"]):
            for held, row in gathered[rank].items():
                if held.kind == "part":
                    parts.setdefault(held.elements, {})[rank] = row
                    adds[held.elements] = held.adds
                elif held.kind == "sum":
                    there = sums.setdefault(held.elements, {}).setdefault(rank, {})
                    there[held.start, held.stop] = row
        for elements, own in parts.items():
            dtype = dtypes.get(elements[0], usual)
            allowed, close = ALLOWED[dtype], CLOSE[dtype]
            for rank, observed in _whole(sums.get(elements, {})).items():
                axes = self._axes(rank)
                of = {r: x for r, x in own.items() if adds[elements] or self._axes(r)["tp"] == axes["tp"]}
                if not of:
                    continue
                right, scale = torch.stack(list(of.values())).sum(0), float(torch.stack(list(of.values())).norm())
                apart = float((observed - right).norm())
                if apart == 0 or apart <= allowed * scale:
                    continue
                error = apart / scale if scale and apart == apart else math.inf
                cause = self._cause(observed, right, self._placed(of, axes), close)
                if cause == UNKNOWN:
                    others = {
                        held: theirs for held, theirs in parts.items() if held[0] == elements[0] and held != elements
                    }
                    cause = _explains(_other_slices(right, others), observed, right, close) or cause
                name = f"gradient of {elements[0]}"
                yield Located(name, module_of(elements[0]), "reduction", step, None, rank, error, allowed, cause)
                break

    def _placed(self, of: dict[int, Tensor], here: Axes) -> list[tuple[Axes, Tensor]]:
        """The parts of the rank's own place first: of two causes with the same result, the first is reported."""
        placed = [(self._axes(rank), own) for rank, own in of.items()]
        return sorted(placed, key=lambda item: [item[0][axis] != here[axis] for axis in here])

    def _cause(self, observed: Tensor, right: Tensor, parts: list[tuple[Axes, Tensor]], close: float) -> str:
        if not bool(observed.isfinite().all()):
            return "not a number"
        if not bool(observed.any()):
            return "it is zero"
        run = self._engine.run
        cause = _explains(sum_hypotheses(parts), observed, right, close)
        factor = fitted_factor(observed, right)
        if not cause and _near(right * factor, observed, right, close):
            cause = named_factor(factor, run, run.micro_batches, exact=False)
        return cause or UNKNOWN

    def _with_micro_batches(self, found: Located, gathered: list[Rows]) -> Located:
        """With a cause among micro-batches, where there is none among ranks. Every rank calls this."""
        if found.cause != UNKNOWN or found.rank is None:
            return found
        name = found.tensor.removeprefix("gradient of ")
        mine = {held: many for held, many in self._own.items() if held.name == name}
        own = {(held, index): x for held, many in mine.items() for index, x in enumerate(many)}
        everywhere = self._part_gather.gather(own, NUMBERS)
        seen = next(held for held in gathered[found.rank] if held.kind == "sum" and held.name == name)
        observed = {
            rank: {
                (held.start, held.stop): row
                for held, row in rows.items()
                if held.kind == "sum" and held.elements == seen.elements
            }
            for rank, rows in enumerate(gathered)
        }
        here = self._axes(found.rank)
        parts = [
            ({**self._axes(rank), "micro-batch": index}, row)
            for rank, rows in enumerate(everywhere)
            for (held, index), row in rows.items()
            if held.elements == seen.elements and (held.adds or self._axes(rank)["tp"] == here["tp"])
        ]
        right = torch.stack([part for _, part in parts]).sum(0)
        cause = _explains(
            sum_hypotheses(parts), _whole(observed)[found.rank], right, CLOSE[self._engine.units[0].sums_in]
        )
        return replace(found, cause=cause or found.cause)

    # The norm.

    def _wrong_norm(self, gathered: list[Rows], step: int) -> Iterator[Located]:
        engine = self._engine
        allowed = NORM[engine.units[0].accumulate]
        squares = [dict(zip(KINDS, rows[Held("norm", "")][1:].tolist(), strict=False)) for rows in gathered]
        right = math.sqrt(sum(own["all"] for own in squares))
        for rank, rows in enumerate(gathered):
            observed = float(rows[Held("norm", "")][0])
            error = abs(observed - right) / (right or 1.0)
            if not error <= allowed:
                cause = self._norm_cause(observed, right, squares)
                yield Located("gradient norm", "gradient norm", "norm", step, None, rank, error, allowed, cause)
                return

    def _norm_cause(self, observed: float, right: float, squares: list[dict[str, float]]) -> str:
        """`squares`: of each rank."""
        if observed != observed:
            return "not a number"
        layout, extra = self._engine.run.layout, observed**2 - right**2
        close = 1e-6 if self._engine.units[0].accumulate == torch.float64 else 1e-2
        for kind in list(KINDS)[1:]:
            among = sum(own[kind] for own in squares)
            times = count_named(extra, among, {2, layout.tp, layout.dp, layout.cp, layout.ep}, close)
            if times:
                return f"{kind} are {times}"
        for stage in range(layout.pp if layout.pp > 1 else 0):
            of_stage = sum(own["all"] for rank, own in enumerate(squares) if self._axes(rank)["pp"] == stage)
            if abs(observed**2 - of_stage) <= close * right**2:
                return f"sum missing over pp: only pp rank {stage} is in it"
        named = named_factor(observed / right, self._engine.run, self._engine.run.micro_batches, exact=False)
        return named or ("sum missing over ranks: only a part is in it" if observed < right else UNKNOWN)


def _whole(of: dict[int, dict[tuple[int, int], Tensor]]) -> dict[int, Tensor]:
    """A whole gradient as each rank sees it: its own shards, and the other shards from a rank that holds them."""
    holders = {between: rank for rank in sorted(of, reverse=True) for between in of[rank]}
    found = {}
    for rank, own in of.items():
        # Shards of a rank's own group of holders: those of the ranks before it, or the first.
        parts = [own.get(between, of[first][between]) for between, first in holders.items()]
        found[rank] = torch.stack(parts).sum(0)
    return found


def _other_slices(right: Tensor, others: dict[tuple[str, int, int, int], dict[int, Tensor]]) -> Iterator[Hypothesis]:
    """`others`: the gradients that ranks computed of the other slices of the parameter, as sketches."""
    for theirs in others.values():
        for rank, part in theirs.items():
            yield f"that of another slice, on rank {rank}, is added", lambda part=part: right + part  # type: ignore[misc]
        yield (
            "that of another slice is added: summed over a group of other ranks",
            lambda all=theirs: (  # type: ignore[misc]
                right + torch.stack(list(all.values())).sum(0)
            ),
        )
    everything = [part for theirs in others.values() for part in theirs.values()]
    if everything:
        cause = "those of all other slices are added: summed over a group of other ranks"
        yield cause, lambda: right + torch.stack(everything).sum(0)


def _near(made: Tensor, observed: Tensor, right: Tensor, close: float) -> bool:
    return float((made - observed).norm()) <= close * float((observed - right).norm())


def _explains(hypotheses: Iterator[Hypothesis], observed: Tensor, right: Tensor, close: float) -> str:
    for cause, make in hypotheses:
        made = make()
        if made is not None and _near(made, observed, right, close):
            return cause
    return ""
