"""Forward and backward passes of a step as one CUDA graph, and its update as another: the host starts each with one
call.

It pays where kernels are shorter than what the host takes to start them, in small models, where the GPU would wait; and
a little, by shorter gaps between kernels, wherever there is memory to spare.

Of several ranks the graph holds NCCL's collectives too, over communicators that the steps before it have made. All
ranks capture in the same step, or none does. No collective may cross the border of a graph: parameters that ZeRO 1 and
2 gather after an update are waited for before the next one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.parallel.collectives import all_reduce_maximum
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.training.optimizer import Optimizer

WARM_UP = 2
"""Steps before a graph is made: kernels are compiled and chosen in the first, the second is timed."""
WAITING = 0.1
"""The host is what holds a step up if the GPU is done this soon after it, as a share of the step."""


@dataclass(frozen=True)
class Passes:
    """What forward and backward leave, beside gradients; of this rank."""

    tokens: Tensor
    """With labels, of the global batch."""
    loss: Tensor
    """Summed over tokens."""
    square: Tensor
    """Of the gradient's norm, in fp16 still with the loss scale."""


RunPasses = Callable[[list[RankBatch], Tensor], Passes]
"""From what the rank sees of its micro-batches and the loss scale."""


def make_passes(engine: Engine, optimizer: Optimizer, plain: RunPasses) -> RunPasses:
    """`plain`: the passes as the host starts them, kernel by kernel. `optimizer`: updates from what they leave."""
    asked = engine.run.training.cuda_graphs
    if asked == "on" and engine.device.type != "cuda":
        raise UserError("training.cuda_graphs=on needs a GPU; use cuda_graphs=auto")
    possible = engine.device.type == "cuda" and not engine.run.obstacle_to_graphs
    if possible and engine.groups.world.size > 1 and not engine.groups.world.is_nccl:
        if asked == "on":
            raise UserError("training.cuda_graphs=on needs one rank or NCCL between ranks; use cuda_graphs=auto")
        possible = False
    return plain if asked == "off" or not possible else CapturedPasses(engine, plain, optimizer, always=asked == "on")


class CapturedPasses:
    def __init__(self, engine: Engine, plain: RunPasses, optimizer: Optimizer, always: bool) -> None:
        self._engine = engine
        self._plain = plain
        self._optimizer = optimizer
        self._pays: bool | None = True if always else None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[list[RankBatch], Tensor]
        self._outputs: Passes
        self._is_open = False
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        """Those of the graph, while a step that is no graph has others."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A step inside of this is no graph, neither its passes nor its update: somebody looks on."""
        self._is_open = self._optimizer.is_open = True
        try:
            yield
        finally:
            self._is_open = self._optimizer.is_open = False

    def __call__(self, batches: list[RankBatch], factor: Tensor) -> Passes:
        if self._is_open:
            if self._graph is not None and not self._gradients:
                parameters = [each for unit in self._engine.units for each in unit.parameters.values()]
                self._gradients = [(parameter, parameter.grad) for parameter in parameters]
            return self._plain(batches, factor)
        self._calls += 1
        # The first step compiles kernels and opens communicators, neither of which a capture allows.
        if self._calls < WARM_UP or self._pays is False:
            return self._plain(batches, factor)
        if self._calls == WARM_UP:
            return self._timed(batches, factor)
        if self._graph is None:
            self._capture(batches, factor)
        return self._replay(batches, factor)

    def _timed(self, batches: list[RankBatch], factor: Tensor) -> Passes:
        torch.cuda.synchronize()
        start = time.perf_counter()
        passes = self._plain(batches, factor)
        started = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if self._pays is None:
            # If the device is done as soon as the host is, it waited for the host all along.
            waits = end - started < WAITING * (end - start)
            # What one rank gains with memory to spare is 0.3 %. Several would pay for it: the flight recorder does not
            # see collectives inside a graph, so a hang could not be named by its collective.
            alone = self._engine.groups.world.size == 1
            self._pays = self._everywhere(waits or (alone and _has_room()))
        return passes

    def _everywhere(self, here: bool) -> bool:
        """Whether it is so on all ranks."""
        refusals = torch.tensor(int(not here), device=self._engine.device)
        return not all_reduce_maximum(refusals, self._engine.groups.world).item()

    def _capture(self, batches: list[RankBatch], factor: Tensor) -> None:
        """Nothing is computed yet. What the passes leave on the host, above all which tensors are the gradients, stays
        as it is from then on."""
        # A graph reads fixed addresses: each step's tokens are copied into these.
        copies = [batch.cloned() for batch in batches]
        self._inputs = (copies, factor.clone())
        for unit in self._engine.units:
            unit.settle_gather()
            unit.begin_step(len(batches))  # lets gradients go that the graph will have its own memory for
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, which save checkpoints or read data, may continue with what would spoil a graph of their own.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = self._plain(*self._inputs)
        self._optimizer.capture()

    def _replay(self, batches: list[RankBatch], factor: Tensor) -> Passes:
        assert self._graph is not None
        copies, kept_factor = self._inputs
        for copy, batch in zip(copies, batches, strict=True):
            for own, new in zip(copy.inputs, batch.inputs, strict=True):
                own.copy_(new)
        # The loss scale changes between steps; it is an input like the tokens.
        kept_factor.copy_(factor)
        for unit in self._engine.units:
            unit.settle_gather()
        # An update that is no graph, as one that is measured, reads the gradients where the parameters say they are.
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        self._graph.replay()
        # The next step overwrites these.
        return Passes(self._outputs.tokens.clone(), self._outputs.loss.clone(), self._outputs.square.clone())


def _has_room() -> bool:
    """A graph keeps its memory to itself: whatever else the run computes, such as an evaluation, needs as much again at
    most."""
    free, _ = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_reserved() < free
