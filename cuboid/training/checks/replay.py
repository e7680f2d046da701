"""A replay: one process computes one micro-batch through one block, embedding or head, from the inputs, weights and
output gradients that the ranks had; its results are compared with theirs.

Each replay takes the next segment of a stage and the next micro-batch. Every rank of the replica replays at once,
before the update: this takes the time of a block or two, forward and backward, and the memory of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cuboid.kernels.cpu_16bit import fast_matmuls
from cuboid.model.batch import MicroBatch
from cuboid.parallel.collectives import all_reduce_maximum
from cuboid.parallel.parallelize import Alone, Engine, build_alone
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Entrance, Segment
from cuboid.spec.checks import ChecksSpec
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import CheckpointSpec, ResilienceSpec, Run
from cuboid.spec.sharding import Part
from cuboid.spec.training import ProfileSpec
from cuboid.training.checks.check import found_by_all, on_gradient, wrap
from cuboid.training.checks.gather_rows import RowGather, Rows
from cuboid.training.checks.hypotheses import UNKNOWN, fitted_factor, named_factor
from cuboid.training.checks.located import Located, Pass, module_of
from cuboid.training.checks.passes import Current
from cuboid.training.checks.replayed_segments import Rotation, inside_of, segments_of
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.checks.sequences import Sequences
from cuboid.training.checks.sketch import NUMBERS, sketch, stride_of
from cuboid.training.checks.variants import variants
from cuboid.training.checks.weights import WholeWeights, part_of
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult

EXACT = {"float64": 1e-9, "float32": 1e-3}
MULTIPLE = 8.0
"""How many times the rounding error of the replay itself is allowed."""
LEAST = {"fp8": 0.5}
"""Allowed in any case; in bf16 and fp16 eight roundings are."""
LEAST_GRADIENT = 0.2
"""Allowed in any case for a weight gradient in 16 bits: some have few elements, and large terms that cancel."""
NEGLIGIBLE = 1e-6
"""Gradients smaller than this times the largest of their segment are compared on that scale. In 16 bits
it is one rounding instead: gradients that should be zero consist of rounding errors."""
ROUNDED = 2.0**-10
"""The assumed rounding error in 16 bits, as a fraction of the stream, until it is measured."""
ROUTED = 0.4
"""Allowed with experts in 16 bits: rounding sends some tokens to other experts."""


@dataclass
class Seen:
    """What one rank computed of the chosen micro-batch."""

    inputs: Tensor | None = None
    outputs: Tensor | None = None
    output_gradient: Tensor | None = None
    input_gradient: Tensor | None = None
    inside: dict[str, Tensor] = field(default_factory=dict)
    """What attention and feed-forward made, where the compiler has not taken them in."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Sketches of weight gradients, before any sum over ranks."""


class Gradient(NamedTuple):
    """Names a gradient of a slice of a parameter: that of the ranks, or that of the replay."""

    kind: Literal["ranks", "replay", "exact"]
    name: str
    dimension: int
    first: int
    last: int
    adds: bool


def _gradient(kind: Literal["ranks", "replay", "exact"], part: Part) -> Gradient:
    cut = part.slice
    return Gradient(kind, part.name, cut.dimension, cut.start, cut.stop, cut.sharing == "own" or cut.partial_gradient)


@dataclass(frozen=True)
class Replayed:
    """Results of one process."""

    outputs: Tensor
    input_gradient: Tensor | None
    inside: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Given:
    """What a replay computes from: whole tensors."""

    segment: Segment
    weights: dict[str, Tensor]
    slices: dict[str, list[Part]]
    """Of each weight: every slice that some rank holds."""
    inputs: Tensor | None
    """None: tokens."""
    gradient: Tensor
    """Of the output."""
    losses: Tensor | None
    """Of a head, as the ranks computed them."""


class Replay:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        self._sequences, self._weights = Sequences(engine), WholeWeights(engine)
        self._row_gather = RowGather(engine)
        self._undo: list[Callable[[], None]] = []
        self._rotation = Rotation(engine)
        self._found: list[Located] = []
        self._rows: Rows = {}
        self._gathered_rows: list[Rows] = []
        """Of all ranks."""
        self._lones: dict[str, Run] = {}
        self._micro_batch = 0
        self._current = Current()

    # While the step is computed.

    def begin(self, sampled: SampledStep) -> None:
        engine, run = self._engine, self._engine.run
        self._count -= sampled.repeats and self._count > 0
        self._rows, self._found, self._seen = {}, [], Seen()
        self._segment: Segment | None = None
        self._batch: tuple[MicroBatch, RankBatch] | None = None
        self._made = 0
        name = self._rotation.at(self._count)
        if name is not None:
            # Shifted by one after all micro-batches: head and embedding, whose replays have odd numbers, would
            # otherwise see odd micro-batches only.
            micro_batches = min(map(run.micro_batches_of, range(run.layout.dp)))
            self._micro_batch = (self._count + self._count // micro_batches) % micro_batches
            self._segment = next(each for each in segments_of(engine) if each.name == name)
            self._attach(self._segment)
        self._count += 1

    def _attach(self, segment: Segment) -> None:
        engine = self._engine
        plain, of = segment.run, engine.batches.of

        def batch(given: MicroBatch, *more: Any) -> RankBatch:
            made = of(given, *more)
            if self._made == self._micro_batch:
                self._batch = (given, made)
            self._made += 1
            return made

        def run(x: Tensor, batch: RankBatch) -> Tensor:
            seen = self._seen
            is_chosen = self._batch is not None and batch is self._batch[1] and torch.is_grad_enabled()
            if not is_chosen or seen.outputs is not None:
                return plain(x, batch)
            seen.inputs = x.detach().clone()
            if x.requires_grad:
                on_gradient(x, lambda gradient: setattr(seen, "input_gradient", gradient.clone()))
            with inside_of(segment, {} if engine.compiled else seen.inside):
                y = plain(x, batch)
            seen.outputs = y.detach().clone()
            on_gradient(y, lambda gradient: setattr(seen, "output_gradient", gradient.clone()))
            return y

        self._undo += [wrap(engine.batches, "of", batch), wrap(segment, "run", run)]
        self._undo += self._current.attach(engine)
        for unit in segment.units:
            if unit.uses == 1:
                self._follow(unit)

    def _follow(self, unit: Any) -> None:
        plain, before = unit.collect, dict[str, Tensor]()

        def collect(reduces: bool = True) -> None:
            now = self._current()
            for part in unit.parts:
                gradient = unit.parameters[part.name].grad
                if part.name in self._seen.weights or not self._is_apart(part):
                    continue
                if gradient is None:
                    own = torch.zeros(NUMBERS, dtype=torch.float64, device=self._engine.device)
                else:
                    own = sketch(gradient, stride=stride_of(part.size))
                    if unit.adds_in_place:
                        own, before[part.name] = own - before.get(part.name, 0.0), own
                if now == self._micro_batch:
                    self._seen.weights[part.name] = own
            plain(reduces)

        self._undo.append(wrap(unit, "collect", collect))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _is_apart(self, part: Part) -> bool:
        """Whether its gradient is that of one micro-batch when it is collected. With a split backward pass only the
        weight gradients of matmuls are: by then the others are sums over several micro-batches."""
        if not self._engine.pipeline.schedule.splits_backward:
            return True
        is_matmul = part.name.startswith(("layers.", "head.")) and part.name.endswith(".weight")
        is_own = isinstance(self._engine.run.model, PythonModelSpec)
        return is_matmul and len(part.full_shape) == 2 and ".router." not in part.name and not is_own

    # Before the update.

    def see_gradients(self, result: StepResult) -> None:
        given, precision = self._given(), self._engine.run.training.precision
        replayed = self._replay(given, precision)
        # A second replay, in float32, shows how far rounding may lead. It is made only where the first one differs
        # much.
        if self._is_suspect():
            if precision not in EXACT:
                self._replay(given, "float32", replayed)
            if given is not None and replayed is not None:
                self._explain(given, replayed)

    def _given(self) -> Given | None:
        """None where there is nothing to replay. All ranks of the replica's stage call this."""
        segment, seen = self._segment, self._seen
        if segment is None or self._batch is None or seen.outputs is None:
            return None
        x, gradient = self._gathered(segment)
        losses = self._sequences.gather(seen.outputs) if segment.name == "head" else None
        weights, slices = self._weights.gather(
            segment.name, [part.name for unit in segment.units for part in unit.parts]
        )
        return Given(segment, weights, slices, x, gradient, losses)

    def _replay(self, given: Given | None, precision: str, rounded: Replayed | None = None) -> Replayed | None:
        """`rounded`: the replay in 16 bits, where this one, in float32, measures its rounding. Every rank calls
        this."""
        self._found, self._rows, made = [], {}, None
        try:  # no rank waits for another in here
            if given is not None and (rounded is not None or precision == self._engine.run.training.precision):
                made = self._compute(build_alone(self._lone(precision), given.segment.name, self._engine.device), given)
                exact = made if rounded is not None or precision in EXACT else None
                self._compare(given, rounded or made, exact)
                self._sketch(given, rounded or made, exact)
        except torch.OutOfMemoryError:  # a check must not end a training
            made = None
            self._rows = {"failed": torch.zeros(NUMBERS, dtype=torch.float64, device=self._engine.device)}
            self._found = []
        self._gathered_rows = self._row_gather.gather(self._rows, NUMBERS)
        return made

    def _explain(self, given: Given, replayed: Replayed) -> None:
        """Name the bug whose variant of the replay comes nearest to the rank's output."""
        index = next((at for at, each in enumerate(self._found) if each.where == "forward"), None)
        if index is None or not self._found[index].cause.startswith(UNKNOWN) or self._batch is None:
            return
        precision, segment, own = self._engine.run.training.precision, given.segment, self._sequences.own
        observed = self._seen.outputs
        assert observed is not None
        apart, best, cause = float((observed.double() - own(replayed.outputs).double()).norm()), math.inf, ""
        try:
            for variant in variants(self._engine, segment, self._batch[0], given.weights):
                alone = build_alone(self._lone(precision), segment.name, self._engine.device)
                variant.change(alone)
                made = own(self._compute(alone, replace(given, weights=variant.weights), variant.batch).outputs)
                away = float((observed.double() - made.double()).norm()) if made.shape == observed.shape else math.inf
                if away < 0.9 * best:
                    best, cause = away, variant.cause
        except torch.OutOfMemoryError:
            return
        if best <= (1e-3 if precision in EXACT else 0.3) * apart:
            self._found[index] = replace(self._found[index], cause=cause)

    def _is_suspect(self) -> bool:
        """Whether a rank found something, or all of them together."""
        here = len(self._found) + any(self._wrong_gradients(0))
        anywhere = torch.tensor(here, device=self._engine.device)
        return bool(all_reduce_maximum(anywhere, self._engine.groups.world).item())

    def _lone(self, precision: str) -> Run:
        """The same model and micro-batch on one process, without compiling or overlap."""
        if precision in self._lones:
            return self._lones[precision]
        run = self._engine.run
        width = run.layout.micro_batch_of(self._engine.groups.coordinates.dp)
        plain = {"precision": precision, "compile": "off", "cuda_graphs": "off", "overlap_tensor": "off"}
        training = replace(run.training, global_batch=width, batch_ramp="", **plain)  # type: ignore[arg-type]
        self._lones[precision] = replace(
            run,
            layout=Layout(micro_batch=width),
            training=training,
            optimizer=replace(run.optimizer, qk_clip=0.0),
            islands=IslandsSpec(),
            checkpoint=CheckpointSpec(),
            resilience=ResilienceSpec(),
            profile=ProfileSpec(),
            checks=ChecksSpec(),
        )
        return self._lones[precision]

    def _gathered(self, segment: Segment) -> tuple[Tensor | None, Tensor]:
        """Inputs and output gradients of whole sequences."""
        seen = self._seen
        assert seen.inputs is not None and seen.outputs is not None
        gradient = torch.zeros_like(seen.outputs) if seen.output_gradient is None else seen.output_gradient
        if segment.name != "head":
            gradient = self._sequences.whole(self._sequences.gather(gradient))
        if segment.name == "embedding":
            return None, gradient
        return self._sequences.whole(self._sequences.gather(seen.inputs)), gradient

    def _compute(
        self, alone: Alone, given: Given, alter: Callable[[RankBatch], RankBatch] = lambda batch: batch
    ) -> Replayed:
        assert self._batch is not None
        engine, precision = self._engine, alone.run.training.precision
        for unit in alone.units:
            unit.fill(lambda part: given.weights[part.name])
        if alone.balance is not None and engine.balance is not None:
            ours, theirs = alone.balance, engine.balance
            ours.sequences, ours.tokens, ours.factor = theirs.sequences, theirs.tokens, theirs.factor
            ours.begin_step()
            ours.counts.copy_(theirs.counts)
            ours.loads.copy_(theirs.loads)
            ours.step.copy_(theirs.step)
        batch = alter(alone.batches.of(self._batch[0]))
        parameters = {name: each for unit in alone.units for name, each in unit.parameters.items()}
        x = given.inputs
        x = batch.tokens if x is None else x.detach().to(alone.dtype, copy=True).requires_grad_()
        inside: dict[str, Tensor] = {}
        with torch.enable_grad(), fast_matmuls(engine.device, precision), inside_of(alone.segment, inside):
            y = alone.segment.run(x, batch)
            Entrance(y).backward(given.gradient.to(y.dtype))
        return Replayed(
            y.detach(),
            x.grad,
            inside,
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()},
        )

    # What is wrong.

    def _compare(self, given: Given, replayed: Replayed, exact: Replayed | None) -> None:
        """`exact`: the replay without rounding; None: not known."""
        seen, name, own = self._seen, given.segment.name, self._sequences.own
        assert seen.outputs is not None
        if given.losses is not None:
            observed = given.losses[:, self._engine.groups.tensor.index].sum(0)
            self._compare_one("loss", name, observed, replayed.outputs, None if exact is None else exact.outputs, None)
        else:
            residual = None if given.inputs is None else own(given.inputs)
            float32 = None if exact is None else own(exact.outputs)
            self._compare_one("forward", name, seen.outputs, own(replayed.outputs), float32, residual)
            if self._found and exact is not None:
                self._compare_inside(seen, replayed, exact)
        if replayed.input_gradient is not None and seen.input_gradient is not None:
            passed = None if name == "head" else own(given.gradient)
            float32 = None if exact is None or exact.input_gradient is None else own(exact.input_gradient)
            right = own(replayed.input_gradient)
            self._compare_one("input gradient", name, seen.input_gradient, right, float32, passed)

    def _compare_one(
        self, where: Pass, name: str, observed: Tensor, right: Tensor, exact: Tensor | None, passed: Tensor | None
    ) -> None:
        """`passed`: the residual stream, which a block adds to: errors are compared with what the block added."""
        tensor = name if where in ("forward", "loss") else f"gradient of the input of {name}"
        place = (self._micro_batch + 1, self._engine.groups.world.index)
        if observed.shape != right.shape:
            cause = f"another shape: {tuple(observed.shape)} in place of {tuple(right.shape)}"
            self._found.append(Located(tensor, name, where, 0, *place, math.inf, 0.0, cause))
            return
        added = right.double() if passed is None or passed.shape != right.shape else right.double() - passed.double()
        scale = float(added.norm()) or float(right.double().norm()) or 1.0
        apart = observed.double() - right.double()
        error = float(apart.norm()) / scale
        stream = max(1.0, float(right.double().norm()) / scale)
        """A large residual stream to which a block adds little: rounding of the stream counts too."""
        spread = ROUNDED * stream if exact is None else float((right.double() - exact.double()).norm()) / scale
        allowed = self._allowed(spread)
        if self._engine.run.training.precision in EXACT:
            allowed *= stream
        if not error <= allowed:
            cause = self._cause(added + apart, added, apart, of_activations=where == "forward")
            error = error if error == error else math.inf
            self._found.append(Located(tensor, name, where, 0, *place, error, allowed, cause))

    def _compare_inside(self, seen: Seen, replayed: Replayed, exact: Replayed) -> None:
        """Narrow a wrong output down to the first wrong half of the block."""
        whole, self._found = self._found, []
        for name, x in seen.inside.items():
            rows = [made.inside[name].flatten(0, -2) for made in (replayed, exact)]
            if not self._found and rows[0].numel() >= x.numel():
                right, float32 = (self._sequences.own(each) for each in rows)
                self._compare_one("forward", name, x.flatten(0, -2), right, float32, None)
        self._found = self._found or whole

    def _allowed(self, spread: float) -> float:
        precision = self._engine.run.training.precision
        if precision in EXACT:
            return EXACT[precision]
        routed = ROUTED if self._engine.run.model.mixture is not None else 0.0
        return max(MULTIPLE * spread, MULTIPLE * 2.0**-8, LEAST.get(precision, 0.0), routed)

    def _cause(self, observed: Tensor, right: Tensor, apart: Tensor, of_activations: bool = False) -> str:
        if not bool(observed.isfinite().all()):
            return "not a number"
        if not bool(observed.any()):
            return "it is zero"
        run = self._engine.run
        factor = fitted_factor(observed, right)
        exact = run.training.precision in EXACT
        if float((observed - factor * right).norm()) <= (1e-3 if exact else 0.3) * float(apart.norm()):
            named = named_factor(factor, run, run.micro_batches, exact=False, of_activations=of_activations)
            return named or f"factor {factor:.4g}"
        if apart.ndim > 1:
            size = apart.flatten(1).norm(dim=1)
            wrong = size > 0.05 * size.max()
            if int(wrong.sum()) <= 0.75 * len(wrong):
                return f"{UNKNOWN}; only {int(wrong.sum())} of {len(wrong)} tokens differ"
        return UNKNOWN

    def _sketch(self, given: Given, replayed: Replayed, exact: Replayed | None) -> None:
        """Of each slice that some rank holds: one rank of a replica adds the replay's gradient."""
        here = self._engine.groups.coordinates
        parts = {part.name: part for unit in given.segment.units for part in unit.parts}
        made: dict[Literal["replay", "exact"], Replayed] = {"replay": replayed}
        if exact is not None:
            made["exact"] = exact
        for name, own in self._seen.weights.items():
            self._rows[_gradient("ranks", parts[name])] = own
            if here.cp == here.tp == 0:
                for part in given.slices[name]:
                    for kind, each in made.items():
                        cut = part_of(each.weights[name].view(part.full_shape), part)
                        self._rows[_gradient(kind, part)] = sketch(cut, stride=stride_of(part.size))

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        found = [replace(each, step=step) for each in self._found]
        return found_by_all(engine, found) + list(self._wrong_gradients(step))

    def _wrong_gradients(self, step: int) -> Iterator[Located]:
        layout, run, gathered = self._engine.run.layout, self._engine.run, self._gathered_rows
        if any("failed" in rows for rows in gathered):
            return
        sums: dict[Gradient, Tensor] = {}
        holders: dict[Gradient, int] = {}
        for rank, rows in enumerate(gathered):
            for held, row in rows.items():
                # Of tensor ranks that all have the whole gradient, only one counts.
                if held.kind != "ranks" or held.adds or rank % layout.tp == 0:
                    sums[held] = sums[held] + row if held in sums else row
                    holders.setdefault(held, rank)
        # A gradient that is zero except for rounding has no relative error.
        right_of = {held: row for held, row in sums.items() if held.kind == "replay"}
        least = NEGLIGIBLE if run.training.precision in EXACT else 2.0**-8
        floor = least * max((float(row.norm()) for row in right_of.values()), default=0.0)
        exact_of = {held._replace(kind="replay"): row for held, row in sums.items() if held.kind == "exact"}
        spreads = {
            held._replace(kind="ranks"): float((row - exact_of.get(held, row)).norm())
            / (max(float(row.norm()), floor) or 1.0)
            for held, row in right_of.items()
        }
        typical = median(spreads.values()) if spreads else 0.0
        for held, observed in sums.items():
            if held.kind != "ranks":
                continue
            right = sums.get(held._replace(kind="replay"))
            if right is None:
                continue
            scale = max(float(right.norm()), floor) or 1.0
            error = float((observed - right).norm()) / scale
            allowed = self._allowed(max(spreads[held], typical))
            if run.training.precision not in EXACT:
                allowed = max(allowed, LEAST_GRADIENT)
            if error <= allowed or (not right.any() and run.training.precision not in EXACT):
                continue
            cause = self._cause(observed, right, observed - right)
            place = step, self._micro_batch + 1, holders[held]
            name = f"gradient of {held.name}"
            error = error if error == error else math.inf
            yield Located(name, module_of(held.name), "weight gradient", *place, error, allowed, cause)
