"""One pipeline stage: consecutive segments of the transformer, each gathered while in use and released after.

Autograd itself drives the backward half: an identity behind a segment gathers its parameters when the gradient
arrives, an identity before it releases them when the gradient leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from cuboid.model.split_backward import Deferral
from cuboid.parallel.groups import Groups
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.zero import Unit
from cuboid.spec.run import Run
from cuboid.telemetry.profiler_regions import NOTHING, REGIONS, close


class Reduction:
    """Of all segments of a rank one at most has its gradients on their way whole, as long as the next one computes. The
    sum of a shard over its replicas starts when that one is done, under the segments that follow. What starts when is
    decided by the order of the schedule's actions alone, which is the same on all replicas; where these have different
    numbers of micro-batches, and so different schedules, by the order of the units, last ones first."""

    def __init__(self, in_order: bool = False) -> None:
        """`in_order`: of the units, in which all replicas reduce them."""
        self._sent: list[Unit] = []
        self._in_order = in_order
        self._order: list[Unit] = []
        self._reduced = 0

    def keep_order(self, stages: Mapping[int, Stage]) -> None:
        """Once all stages of the rank are there. A tied embedding is used in two, and comes with the first of them."""
        segments = (segment for _, stage in sorted(stages.items(), reverse=True) for segment in stage.segments[::-1])
        used = [unit for segment in segments for unit in segment.units]
        self._order = [unit for place, unit in enumerate(used) if unit not in used[place + 1 :]]

    def begin(self, units: list[Unit]) -> None:
        if not self._in_order:
            self._send(units)
            return
        for unit in units:
            unit.collect(reduces=False)
        while self._reduced < len(self._order) and self._order[self._reduced].is_collected:
            self._send([self._order[self._reduced]])
            self._reduced += 1
        if self._reduced == len(self._order):
            self._reduced = 0

    def _send(self, units: list[Unit]) -> None:
        for unit in self._sent:
            unit.settle()
        self._sent = units
        for unit in units:
            if self._in_order:
                unit.start_reduction()
            else:
                unit.collect()


class Segment:
    """A module and the units its parameters lie in."""

    def __init__(
        self,
        name: str,
        run: Callable[[Tensor, RankBatch], Tensor],
        units: list[Unit],
        deferral: Deferral,
        reduction: Reduction,
        module: nn.Module | None = None,
    ) -> None:
        self.name = name
        self.run = run
        self.units = units
        self._reduction = reduction
        self.deferral = deferral
        self.module = module
        """What `run` calls, beside whatever is around it."""
        self.before: Segment | None = None
        self.after: Segment | None = None
        self._in_backward = False
        self.ends_in_backward = True
        """Whether a gradient leaves through its input; none does through tokens."""
        self._region: record_function | None = None
        self._gathers = any(unit.zero for unit in units)
        for unit in units:
            unit.uses += 1

    def gather(self) -> None:
        with REGIONS.around("gather weights of", self.name) if self._gathers else NOTHING:
            for unit in self.units:
                unit.gather()

    def release(self) -> None:
        for unit in self.units:
            unit.release()

    def start_gather(self) -> None:
        for unit in self.units:
            unit.start_gather()

    def collect(self) -> None:
        with REGIONS.around("reduce gradients of", self.name):
            self._reduction.begin(self.units)

    def begin_backward(self) -> None:
        self._in_backward = True
        self.deferral.owner = self
        self._region = REGIONS.open("backward of", self.name) if self.ends_in_backward else None
        self.gather()
        # Prefetch: the all-gather of the segment whose backward pass comes next runs under this one's.
        if self.before is not None:
            self.before.start_gather()

    def end_backward(self) -> None:
        """Weight gradients are complete now, or postponed; in the latter case `collect` comes with them."""
        if self._in_backward:
            self._in_backward = False
            self.release()
            if not self.deferral.active:
                self.collect()
            close(self._region)
            self._region = None


class _WhenGradientPasses(torch.autograd.Function):
    """An identity that calls back when the gradient comes through it."""

    @staticmethod
    def forward(context: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        context.act = act
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.act()
        return gradient, None


class Entrance:
    """Where the backward pass of an output enters. The output is not kept: once it is sent, nobody needs it.

    The gradient comes in through the graph. Given to `torch.autograd.backward`, its shape would be compared by
    `torch.fx`, whose import brings sympy: most of a second in every process."""

    def __init__(self, output: Tensor) -> None:
        self._given: list[Tensor] = []
        # An edge of the graph, not the tensor: activations of a stage that was sent on are freed at once.
        self._edge = get_gradient_edge(_Enter.apply(output, self._given))

    def backward(self, gradient: Tensor) -> None:
        self._given.append(gradient)
        torch.autograd.backward(self._edge)


class _Enter(torch.autograd.Function):
    """A number without meaning; what was given is the gradient of `x`."""

    @staticmethod
    def forward(context: Any, x: Tensor, given: list[Tensor]) -> Tensor:
        context.given = given
        return x.new_empty(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None]:
        return context.given.pop(), None


class Stage:
    """Segments in order. The last stage of the model ends in the head, whose segment returns the summed loss."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def append(self, segment: Segment) -> None:
        if self.segments:
            segment.before, self.segments[-1].after = self.segments[-1], segment
        self.segments.append(segment)

    def forward(self, x: Tensor, batch: RankBatch) -> Tensor:
        for segment in self.segments:
            segment.gather()
            # Prefetch of one segment: with two, ZeRO 3 would hold three at once.
            if segment.after is not None:
                segment.after.start_gather()
            segment.ends_in_backward = x.requires_grad
            if x.requires_grad:
                x = _WhenGradientPasses.apply(x, segment.end_backward)
            with REGIONS.around(segment.name):
                x = segment.run(x, batch)
            x = _WhenGradientPasses.apply(x, segment.begin_backward)
            # The backward pass gathers it again: between the two, ZeRO 3 holds a shard.
            segment.release()
        return x

    def backward(self, output: Entrance, gradient: Tensor) -> None:
        output.backward(gradient)
        for segment in reversed(self.segments):
            segment.end_backward()  # an embedding has no input whose gradient could end it

    @torch.no_grad()
    def weight_backward(self, postponed: dict[Any, list[Callable[[], None]]]) -> None:
        for segment in reversed(self.segments):
            with REGIONS.around("weight gradients of", segment.name):
                for work in postponed.get(segment, ()):
                    work()
            segment.collect()


# How large the residual stream is behind each block: one reduction over tokens × hidden a micro-batch, for which the
# host never waits.
#
# It is measured on what a block returns, outside of the compiled function, and takes no part in any gradient.


class Activations:
    """This rank's part; the sum over all ranks is the same on any layout."""

    def __init__(self, run: Run, groups: Groups, dtype: torch.dtype, device: torch.device, held: int) -> None:
        """`held`: elements of what a block returns on this rank, of a micro-batch."""
        layout, model = run.layout, run.model
        apart = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        self._of_micro_batch = self._elements = held * apart
        self._sequences = layout.micro_batch_of(groups.coordinates.dp)
        # Tensor ranks hold tokens of their own with sequence parallelism, else all of them hold the same.
        self._counts = run.layout.sequence_parallel or groups.tensor.index == 0
        self._last = model.layers - 1
        self._first = 0 if run.output.layer_norms else self._last
        self.squares = torch.zeros(model.all_layers, dtype=dtype, device=device)
        """Mean square over the global batch, by layer: of the last one, which the head reads, or of all if
        `output.layer_norms` says so; and of prediction layers."""

    @property
    def read_by_head(self) -> Tensor:
        return self.squares[self._last]

    def begin_step(self, sequences: int) -> None:
        """`sequences`: of the global batch."""
        self._elements = self._of_micro_batch * sequences // self._sequences
        self.squares.zero_()

    def add(self, layer: int, x: Tensor) -> Tensor:
        """`x` as it is: what a block returned for a micro-batch, measured if it is one of a training step."""
        if layer >= self._first and self._counts and torch.is_grad_enabled():
            with torch.no_grad():
                # Wider than x without a copy of it.
                norm = torch.linalg.vector_norm(x, dtype=self.squares.dtype)
                self.squares[layer] += norm.square() / self._elements
        return x
