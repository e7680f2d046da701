"""AdamW, AdamW with Muon for matrices, or an optimizer of one's own, on the optimizer shards this rank keeps, with
clipping by the norm of the whole gradient.

On a GPU the update is one compiled pass over memory per run of neighbouring shards: it reads the gradient in whatever
precision it was computed, scales it, updates master weight and moments, and writes the weight the matmuls use.
Learning rate, clipping and the decision to leave a step out are numbers on the device, so the host never waits for
them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from cuboid.checkpoint.shards import ShardedTensor
from cuboid.checkpoint.state import AVERAGE
from cuboid.kernels.adjacent import in_runs
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.training.adamw import Elements, Kind, kind_of, named_moments, update_compiled, update_eagerly
from cuboid.training.average import WeightAverage
from cuboid.training.muon import MuonState
from cuboid.training.offload import OffloadedState
from cuboid.training.own_optimizer import OwnState

Numbers = dict[Kind, Tensor]
"""On the device, as the compiled update takes them."""
EVEN = 16
"""So many numbers of any kind fill the widest words that a kernel reads."""


class State(Protocol):
    """Where the moments lie."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int:
        """Held in CPU memory for a device that has its own."""

    def tensors(self, optimizer_shard: OptimizerShard) -> dict[str, Tensor]:
        """By name; what is written into them counts. One number per element, flat, or one number."""

    def visit(self, units: Sequence[Unit]) -> Iterator[list[Elements]]:
        """All that is to be updated, on the device; each lot must be updated before the next is asked for."""


class Watcher(Protocol):
    """Measures an update."""

    def around(self, unit: Unit, lot: list[Elements]) -> AbstractContextManager[None]: ...


class ResidentState:
    """Moments on the device, beside the weights."""

    host_bytes = 0

    def __init__(self, units: Sequence[Unit], others: Collection[str] = ()) -> None:
        """`others`: parameters that are updated elsewhere."""
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        for unit in units:
            optimizer_shards = [shard for shard in unit.optimizer_shards() if shard.part.name not in others]
            for optimizer_shard, first, second in zip(
                optimizer_shards, _zeros(optimizer_shards), _zeros(optimizer_shards), strict=True
            ):
                self._moments[optimizer_shard.part.name] = (first, second)

    @property
    def device_bytes(self) -> int:
        return sum(moment.nbytes for pair in self._moments.values() for moment in pair)

    def tensors(self, optimizer_shard: OptimizerShard) -> dict[str, Tensor]:
        return named_moments(self._moments[optimizer_shard.part.name])

    def visit(self, units: Sequence[Unit]) -> Iterator[list[Elements]]:
        yield [
            Elements.of(optimizer_shard, optimizer_shard.kept, *self._moments[optimizer_shard.part.name])
            for unit in units
            for optimizer_shard in unit.optimizer_shards()
            if optimizer_shard.part.name in self._moments
        ]


class Optimizer:
    def __init__(self, engine: Engine, spec: OptimizerSpec, state: State | None = None) -> None:
        """`state`: of these units; skipped, offloaded if the layout says so and the device has memory of its own."""
        self._units = engine.units
        self._spec = spec
        self._compiled = engine.compiled
        on_gpu = engine.device.type == "cuda"
        self._own = OwnState(self._units, engine.run) if spec.is_own else None
        self._muon = MuonState(engine) if spec.is_muon else None
        self._peaks, self._world = engine.peaks, engine.groups.world
        if state is None:
            away = engine.run.layout.offload and on_gpu
            moved = [] if self._own else self._units
            others = self._muon.names if self._muon else ()
            state = OffloadedState(moved, engine.device) if away else ResidentState(moved, others)
        self._state = state
        self.beside: Callable[[], dict[str, ShardedTensor]] = dict
        """What else checkpoints keep: the outer state of an island."""
        self._average = WeightAverage(self._units, spec.average, self._compiled) if spec.average else None
        self._steps = torch.zeros((), dtype=torch.float64, device=engine.device)
        # State that is here is updated at once: a stream of its own gained nothing (docs/lab.md), and what waits for it
        # keeps memory from being used again.
        apart = self._compiled and on_gpu and engine.run.layout.offload
        self._stream = torch.cuda.Stream(engine.device) if apart else None  # type: ignore[no-untyped-call]
        self._captures = False
        self.is_open = False
        """Whether the next update may not be a CUDA graph."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._numbers: Numbers = {}
        self._kinds = sorted({kind_of(part) for unit in self._units for part in unit.parts})

    def capture(self) -> None:
        """From now on gradients always lie in the same tensors, so that an update may be a CUDA graph; matrices that
        travel between ranks are none."""
        self._captures = self._muon is None

    def step(
        self,
        learning_rate: float,
        gradient_norm: Tensor,
        clip: float,
        finite: Tensor,
        loss_scale: Tensor | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`finite`: false skips the whole step. `loss_scale`: what the gradients are still multiplied by, though
        not their norm. All tensors are equal on all ranks. `watcher`: sees every update, none of which is then part of
        a CUDA graph."""
        scale = (clip / (gradient_norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(gradient_norm)
        if loss_scale is not None:
            scale = scale / loss_scale
        if self._compiled and self._own is None and self._muon is None:
            self._step_on_device(learning_rate, scale, finite, watcher)
            return
        if self._muon is not None:
            self._step_with_matrices(self._muon, learning_rate, scale, finite, watcher)
        else:
            self._step_on_host(learning_rate, scale, finite, watcher)
        for unit in self._units:
            unit.publish(written=True)

    def _step_on_device(self, learning_rate: float, scale: Tensor, finite: Tensor, watcher: Watcher | None) -> None:
        """Unit by unit in the order of the forward pass, where state is offloaded on a stream of its own: the next step
        begins with the units that are ready, while the state of others is still on its way."""
        numbers = self._numbers_of(learning_rate, scale, finite)
        if self._stream is None:
            self._update_in_line(numbers, watcher)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in numbers.values():
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            for unit in self._units:
                read = self._update_unit(unit, numbers, watcher)
                unit.publish(written=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
                unit.is_being_updated(done, read)
        if watcher is not None:
            torch.cuda.current_stream().wait_stream(self._stream)  # for what it has measured

    def _numbers_of(self, learning_rate: float, scale: Tensor, finite: Tensor) -> Numbers:
        """Counts the step."""
        spec = self._spec
        self._steps += finite
        size = learning_rate / (1 - spec.beta1**self._steps)
        correction = (1 - spec.beta2**self._steps).sqrt()
        plain, decay = torch.ones_like(size), torch.full_like(size, 1 - learning_rate * spec.weight_decay)
        return {
            (decays, factor): torch.stack(
                (scale.double(), decay if decays else plain, size * factor, correction, finite.double())
            )
            for decays, factor in self._kinds
        }

    def _update_in_line(self, numbers: Numbers, watcher: Watcher | None) -> None:
        if not self._captures or self.is_open or watcher is not None:
            for unit in self._units:
                self._update_unit(unit, numbers, watcher)
                unit.publish(written=True)
            return
        if self._graph is None:
            self._numbers = {kind: tensor.clone() for kind, tensor in numbers.items()}
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may continue: NCCL has one that looks at events.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for unit in self._units:
                    self._update_unit(unit, self._numbers)
        for kind, kept in self._numbers.items():
            kept.copy_(numbers[kind])
        self._graph.replay()
        for unit in self._units:
            unit.publish(written=True)

    def _update_unit(self, unit: Unit, numbers: Numbers, watcher: Watcher | None = None) -> list[Tensor]:
        """Returns the gradients."""
        read = []
        for lot in self._state.visit([unit]):
            with nullcontext() if watcher is None else watcher.around(unit, lot):
                for elements in in_runs(lot, Elements.is_followed_by, Elements.with_following):
                    update_compiled(elements, self._spec, numbers[elements.kind])
                    read.append(elements.gradient)
        return read

    def _step_with_matrices(
        self, muon: MuonState, learning_rate: float, scale: Tensor, finite: Tensor, watcher: Watcher | None
    ) -> None:
        """Muon's are measured all together: they travel so."""
        with ExitStack() as watched:
            if watcher is not None:
                for unit in self._units:
                    watched.enter_context(watcher.around(unit, muon.elements(unit)))
            muon.update(self._units, learning_rate, scale, finite)
        if not self._compiled:
            self._step_on_host(learning_rate, scale, finite, watcher)
        else:
            numbers = self._numbers_of(learning_rate, scale, finite)
            for unit in self._units:
                self._update_unit(unit, numbers, watcher)
        if self._peaks is not None:
            self._peaks.clip(self._units, self._spec.qk_clip, finite, self._world)

    def _step_on_host(self, learning_rate: float, scale: Tensor, finite: Tensor, watcher: Watcher | None) -> None:
        if not finite:
            return
        if self._own is not None:
            self._own.update(learning_rate, float(scale), None if watcher is None else watcher.around)
            self._steps += 1
            return
        # All at once is quicker; one by one, what is measured takes the memory of one.
        for units in [self._units] if watcher is None else [[unit] for unit in self._units]:
            for lot in self._state.visit(units):
                with nullcontext() if watcher is None else watcher.around(units[0], lot):
                    update_eagerly(lot, self._spec, learning_rate, self._steps, float(scale))
        self._steps += 1

    @property
    def optimizer_shards(self) -> list[OptimizerShard]:
        """Asked for anew each step: a shard's gradient may be another tensor each time."""
        return [optimizer_shard for unit in self._units for optimizer_shard in unit.optimizer_shards()]

    def state_of(self, optimizer_shard: OptimizerShard) -> dict[str, Tensor]:
        """What is kept of an optimizer shard beside its weights, by name; what is written into it counts once
        `set_steps_taken` is called. The host waits for it where it is on its way to its memory."""
        if self._muon is not None and optimizer_shard.part.name in self._muon.names:
            kept = self._muon.tensors(optimizer_shard)
        else:
            kept = (self._own or self._state).tensors(optimizer_shard)
        return kept if self._average is None else {**kept, AVERAGE: self._average.of(optimizer_shard)}

    def begin_average(self) -> None:
        """The average of weights, where one is kept, is the weights as they are now."""
        if self._average is not None:
            self._average.begin()

    def move_average(self, counts: Tensor) -> None:
        """When a step has changed all that it changes; `counts`: false skips it."""
        if self._average is not None:
            self._average.move(counts)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile the weights are their average."""
        assert self._average is not None
        self._average.swap()
        try:
            yield
        finally:
            self._average.swap()

    def rows(self) -> Iterator[tuple[str, int, list[tuple[int, Tensor]]]]:
        """What is kept by row of a parameter, on one rank of all."""
        return iter(()) if self._muon is None else self._muon.rows()

    @property
    def steps_taken(self) -> int:
        return int(self._steps)

    def set_steps_taken(self, steps: int) -> None:
        self._steps.fill_(steps)
        if self._own is not None:
            self._own.loaded(steps)
        if self._muon is not None and not steps:
            self._muon.forget()

    def state_bytes(self) -> int:
        """On the device, beside master weights."""
        beside = (self._muon, self._average)
        return (self._own or self._state).device_bytes + sum(state.device_bytes for state in beside if state)

    @property
    def host_bytes(self) -> int:
        """Of moments and master weights in CPU memory, where the device has its own."""
        return self._state.host_bytes


def _zeros(optimizer_shards: list[OptimizerShard]) -> list[Tensor]:
    """One after another, as a unit's weights lie, so that they can be updated together; but apart where one would begin
    at an odd place, which kernels do not read well."""
    sizes = [optimizer_shard.stop - optimizer_shard.start for optimizer_shard in optimizer_shards]
    kinds = [
        torch.float32 if optimizer_shard.is_halved else optimizer_shard.kept.dtype
        for optimizer_shard in optimizer_shards
    ]
    if not optimizer_shards or any(size % EVEN for size in sizes[:-1]):
        return [
            torch.zeros_like(optimizer_shard.kept, dtype=kind)
            for optimizer_shard, kind in zip(optimizer_shards, kinds, strict=True)
        ]
    return list(torch.split(torch.zeros(sum(sizes), dtype=kinds[0], device=optimizer_shards[0].kept.device), sizes))
