"""Muon on the matrices of blocks, on any layout.

Each rank moves the momentum of the elements it keeps, as ZeRO splits them. What is to be orthogonalised then travels to
the owner of its matrix (`spec.matrix_owners`), is orthogonalised there once, and travels back to all who keep elements
of it. Matrices travel in buckets: while one is orthogonalised, the next is on its way and the one before travels back.
None travels before the backward pass has ended, because clipping needs the norm of the whole gradient first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.newton_schulz import orthogonalize
from cuboid.parallel.collectives import Pending
from cuboid.parallel.owner_route import Route
from cuboid.parallel.parallelize import DTYPES, Engine
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.matrix_owners import Matrix, stage_buckets, wire_precision
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.training.adamw import Elements, read_master, write_master
from cuboid.training.own_optimizer import MatrixFunction, load_matrix_function

MOST_GROWTH = 4
"""How much larger than what Newton-Schulz makes an update is with even rows: noise must not become a whole one."""
BATCH = 2**26
"""Elements that are orthogonalised at once, at most: matrices of one shape together."""


class MuonState:
    """The momentum of the matrices that this rank keeps elements of, and their update."""

    def __init__(self, engine: Engine) -> None:
        run, group = engine.run, engine.groups.stage
        self._spec = run.optimizer
        self._wire = DTYPES[wire_precision(run)]
        self._compiled = engine.compiled
        own = self._spec.matrix_function
        self._orthogonal: MatrixFunction = (
            load_matrix_function(own) if own else partial(orthogonalize, steps=self._spec.newton_schulz_steps)
        )
        self._routes = [Route(bucket, group) for bucket in stage_buckets(run, engine.groups.coordinates.pp)]
        self.names = {matrix.parameter for route in self._routes for matrix, _ in route.kept}
        """Parameters that Muon updates."""
        self._momentum = {
            shard.part.name: torch.zeros(shard.stop - shard.start, dtype=unit.accumulate, device=shard.stored.device)
            for unit in engine.units
            for shard in unit.optimizer_shards()
            if shard.part.name in self.names
        }
        owned = [matrix for route in self._routes for matrix in route.own] if self._spec.normuon else []
        self._squares = {
            (matrix.parameter, matrix.runs): torch.zeros(
                matrix.rows, dtype=engine.units[0].accumulate, device=engine.device
            )
            for matrix in owned
        }
        """Of NorMuon: the mean square of each row, kept by the owner of its matrix."""
        shapes = {part.name: part.full_shape for unit in engine.units for part in unit.parts}
        self._heights = {matrix.parameter: math.prod(shapes[matrix.parameter][:-1]) for matrix in owned}

    @property
    def device_bytes(self) -> int:
        return sum(kept.nbytes for kept in (*self._momentum.values(), *self._squares.values()))

    def tensors(self, shard: OptimizerShard) -> dict[str, Tensor]:
        """As checkpoints call them."""
        return {"momentum_buffer": self._momentum[shard.part.name]}

    def rows(self) -> Iterator[tuple[str, int, list[tuple[int, Tensor]]]]:
        """What is kept by row, of each matrix by its owner: the parameter's name, its number of rows, and from which
        row on each tensor holds them."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for (name, runs), squares in self._squares.items():
            parts = torch.split(squares, [stop - start for start, stop in runs])
            found.setdefault(name, []).extend(zip((start for start, _ in runs), parts, strict=True))
        for name, held in found.items():
            yield f"row_avg_sq/{name}", self._heights[name], held

    def elements(self, unit: Unit) -> list[Elements]:
        """What the update of a unit reads and writes, for those who measure it."""
        return [
            Elements.of(shard, shard.kept, self._momentum[shard.part.name], self._momentum[shard.part.name])
            for shard in unit.optimizer_shards()
            if shard.part.name in self.names
        ]

    def update(self, units: Sequence[Unit], learning_rate: float, scale: Tensor, finite: Tensor) -> None:
        """`scale`: what gradients are multiplied by. `finite`: false changes nothing."""
        spec = self._spec
        rate = torch.full_like(scale, learning_rate * spec.matrix_rate, dtype=torch.float64)
        decay = torch.full_like(rate, 1 - learning_rate * spec.weight_decay)
        numbers = torch.stack((scale.double(), decay, rate, finite.double()))
        shards = {
            shard.part.name: shard
            for unit in units
            for shard in unit.optimizer_shards()
            if shard.part.name in self._momentum
        }
        # One bucket travels there and one back while the one between them is orthogonalised; each is let go at once.
        there: deque[tuple[Route, Pending]] = deque()
        back: deque[tuple[Route, Pending]] = deque()
        for ahead in (*self._routes, None, None):
            if ahead is not None:
                there.append((ahead, self._send(ahead, shards, numbers)))
            if len(there) > (ahead is not None):
                route, arriving = there.popleft()
                back.append((route, self._orthogonalize(route, arriving.wait(), finite)))
                del arriving
            if len(back) > (len(there) > 0):
                route, returning = back.popleft()
                self._apply(route, returning.wait(), shards, numbers)
                del returning

    def _send(self, route: Route, shards: dict[str, OptimizerShard], numbers: Tensor) -> Pending:
        """Move the momentum of a bucket's matrices, and send to the owner what comes of it."""
        lead, held = _passes(self._compiled)[0], (self._spec.momentum, self._spec.nesterov, self._wire)
        # A parameter's matrices are all in one bucket, so each momentum moves once.
        moved = {
            name: lead(self._momentum[name], shards[name].gradient, numbers, *held)
            for name in dict.fromkeys(matrix.parameter for matrix, _ in route.kept)
        }
        packed = []
        for matrix, span in route.sent:
            start = span.start - shards[matrix.parameter].start
            packed.append(moved[matrix.parameter][start : start + span.size])
        return route.start(packed, numbers.to(self._wire), back=False)

    def _orthogonalize(self, route: Route, received: Tensor, finite: Tensor) -> Pending:
        """The matrices that this rank owns, each once."""
        whole = {id(matrix): received.new_empty(matrix.rows * matrix.columns) for matrix in route.own}
        parts = torch.split(received, [span.size for _, span in route.received])
        for (matrix, span), values in zip(route.received, parts, strict=True):
            whole[id(matrix)][span.place : span.place + span.size] = values
        shapes: dict[tuple[int, int, int], list[Matrix]] = {}
        for matrix in route.own:
            shapes.setdefault((matrix.rows, matrix.columns, matrix.stripes), []).append(matrix)
        for (rows, columns, stripes), alike in shapes.items():
            factor = update_factor(self._spec, rows, columns)
            most = max(BATCH // (rows * columns), 1)
            for first in range(0, len(alike), most):
                some = alike[first : first + most]
                striped = torch.stack([whole[id(matrix)] for matrix in some])
                striped = striped.view(len(some), stripes, rows, columns // stripes)
                batch = striped.transpose(1, 2).reshape(len(some), rows, columns)
                result = self._orthogonal(batch)
                if self._squares:
                    result = self._even_rows(some, result, finite)
                result = result * factor
                result = result.reshape(len(some), rows, stripes, columns // stripes).transpose(1, 2)
                for matrix, values in zip(some, result.reshape(len(some), -1), strict=True):
                    whole[id(matrix)] = values
        packed = [whole[id(matrix)][span.place : span.place + span.size] for matrix, span in route.returned]
        return route.start(packed, received, back=True)

    def _even_rows(self, matrices: list[Matrix], orthogonal: Tensor, finite: Tensor) -> Tensor:
        """NorMuon: every row over the root of its mean square, and the whole as large as an orthogonal matrix; of a
        gradient that is rounding alone, as good as nothing like the update that came of it."""
        kept = [self._squares[matrix.parameter, matrix.runs] for matrix in matrices]
        squares = torch.stack(kept)
        exact = orthogonal.to(squares.dtype)
        moved = torch.lerp(squares, exact.square().mean(2), 1 - self._spec.beta2)
        even: Tensor = exact / (moved.sqrt() + self._spec.epsilon).unsqueeze(2)
        most = MOST_GROWTH * exact.norm(dim=(1, 2), keepdim=True)
        whole = most.clamp(max=math.sqrt(min(exact.shape[1:])))
        size = whole / even.norm(dim=(1, 2), keepdim=True).clamp(min=self._spec.epsilon)
        for target, values in zip(kept, torch.where(finite, moved, squares), strict=True):
            target.copy_(values)
        evened: Tensor = (even * size).to(orthogonal.dtype)
        return evened

    def forget(self) -> None:
        """What is kept by row."""
        for squares in self._squares.values():
            squares.zero_()

    def _apply(self, route: Route, received: Tensor, shards: dict[str, OptimizerShard], numbers: Tensor) -> None:
        """Write what came back into the master weights, and the weights that matmuls use."""
        names = dict.fromkeys(matrix.parameter for matrix, _ in route.kept)
        updates = {name: received.new_empty(shards[name].stop - shards[name].start) for name in names}
        parts = torch.split(received, [span.size for _, span in route.kept])
        for (matrix, span), values in zip(route.kept, parts, strict=True):
            start = span.start - shards[matrix.parameter].start
            updates[matrix.parameter][start : start + span.size] = values
        for name, update in updates.items():
            shard = shards[name]
            weight = shard.weight.view(torch.int16) if shard.is_halved and shard.weight is not None else shard.weight
            _passes(self._compiled)[1](shard.kept, weight, update, numbers)


def update_factor(spec: OptimizerSpec, rows: int, columns: int) -> float:
    """What multiplies an orthogonal matrix (rows: outputs, columns: inputs)."""
    if spec.update_scale == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if spec.update_scale == "spectral" else max(ratio, 1.0))


# Arithmetic on the elements that a rank keeps; compiled, each is one pass over memory. `numbers`: on the device, what
# gradients are multiplied by, the decay factor, the learning rate, and whether the step counts.


def _lead(
    momentum: Tensor, gradient: Tensor, numbers: Tensor, beta: float, nesterov: bool, wire: torch.dtype
) -> Tensor:
    """What is orthogonalised, after the momentum has moved."""
    scale, _, _, counts = numbers.to(momentum.dtype).unbind()
    clipped = gradient.to(momentum.dtype) * scale
    moved = torch.lerp(momentum, clipped, 1 - beta)
    lead = torch.lerp(clipped, moved, beta) if nesterov else moved.clone()
    momentum.copy_(torch.where(counts > 0, moved, momentum))
    return lead.to(wire)


def _write(kept: Tensor, weight: Tensor | None, update: Tensor, numbers: Tensor) -> None:
    """`weight`: as int16 where `kept` is."""
    master = read_master(kept, weight)
    _, decay, rate, counts = numbers.to(master.dtype).unbind()
    result = torch.where(counts > 0, master * decay - rate * update.to(master.dtype), master)
    write_master(result, kept, weight)


@cache
def _passes(compiled: bool) -> tuple[Any, Any]:
    if not compiled:
        return _lead, _write
    return torch.compile(_lead, dynamic=True, fullgraph=True), torch.compile(_write, dynamic=True, fullgraph=True)
