"""Islands: clusters that train one model together and share only a slow link (streaming DiLoCo), as pure data: the
table `[islands]`, which part of the model is synchronised when, and in how many bytes.

The model is cut into fragments of whole blocks, embedding and head, and each fragment, flattened tensor by tensor, into
blocks of 256 elements. A block is what is rounded together and what travels; none of this depends on a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from cuboid.errors import UserError, either
from cuboid.spec.coding import check_types, require_at_most, require_in_range
from cuboid.spec.layout import parse_weights
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import Declared, units

BLOCK = 256
"""Elements that have one scale where they travel in 8 or 4 bits."""
BITS = (4, 8, 16, 32)
MOST_ISLANDS = 1024
MOST_PARTS = 1024
"""That an island takes in a step."""


@dataclass(frozen=True, kw_only=True)
class IslandsSpec:
    """Clusters that train one model together and share only a slow link: each takes its own optimizer steps, and the
    way the islands have come on average is what an outer optimizer steps along."""

    count: int = 1
    """Islands, each with a layout of its own; 1: none, and nothing else in this table counts."""
    batch_weights: str = ""
    """What part of the data each island takes, such as 3:1 where the first one is three times as fast as the second:
    so much larger is its own `training.global_batch`. Empty: all islands have equal batches."""
    every: int = 32
    """Steps of each island between two synchronisations of one fragment."""
    ramp_steps: int = 0
    """Steps in which the distance between synchronisations grows to `every`, from one step on, by doubling: from half
    of them on it is half of that, from a quarter a quarter. Meanwhile the outer optimizer has `ramp_rate` and no
    momentum. 0: the distance is `every` from the first step."""
    ramp_rate: float = 1.0
    """Learning rate of the outer optimizer in these steps: 1 averages the islands, more makes up for the smaller steps
    that their mean takes, as what each has learned from its own noise is not in it."""
    fragments: int = 1
    """Parts of the model, equally large as far as blocks go, that are synchronised one after another, spread over
    `every` steps."""
    delay: int = 0
    """Steps that a synchronisation may take while the training continues; 0: it waits for each."""
    mix: float = 0.5
    """With a delay: how far weights move to the outer ones; what is left is what they have learned meanwhile. Without a
    delay they move all the way."""
    rate: float = 1.0
    """Learning rate of the outer optimizer, SGD with Nesterov momentum."""
    momentum: float = 0.5
    """… and its momentum. More, such as 0.9 with a rate of 0.7, is for steps of very many tokens: it amplifies what
    islands agree on, and the noise of small batches with it."""
    bits: int = 32
    """Of each number on the wire: 32 (as master weights are kept), 16 (bf16), 8 or 4 (with a scale for each 256; what
    rounding loses is sent with the next synchronisation)."""
    quorum: int = 1
    """The fewest islands that synchronise without the others."""
    grace_seconds: float = 60.0
    """How long these wait for the others. Who comes later is not waited for: its steps count in the next
    synchronisation that it is in time for."""

    def __post_init__(self) -> None:
        check_types(self, "islands")
        require_in_range(self, "islands", ("count", "every", "fragments", "quorum"), low=1)
        require_in_range(self, "islands", ("ramp_steps", "delay", "momentum", "grace_seconds"), low=0)
        require_at_most(
            {"count": MOST_ISLANDS, "every": 10**6, "ramp_steps": 10**9, "fragments": 10**4, "grace_seconds": 10**6},
            self,
            "islands",
        )
        if self.bits not in BITS:
            raise UserError(f"islands.bits={self.bits} is unknown; use {either(map(str, BITS))}")
        if self.delay >= self.every and self.delay:
            raise UserError(
                f"islands.delay={self.delay} is not over before the fragment is due again, every={self.every} steps; "
                f"use delay={self.every - 1} or less"
            )
        if 0 < self.ramp_steps < self.every:
            raise UserError(
                f"islands.ramp_steps={self.ramp_steps} are over before a distance of every={self.every} steps; use "
                f"ramp_steps={8 * self.every}, or 0 for none"
            )
        if not 0 < self.mix <= 1:
            raise UserError(f"islands.mix={self.mix:g} is no fraction that moves weights; use mix=0.5, at most 1")
        for name in ("rate", "ramp_rate"):
            if not 0 < (value := getattr(self, name)) <= 10:
                raise UserError(
                    f"islands.{name}={value:g} is no learning rate of whole moves; use {name}=1, at most 10"
                )
        if self.momentum >= 1:
            raise UserError(f"islands.momentum={self.momentum:g} never forgets; use momentum=0.5, below 1")
        if self.quorum > self.count:
            raise UserError(f"islands.quorum={self.quorum} is more than count={self.count}; use that or less")
        if self.batch_weights:
            self._check_weights()

    def _check_weights(self) -> None:
        weights = parse_weights(self.batch_weights, "islands.batch_weights")
        if len(weights) != self.count:
            raise UserError(
                f"islands.batch_weights={self.batch_weights} has {len(weights)} weights for count={self.count}; use "
                "one for each island"
            )
        if not 1 <= min(weights) <= max(weights) <= MOST_PARTS:
            raise UserError(
                f"islands.batch_weights={self.batch_weights} has a weight that is not between 1 and {MOST_PARTS}; use "
                "3:1 or the like"
            )

    def weight_of(self, island: int) -> int:
        """How many parts of the data it takes in a step."""
        if not self.batch_weights:
            return 1
        return parse_weights(self.batch_weights, "islands.batch_weights")[island]

    def check_model(self, model: ModelSpec) -> None:
        most = model.layers + model.prediction_layers + 2
        if self.fragments > most:
            raise UserError(
                f"islands.fragments={self.fragments} is more than {model.name} has blocks, embedding and head; use "
                f"fragments={most} or less"
            )

    # Rounds: one fragment each, numbered over the whole training.

    def rounds_due(self, step: int, steps: int) -> range:
        """The rounds that begin after a step (counted from 1) of a training of `steps`. After the last all fragments
        have one, so that all islands end with the same weights."""
        first = _rounds_before(self, step)
        if step < steps:
            return range(first, _rounds_before(self, step + 1))
        return range(first, first + self.fragments)

    def due(self, round_: int, steps: int) -> int:
        """The step after which a round begins."""
        return min(_due(self, round_), steps)

    def applied(self, round_: int, steps: int) -> int:
        """The step after which its result is applied: before the fragment is due again, however short the distance."""
        due = _due(self, round_)
        return min(max(due, min(due + self.delay, _due(self, round_ + self.fragments) - 1)), steps)

    def outer_optimizer(self, round_: int) -> tuple[float, float]:
        """Rate and momentum of a round's step."""
        return (self.ramp_rate, 0.0) if _due(self, round_) < self.ramp_steps else (self.rate, self.momentum)

    def entered(self, round_: int, steps: int) -> int:
        """The step after which an island begins that enters before a round."""
        return self.due(round_ - 1, steps) if round_ else 0

    def fragment_of(self, round_: int) -> int:
        return round_ % self.fragments

    # Bytes.

    def block_bytes(self, precision: str) -> int:
        """Of one block on the wire. `precision`: of master weights."""
        if self.bits == 32:
            return BLOCK * (8 if precision == "float64" else 4)
        return BLOCK * self.bits // 8 + (4 if self.bits < 16 else 0)


# The ramp has phases, each as long as all before it together, with rounds twice as far apart: the one that ends at
# `ramp_steps` / 2^h has them `every` / 2^(h + 1) apart, so all have equally many. Behind it is one that never ends.


def _halvings(spec: IslandsSpec) -> int:
    """Of the distance, in the first phase."""
    return spec.every.bit_length() - 1 if spec.ramp_steps else 0


def _due(spec: IslandsSpec, round_: int) -> int:
    """The step after which a round begins in a training that never ends."""
    halvings, whole = _halvings(spec), spec.ramp_steps * spec.fragments
    number = (round_ + 1) * spec.every
    phase = min(max(number // whole - 1, 0), halvings) if whole else 0
    return -(-(number - phase * whole) // (spec.fragments << (halvings - phase)))


def _rounds_before(spec: IslandsSpec, step: int) -> int:
    """Rounds that begin before the end of this step."""
    halvings, done = _halvings(spec), step - 1
    phase = 0
    while phase < halvings and done << (halvings - phase - 1) >= spec.ramp_steps:
        phase += 1
    return ((done * spec.fragments << (halvings - phase)) + phase * spec.ramp_steps * spec.fragments) // spec.every


# Fragments.


@dataclass(frozen=True)
class Tensor:
    """A parameter in its fragment."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Of its blocks in the fragment."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.elements // BLOCK)


@dataclass(frozen=True)
class Fragment:
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def blocks(self) -> int:
        """The last one of a tensor is filled up with zeros."""
        return self.tensors[-1].first + self.tensors[-1].blocks


def _segments(model: ModelSpec) -> Iterator[tuple[str, str, Declared]]:
    """Segment, name and shape of every parameter once: of blocks, embedding and head."""
    for unit in units(model, range(model.layers + model.prediction_layers), first=True, last=True):
        for name, declared in unit.parameters.items():
            depth = 2 if name.startswith("layers.") else 1
            yield ".".join(name.split(".")[:depth]), name, declared


@lru_cache(maxsize=16)
def fragments_of(model: ModelSpec, count: int) -> tuple[Fragment, ...]:
    """The largest segment first, each to the fragment that has least so far. So neighbouring blocks, which are equally
    large, go to different fragments."""
    held: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for segment, name, declared in _segments(model):
        held.setdefault(segment, []).append((name, declared.shape))
    sizes = {segment: sum(prod(shape) for _, shape in table) for segment, table in held.items()}
    dealt: list[list[str]] = [[] for _ in range(count)]
    for segment in sorted(sizes, key=lambda each: -sizes[each]):  # sorting keeps the order of the model among equals
        min(dealt, key=lambda own: sum(sizes[each] for each in own)).append(segment)
    order = list(held)
    return tuple(_fragment([part for each in sorted(own, key=order.index) for part in held[each]]) for own in dealt)


def _fragment(parameters: list[tuple[str, tuple[int, ...]]]) -> Fragment:
    tensors, first = [], 0
    for name, shape in parameters:
        tensors.append(Tensor(name, shape, first))
        first += tensors[-1].blocks
    return Fragment(tuple(tensors))
