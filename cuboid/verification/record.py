"""What a step computes between its ends: activations where modules meet, their gradients, and weight gradients before
any sum over ranks.

Made only when a comparison has failed, in a second pass: by one process of every sample alone, by the ranks of every
micro-batch. Both sides use the same names, those of modules in the model for one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cuboid.model.attention import Attention
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.router import Routing
from cuboid.model.transformer import Transformer
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.stage import Segment
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.sharding import Part

PARTS = ("query", "key", "value", "mixed")
"""What enters attention between tokens, and what leaves it."""
FOLLOWED = (
    "tokens",
    "positions",
    "attention_norm",
    "attention",
    "attention_post_norm",
    "feed_forward_norm",
    "feed_forward.router",
    "feed_forward.shared",
    "feed_forward",
    "feed_forward_post_norm",
    "norm",
    "output",
)
"""Modules inside of segments whose results are kept."""

Shard = tuple[Part, int, int, Tensor]
"""Elements `start:stop` of a rank's part of a parameter, flat."""


def _kept(x: Tensor) -> Tensor:
    return x.detach().cpu().clone()


class Notes:
    """Activations and their gradients, by name and by what they are of: a sample or a micro-batch."""

    def __init__(self) -> None:
        self.forward: dict[tuple[str, int], Tensor] = {}
        self.gradient: dict[tuple[str, int], Tensor] = {}
        self.again: dict[tuple[str, int], Tensor] = {}
        """What was computed a second time, in the backward pass."""

    def see(self, name: str, index: int, x: Tensor) -> None:
        key = (name, index)
        if key in self.forward:
            self.again.setdefault(key, _kept(x))
            return
        self.forward[key] = _kept(x)
        if x.requires_grad:

            def keep(gradient: Tensor) -> None:
                self.gradient.setdefault(key, _kept(gradient))

            x.register_hook(keep)


def follow(module: nn.Module, prefix: str, see: Callable[[str, Tensor], None]) -> list[Callable[[], None]]:
    """Call `see` with every result inside of a segment that the list above names; returns what undoes that."""
    undo: list[Callable[[], None]] = []
    for path in FOLLOWED:
        try:
            child = module.get_submodule(path)
        except AttributeError:
            continue

        def hook(_: nn.Module, __: Any, result: Any, name: str = f"{prefix}.{path}") -> None:
            x = result.weights if isinstance(result, Routing) else result
            if isinstance(x, Tensor):
                see(name, x)

        undo.append(child.register_forward_hook(hook).remove)
        if isinstance(child, Attention | MultiLatentAttention):
            undo.append(_follow_mix(child, f"{prefix}.{path}", see))
    return undo


def _follow_mix(
    attention: Attention | MultiLatentAttention, name: str, see: Callable[[str, Tensor], None]
) -> Callable[[], None]:
    plain = attention.mix

    def mix(*arguments: Any) -> Tensor:
        for part, x in zip(PARTS, arguments[:3], strict=False):
            see(f"{name}.{part}", x)
        mixed = plain(*arguments)
        see(f"{name}.mixed", mixed)
        return mixed

    attention.mix = mix

    def undo() -> None:
        attention.mix = plain

    return undo


class SampleRecorder:
    """Of one process: `reference.Watch`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.notes = Notes()
        self.weight: dict[tuple[str, int], Tensor] = {}
        """The gradient of each parameter by sample."""
        self._place: int | None = None
        self._before: dict[str, Tensor] = {}

    def attach(self, model: nn.Module) -> None:
        self._model = model
        if not isinstance(model, Transformer):
            return
        segments: dict[str, nn.Module] = {"embedding": model.embedding}
        # Layers that predict further tokens are no part of the stream of the others, and share the head with it, in an
        # order of each schedule's own: of both, the gradients of weights are compared.
        segments |= {f"layers.{index}": model.layers[str(index)] for index in range(model.model.layers)}
        for name, module in segments.items():
            follow(module, name, self._see)
            module.register_forward_hook(lambda _, __, result, name=name: self._see(name, result))
        if model.predictions:
            return
        follow(model.head, "head", self._see)
        plain = model.head.summed_loss

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            result = plain(logits, labels)
            self._see("head", result)
            return result

        model.head.summed_loss = loss

    def _see(self, name: str, x: Tensor) -> None:
        if self._place is not None:
            self.notes.see(name, self._place, x)

    def begin_sample(self, step: int, place: int) -> None:
        self._place = place if step == self._step else None
        if self._place is not None:
            self._before = {
                name: parameter.grad.clone()
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None
            }

    def end_sample(self) -> None:
        if self._place is None:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                before = self._before.get(name)
                self.weight[name, self._place] = _kept(parameter.grad if before is None else parameter.grad - before)
        self._place = None


@dataclass
class RankRecord:
    """What one rank computed in the step that failed."""

    rank: int
    notes: Notes
    weights: list[Shard] = field(default_factory=list)
    """What its first forward pass computed with."""
    own: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Weight gradients by parameter and micro-batch, before any sum over ranks."""
    parts: dict[str, Part] = field(default_factory=dict)
    reduced: list[Shard] = field(default_factory=list)
    """Gradients as the optimizer gets them."""
    updated: list[Shard] = field(default_factory=list)
    """Master weights after the update."""
    published: list[Shard] = field(default_factory=list)
    """Weights that matmuls use from then on."""
    loss: float = 0.0
    gradient_norm: float = 0.0


class RankRecorder:
    """Attached to the engine of one rank for one step."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.record = RankRecord(rank, Notes())
        self._engine = engine
        # Passes of a pair run in two threads; the backward pass of a GPU in one of its own, which then sees the latest.
        self._of_thread: dict[int, int] = {}
        self._latest = 0
        self._before: dict[tuple[str, str], Tensor] = {}
        self._left: dict[str, int] = {}
        """How many times each unit will still be collected."""
        self._seen: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    @property
    def _now(self) -> int:
        return self._of_thread.get(threading.get_ident(), self._latest)

    def attach(self, micro_batches: int) -> None:
        """Before a step of so many micro-batches."""
        pipeline = self._engine.pipeline
        self._left = {unit.name: unit.uses * micro_batches for unit in self._engine.units}
        for kind, run in list(pipeline.runners.items()):
            pipeline.runners[kind] = self._noted(run)
            self._undo.append(lambda kind=kind, run=run: pipeline.runners.__setitem__(kind, run))  # type: ignore[misc]
        for stage in pipeline.stages.values():
            for segment in stage.segments:
                self._attach_segment(segment)
        for unit in self._engine.units:
            self._attach_unit(unit)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _noted(self, run: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def act(stage: int, micro_batch: int) -> None:
            self._of_thread[threading.get_ident()] = self._latest = micro_batch
            run(stage, micro_batch)
            # Where matmuls are put off, other weights have their gradients long before they are collected.
            if not self._engine.pipeline.pairs:
                for unit in self._engine.units:
                    self._note(unit)

        return act

    def _note(self, unit: Unit) -> None:
        """What has been added to the gradients of a unit belongs to the micro-batch that is being computed."""
        if self._left[unit.name] == 0:
            return  # on its way to other ranks, perhaps in place
        for name, parameter in unit.parameters.items():
            if parameter.grad is None:
                continue
            now, before = _kept(parameter.grad), self._before.get((unit.name, name))
            key, own = (name, self._now), now if before is None else now - before
            self._before[unit.name, name] = now
            self.record.own[key] = self.record.own[key] + own if key in self.record.own else own

    def _attach_segment(self, segment: Segment) -> None:
        plain = segment.run

        def run(x: Tensor, batch: Any) -> Tensor:
            self._see_weights(segment)
            result = plain(x, batch)
            self.record.notes.see(segment.name, self._now, result)
            return result

        segment.run = run
        self._undo.append(lambda: setattr(segment, "run", plain))
        # What the compiler has taken in is not looked into.
        if segment.module is not None and not self._engine.compiled:
            see: Callable[[str, Tensor], None] = lambda name, x: self.record.notes.see(name, self._now, x)  # noqa: E731
            self._undo += follow(segment.module, segment.name, see)

    def _see_weights(self, segment: Segment) -> None:
        for unit in segment.units:
            for part in unit.parts:
                if part.name not in self._seen:
                    self._seen.add(part.name)
                    values = unit.parameters[part.name].detach()
                    self.record.weights.append((part, 0, part.size, _kept(values).flatten()))

    def _attach_unit(self, unit: Unit) -> None:
        plain = unit.collect
        self.record.parts |= {part.name: part for part in unit.parts}

        def collect(reduces: bool = True) -> None:
            self._note(unit)
            self._left[unit.name] -= 1
            plain(reduces)
            for name, parameter in unit.parameters.items():
                self._before.pop((unit.name, name), None)
                if parameter.grad is not None and self._left[unit.name]:
                    self._before[unit.name, name] = _kept(parameter.grad)

        unit.collect = collect  # type: ignore[method-assign]
        self._undo.append(lambda: delattr(unit, "collect"))

    def see_gradients(self, loss: float, gradient_norm: float, factor: float) -> None:
        """After all sums over ranks. `factor`: what the gradients are multiplied by."""
        self.record.loss, self.record.gradient_norm = loss, gradient_norm
        self.record.reduced = self._shards(lambda shard: shard.gradient / factor)

    def see_update(self) -> None:
        """Every rank calls this: weights may have to be gathered."""
        self.record.updated = self._shards(lambda shard: shard.master)
        for unit in self._engine.units:
            unit.gather()
            for part in unit.parts:
                self.record.published.append((part, 0, part.size, _kept(unit.parameters[part.name]).flatten()))
            unit.release()

    def _shards(self, of: Callable[[OptimizerShard], Tensor]) -> list[Shard]:
        return [
            (shard.part, shard.start, shard.stop, _kept(of(shard)).flatten())
            for unit in self._engine.units
            for shard in unit.optimizer_shards()
        ]
