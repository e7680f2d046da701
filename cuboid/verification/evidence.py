"""What ranks recorded beside what one process recorded: the same numbers, row by row and head by head, and how far
apart they may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from cuboid.data.source import Source
from cuboid.spec.ranks import Coordinates, coordinates
from cuboid.spec.run import Run
from cuboid.spec.sharding import Part, places_of, vocabulary_rows
from cuboid.verification.follows import replayed, replayed_averages
from cuboid.verification.record import Notes, RankRecord, SampleRecorder, Shard
from cuboid.verification.reference import Tensors, Trace
from cuboid.verification.rounding import MULTIPLE, REROUTED, ROUNDED, ROUNDOFF, TENSOR_ROUNDOFF

Key = tuple[str, int]
"""A name, and a micro-batch of a rank."""
LOCATING = 2.0
"""Hundreds of tensors are looked at here, and something is known to be wrong: 16-bit bounds are so much wider."""
FLOOR = 1e-6
"""As of `compare`: what is so much smaller than the largest of its kind is compared on that scale."""


@dataclass(frozen=True)
class Error:
    error: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclass(frozen=True)
class Seen:
    """One tensor of one rank, beside those of one process: compared with the first of them."""

    observed: Tensor
    expected: list[Tensor]

    @property
    def right(self) -> Tensor:
        return self.expected[0]


@dataclass
class Evidence:
    run: Run
    step: int
    observed: Trace
    traces: list[Trace]
    """Of one process: what is compared with, in 16 bits others that round otherwise, and last one in float32."""
    samples: list[SampleRecorder]
    """What the same processes recorded."""
    ranks: list[RankRecord]
    source: Source
    wider: float = LOCATING
    """By how much bounds in 16 bits are wider than those of `rounding`."""

    @property
    def is_rounded(self) -> bool:
        return self.run.training.precision in ROUNDED

    def place(self, rank: int) -> Coordinates:
        return coordinates(rank, self.run.layout)

    @cached_property
    def micro_batches(self) -> int:
        """Of the replica that has most."""
        return self.micro_batches_of(self.run.layout.busiest_replica)

    def micro_batches_of(self, replica: int) -> int:
        return self.run.layout.micro_batches_of(replica, self.run.training.batch_sizes.at(self.step))

    def sample_places(self, replica: int, micro_batch: int) -> range:
        """The positions of a micro-batch's samples in the order of all data."""
        training, layout = self.run.training, self.run.layout
        if micro_batch >= self.micro_batches_of(replica):
            return range(0)
        width = layout.micro_batch_of(replica)
        first = training.batch_sizes.sum_before(self.step) + micro_batch * width
        first += layout.sequences_of(replica, training.batch_sizes.at(self.step)).start
        return range(first, first + width)

    @cached_property
    def names(self) -> list[str]:
        """Of activations, in the order in which a forward pass makes them."""
        return list(dict.fromkeys(name for name, _ in self.samples[0].notes.forward))

    # Activations and their gradients.

    def notes(self, of: SampleRecorder | RankRecord, kind: str) -> dict[Key, Tensor]:
        notes: Notes = of.notes
        return notes.forward if kind == "forward" else notes.gradient

    def rows(self, kind: str, name: str, rank: int, micro_batch: int) -> list[Tensor] | None:
        """What one process has of the tokens of a rank's micro-batch: (tokens, …)."""
        place = self.place(rank)
        layout, sequence = self.run.layout, self.run.training.sequence
        tokens = torch.cat([torch.arange(part.start, part.stop) for part in places_of(place.cp, layout.cp, sequence)])
        found = []
        for recorder in self.samples:
            notes = self.notes(recorder, kind)
            keys = [(name, each) for each in self.sample_places(place.dp, micro_batch)]
            if not all(key in notes for key in keys):
                return None
            whole = [notes[key] for key in keys]
            found.append(torch.cat([(x[0] if x.ndim > 2 else x)[tokens] for x in whole]).double())
        return found

    def seen(self, kind: str, name: str, rank: int, micro_batch: int) -> Seen | None:
        """None where there is nothing to compare."""
        x = self.notes(self.ranks[rank], kind).get((name, micro_batch))
        if x is None and kind == "gradient":  # none came, where one process has one
            made = self.notes(self.ranks[rank], "forward").get((name, micro_batch))
            x = None if made is None else torch.zeros_like(made)
        expected = None if x is None or not x.ndim else self.rows(kind, name, rank, micro_batch)
        if x is None or expected is None:
            return None
        x = (x.flatten(0, 1) if x.ndim > 2 else x).double()
        tp, index = self.run.layout.tp, self.place(rank).tp
        if x.shape[0] * tp == expected[0].shape[0] and tp > 1:  # each tensor rank has its own part of the tokens
            expected = [each.chunk(tp)[index] for each in expected]
        if name == "head.output" and tp > 1:
            first, count = vocabulary_rows(self.run.model.vocab, tp, index)
            return Seen(x[:, :count], [each[:, first : first + count] for each in expected])
        if x.ndim == 3 and x.shape[1] != expected[0].shape[1]:
            return self._heads(kind, name, x, expected, index)
        return Seen(x, expected)

    def _heads(self, kind: str, name: str, x: Tensor, expected: list[Tensor], index: int) -> Seen | None:
        """A tensor rank's heads, of all."""
        whole, tp = expected[0].shape[1], self.run.layout.tp
        if whole == x.shape[1] * tp:
            return Seen(x, [each.chunk(tp, 1)[index] for each in expected])
        # Several ranks have the same key-value heads: each in place of those of the query heads it serves.
        if kind == "gradient":
            return None
        heads = self.run.model.heads
        served = [each.repeat_interleave(heads // whole, 1).chunk(tp, 1)[index] for each in expected]
        return Seen(x.repeat_interleave(served[0].shape[1] // x.shape[1], 1), served)

    def all_seen(self, kind: str, name: str) -> Iterator[tuple[int, int, Seen]]:
        """Micro-batch by micro-batch, rank by rank."""
        for micro_batch in range(self.micro_batches):
            for record in self.ranks:
                seen = self.seen(kind, name, record.rank, micro_batch)
                if seen is not None:
                    yield record.rank, micro_batch, seen

    # How far apart.

    @cached_property
    def _floors(self) -> dict[str, float]:
        """For each kind, the size below which nothing is compared with itself."""
        found = {}
        for kind in ("forward", "gradient"):
            notes = self.notes(self.samples[-1], kind).values()
            found[kind] = FLOOR * max((_largest(x) for x in notes if x.ndim), default=0.0)
        found["weight gradient"] = FLOOR * max((_largest(x) for x in self.samples[-1].weight.values()), default=0.0)
        return found

    @cached_property
    def _typical(self) -> dict[str, float]:
        """For each kind, by how much tensors differ by rounding: the median."""
        if not self.is_rounded:
            return {}
        found: dict[str, float] = {}
        for kind in ("forward", "gradient"):
            tables = [self.notes(recorder, kind) for recorder in self.samples]
            found[kind] = _median_spread(tables)
        found["weight gradient"] = _median_spread([recorder.weight for recorder in self.samples])
        return found

    @cached_property
    def _before_routing(self) -> set[str]:
        """Activations that no router has had a part in: no rounding sends their tokens elsewhere."""
        routers = [index for index, name in enumerate(self.names) if name.endswith("router")]
        return set(self.names[: routers[0]] if routers else self.names)

    def _least(self, kind: str, name: str) -> float:
        rounding = self.wider * MULTIPLE * TENSOR_ROUNDOFF.get(self.run.training.precision, ROUNDOFF)
        routed = self.run.model.mixture is not None and not (kind == "forward" and name in self._before_routing)
        return max(rounding, REROUTED) if routed else rounding

    def error(self, seen: Seen, kind: str, name: str = "") -> Error:
        if seen.observed.shape != seen.right.shape:
            return Error(float("inf"), 0.0)
        if not self.is_rounded:
            scale = max(_largest(seen.right), self._floors[kind])
            tolerance = 1e-9 if self.run.training.precision == "float64" else 1e-3
            return Error(_finite(_largest(seen.observed - seen.right) / scale) if scale else 0.0, tolerance)
        *rounded, exact = seen.expected
        scale = max(size(exact), self._floors[kind])
        if not scale:
            return Error(_finite(size(seen.observed)), 0.0)
        spread = max(size(each - exact) for each in rounded) / scale
        bound = max(self.wider * MULTIPLE * max(spread, self._typical[kind]), self._least(kind, name))
        return Error(_finite(size(seen.observed - rounded[0]) / scale), bound)

    def explains(self, made: Tensor, seen: Seen, kind: str) -> bool:
        """Whether what a hypothesis makes is what was observed, and much nearer to it than what is right."""
        if made.shape != seen.observed.shape or not seen.observed.numel():
            return False
        away = size(seen.observed - made)
        apart = size(seen.observed - seen.right)
        if not self.is_rounded:
            is_exact = self.run.training.precision == "float64"
            share, close = (1e-3, 1e-8) if is_exact else (0.02, 1e-3)
            return away <= share * apart and away <= close * max(size(seen.observed), self._floors[kind])
        return away <= 0.35 * apart

    # Parameters.

    @cached_property
    def follows(self) -> Trace:
        """What updates are compared with: one process, or below float64 what follows from the observed gradients."""
        if self.run.training.precision == "float64":
            return self.traces[0]
        start = self.traces[-1].start
        made = replayed(self.run, self.observed, start)
        if not made:
            return self.traces[0]
        gradients, norms = self.observed.gradients, self.observed.gradient_norms
        whole = [{**one, **other} for one, other in zip(self.traces[0].parameters, made, strict=False)]
        averages = replayed_averages(self.run, self.observed, start)
        follows = replace(self.traces[0], start=start, gradients=gradients, gradient_norms=norms, parameters=whole)
        return replace(follows, averages=averages)

    def before(self, trace: Trace, step: int) -> Tensors:
        """Parameters that step `step` begins with."""
        return trace.parameters[step - 1] if step else self.traces[-1].start


def part_of(whole: Tensor, part: Part) -> Tensor:
    """What a rank holds of a whole tensor, with its padding."""
    cut = part.slice
    real = whole.narrow(cut.dimension, cut.start, cut.stop - cut.start)
    if cut.stop - cut.start == cut.length:
        return real
    padded = whole.new_zeros(part.shape)
    padded.narrow(cut.dimension, 0, cut.stop - cut.start).copy_(real)
    return padded


def shard_of(whole: Tensor, shard: Shard) -> Tensor:
    part, start, stop, _ = shard
    return part_of(whole, part).flatten()[start:stop]


def size(x: Tensor) -> float:
    """The root mean square; zero of nothing."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _finite(error: float) -> float:
    return error if error == error else float("inf")


def _median_spread(tables: list[dict[Key, Tensor]]) -> float:
    *rounded, exact = tables
    found = []
    for key, true in exact.items():
        scale = size(true)
        if scale and true.ndim:
            found.append(max(size(table[key].double() - true.double()) for table in rounded if key in table) / scale)
    return median(found) if found else 0.0
