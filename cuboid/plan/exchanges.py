"""Every exchange of a step as the engine makes it: what the ranks of each dimension send one another, to the byte.

The engine counts the same while it trains (`cuboid train --count-communication`), and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from cuboid.plan.parameters import TIED, units
from cuboid.plan.partition import partition
from cuboid.plan.slices import Part, kv_head_of_query, kv_part_count, lay_out, slice_of
from cuboid.spec.layout import V_SHAPED
from cuboid.spec.ledger import Kind, Ledger
from cuboid.spec.ranks import coordinates
from cuboid.spec.run import Run

ELEMENT = {"bf16": 2, "float32": 4, "float64": 8}
"""Precision -> bytes of a parameter or an activation."""


@dataclass(frozen=True)
class Exchange:
    """Equal exchanges of one step."""

    dimension: str
    kind: Kind
    ranks: int
    calls: int
    size: int
    """Bytes of each, as `spec.ledger` counts them."""
    what: str
    """What they carry, with the formula of their size."""


@dataclass(frozen=True)
class _Unit:
    """A unit as one rank holds it."""

    name: str
    parts: list[Part]
    uses: int
    shard: int
    """Elements each rank of the shard group keeps, padding included."""
    flat: int
    """Elements of all shards."""


def predicted_ledger(run: Run, rank: int) -> Ledger:
    """What a rank exchanges in a step, as the engine's own ledger will say."""
    ledger = Ledger()
    for exchange in exchanges(run, rank):
        ledger.add(exchange.dimension, exchange.kind, exchange.ranks, exchange.size, exchange.calls)
    return ledger


def exchanges(run: Run, rank: int) -> list[Exchange]:
    """All of a step; those that do not happen are left out."""
    return [exchange for exchange in _Step(run, rank).all() if exchange.ranks > 1 and exchange.calls]


class _Step:
    """One step of one rank."""

    def __init__(self, run: Run, rank: int) -> None:
        self.layout, self.model = run.layout, run.model
        self.micro_batches = run.micro_batches
        self.element = ELEMENT[run.training.precision]
        self.wide = max(self.element, 4)
        """Bytes of a gradient, a logit or a loss: never less than float32."""
        self.place = coordinates(rank, self.layout)
        self.tokens = self.layout.micro_batch * run.training.sequence // self.layout.cp
        self.stages = self.layout.stages_of(self.place.pp)
        self.first, self.last = 0 in self.stages, self.layout.stages - 1 in self.stages
        layers = partition(self.model, self.layout.stages, run.training.sequence)
        self.layers = [layer for stage in self.stages for layer in layers[stage]]
        copies = self.layout.dp * self.layout.cp
        self.shards = self.layout.shard_size * self.layout.cp if self.layout.zero else 1
        self.replicas = copies // self.shards
        self.units = [self._unit(*unit) for unit in self._unit_shapes()]

    def _unit_shapes(self) -> Iterator[tuple[str, dict[str, tuple[int, ...]], int]]:
        for unit in units(self.model, self.layers, self.first, self.last):
            yield unit.name, unit.shapes, unit.uses

    def _unit(self, name: str, shapes: dict[str, tuple[int, ...]], uses: int) -> _Unit:
        layout = self.layout
        parts = lay_out(
            shapes,
            lambda name, shape: slice_of(name, shape, self.model, layout.tp, self.place.tp, layout.sequence_parallel),
        )
        shard = -(-(parts[-1].offset + parts[-1].size) // self.shards)
        return _Unit(name, parts, uses, shard, shard * self.shards)

    def all(self) -> Iterator[Exchange]:
        yield from self._data()
        yield from self._tensor()
        yield from self._context()
        yield from self._partial_gradients()
        yield from self._pipeline()
        yield from self._control()

    def _data(self) -> Iterator[Exchange]:
        """Gradients summed over replicas, and parameters gathered from their shards."""
        zero, batches = self.layout.zero, self.micro_batches
        copies = self.layout.dp * self.layout.cp
        for unit in self.units:
            every = unit.uses * batches
            gradient = f"gradients of {unit.name}: {self.wide} B × {unit.flat:,}"
            parameter = f"parameters of {unit.name}: {self.element} B × {unit.flat:,}"
            if zero == 0:
                yield Exchange("data", "all-reduce", copies, 1, self.wide * unit.flat, gradient)
                continue
            scatters = every if zero >= 2 else 1
            gathers = 2 * every if zero == 3 else 1
            yield Exchange("shard", "reduce-scatter", self.shards, scatters, self.wide * unit.flat, gradient)
            yield Exchange("shard", "all-gather", self.shards, gathers, self.element * unit.flat, parameter)
            summed = f"shards of {unit.name}: {self.wide} B × {unit.shard:,}"
            yield Exchange("replicate", "all-reduce", self.replicas, 1, self.wide * unit.shard, summed)

    def _tensor(self) -> Iterator[Exchange]:
        """At the borders of every region that splits matrices. Recomputation runs a layer again up to its last product,
        so that all its borders but the last are crossed once more."""
        layout = self.layout
        again = layout.recompute != "none"
        size = self.element * self.tokens * self.model.hidden
        # Calls forward and backward, and again with recomputation.
        borders: dict[Kind, tuple[int, int, int]] = (
            {"all-gather": (2, 2, 2), "reduce-scatter": (2, 2, 1)}
            if layout.sequence_parallel
            else {"all-reduce": (2, 2, 1)}
        )
        for kind, (forward, backward, repeated) in borders.items():
            layers = len(self.layers) * (forward + backward + again * repeated)
            for name, calls in (("layers", layers), ("the embedding", self.first), ("the head", self.last)):
                yield Exchange("tp", kind, layout.tp, self.micro_batches * calls, size, f"{name}: {self._activation}")
        if self.last:
            for rows, what in ((1, "largest logit"), (2, "sum and logit of the label")):
                formula = f"{what}: {rows * self.wide} B × {self.tokens:,} tokens"
                bytes_each = rows * self.wide * self.tokens
                yield Exchange("tp", "all-reduce", layout.tp, self.micro_batches, bytes_each, formula)

    def _context(self) -> Iterator[Exchange]:
        """Heads for tokens inside, keys and values between; full recomputation runs all that is forward again."""
        layout, width = self.layout, self.model.head_dim
        inner, outer = layout.cp_inner, layout.cp // layout.cp_inner
        forward = len(self.layers) * self.micro_batches * (2 if layout.recompute == "full" else 1)
        backward = len(self.layers) * self.micro_batches
        heads = self.model.heads // layout.tp
        regular = kv_head_of_query(self.model, layout.tp, self.place.tp) is None
        shared = self.model.kv_heads // kv_part_count(self.model, layout.tp) if regular else heads
        shared = lcm(shared, inner)  # repeated, so that every rank gets those of its query heads
        token = f"{self.element} B × {self.tokens:,} tokens × {width} per head"
        for count, what in ((heads + 2 * shared, "query, key and value"), (heads, "output")):
            size = self.element * self.tokens * count * width
            yield Exchange("cp", "all-to-all", inner, forward + backward, size, f"{what} heads: {token} × {count}")
        # After the exchange of heads a rank has the tokens of its inner group and its part of the heads.
        size = self.element * self.tokens * 2 * shared * width
        what = f"keys and values, and their gradients: {token} × {2 * shared}"
        if layout.cp_method == "allgather":
            yield Exchange("cp", "all-gather", outer, forward + backward, outer * size, what)
            yield Exchange("cp", "reduce-scatter", outer, backward, outer * size, what)
        else:
            yield Exchange("cp", "send", outer, (outer - 1) * (forward + 2 * backward), size, what)

    @property
    def _activation(self) -> str:
        return f"{self.element} B × {self.tokens:,} tokens × {self.model.hidden:,} hidden"

    def _partial_gradients(self) -> Iterator[Exchange]:
        """Parameters held by several ranks that each see a part of what they do, and a tied embedding's two holders."""
        layout = self.layout
        index = (self.place.dp * layout.cp + self.place.cp) % self.shards
        for sharing, dimension, ranks in (
            ("tensor", "tp", layout.tp),
            ("kv", "kv", layout.tp // kv_part_count(self.model, layout.tp)),
        ):
            held = 0
            for unit in self.units:
                begin, end = index * unit.shard, (index + 1) * unit.shard
                for part in unit.parts:
                    if part.slice.sharing == sharing and part.slice.partial_gradient:
                        held += max(min(part.offset + part.size, end) - max(part.offset, begin), 0)
            what = f"gradients of what tensor ranks hold alike: {self.wide} B × {held:,}"
            yield Exchange(dimension, "all-reduce", ranks, int(held > 0), self.wide * held, what)
        if self.first != self.last:
            for unit in self.units:
                if unit.name == TIED:
                    what = f"gradient of the tied embedding: {self.wide} B × {unit.shard:,}"
                    yield Exchange("embedding", "all-reduce", 2, 1, self.wide * unit.shard, what)

    def _pipeline(self) -> Iterator[Exchange]:
        """An activation to the next stage and a gradient to the one before, where these are on other ranks."""
        layout = self.layout

        def holder(stage: int) -> int:
            return min(stage, 2 * layout.pp - 1 - stage) if layout.schedule in V_SHAPED else stage % layout.pp

        neighbours = [stage + step for stage in self.stages for step in (1, -1) if 0 <= stage + step < layout.stages]
        away = sum(holder(stage) != self.place.pp for stage in neighbours)
        split = layout.tp if layout.sequence_parallel else 1
        size = self.element * self.tokens // split * self.model.hidden
        over = f" / {split}" if split > 1 else ""
        what = (
            f"activations and gradients: {self.element} B × {self.tokens:,} tokens × {self.model.hidden:,} hidden{over}"
        )
        yield Exchange("pp", "send", layout.pp, self.micro_batches * away, size, what)

    def _control(self) -> Iterator[Exchange]:
        """What every rank must know: labelled tokens, loss and gradient norm."""
        layout = self.layout
        yield Exchange("data", "all-reduce", layout.dp * layout.cp, 1, 8, "labelled tokens: 8 B")
        yield Exchange("world", "all-reduce", layout.world_size, 1, 2 * self.wide, f"loss and norm: 2 × {self.wide} B")
