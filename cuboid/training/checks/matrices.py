"""Matrices: one matrix that Muon has updated is gathered from all ranks that keep elements of it, and orthogonalised
once more. Each check takes the next matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cuboid.kernels.newton_schulz import orthogonalize
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.grad_norm import answers_for
from cuboid.parallel.parallelize import DTYPES, Engine
from cuboid.parallel.zero import OptimizerShard
from cuboid.spec.matrix_owners import Matrix, stage_buckets, wire_precision
from cuboid.training.checks.check import CheckDefaults, found_by_all
from cuboid.training.checks.hypotheses import UNKNOWN, fitted_factor, named_factor
from cuboid.training.checks.located import Located, module_of
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.own_optimizer import load_matrix_function
from cuboid.training.step import StepResult

LARGEST = 2**24
"""Elements of a parameter that is gathered."""
ALLOWED = {"float64": 1e-6, "float32": 0.01}
"""Of the update's size; in 16 bits the iteration itself rounds, and a tenth is allowed."""


class Matrices(CheckDefaults):
    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine, self._optimizer, self._count = engine, optimizer, 0
        self._matrices: list[Matrix] = []
        self._whole: dict[str, Tensor] = {}
        self._scale = 1.0
        spec = engine.run.optimizer
        # What NorMuon keeps by row and QK-clip does afterwards is not computed again.
        if spec.is_muon and not spec.normuon and not spec.qk_clip:
            shapes = {part.name: part.full_shape for unit in engine.units for part in unit.parts}
            buckets = stage_buckets(engine.run, engine.groups.coordinates.pp)
            matrices = [matrix for bucket in buckets for matrix in bucket]
            self._matrices = [each for each in matrices if math.prod(shapes[each.parameter]) <= LARGEST]

    @property
    def _matrix(self) -> Matrix:
        return self._matrices[self._count % len(self._matrices)]

    def see_gradients(self, result: StepResult) -> None:
        if not self._matrices:
            return
        clip, norm = self._engine.run.training.gradient_clip, result.gradient_norm
        self._scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self._scale /= result.loss_scale or 1.0
        self._whole = self._gathered(("weight", "gradient", "momentum"))

    def _gathered(self, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        """The matrix's parameter, its gradient and momentum, whole: each rank of the stage puts in what it answers for,
        and the sum has everything."""
        engine, name = self._engine, self._matrix.parameter
        shape = next(part.full_shape for unit in engine.units for part in unit.parts if part.name == name)
        whole = torch.zeros(len(kinds), *shape, dtype=engine.units[0].accumulate, device=engine.device)
        for unit in engine.units:
            for shard in unit.optimizer_shards():
                part, cut = shard.part, shard.part.slice
                if part.name != name or not answers_for(engine, unit, part):
                    continue
                for kind, into in zip(kinds, whole, strict=True):
                    flat = into.new_zeros(part.size)
                    flat[shard.start : shard.stop] = self._of(shard, kind).detach().flatten().to(into)
                    real = flat.view(part.shape).narrow(cut.dimension, 0, cut.stop - cut.start)
                    into.narrow(cut.dimension, cut.start, cut.stop - cut.start).add_(real)
        return dict(zip(kinds, all_reduce(whole, engine.groups.stage).unbind(), strict=True))

    def _of(self, shard: OptimizerShard, kind: str) -> Tensor:
        if kind == "weight":
            return shard.master
        return shard.gradient if kind == "gradient" else self._optimizer.state_of(shard)["momentum_buffer"]

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        if not self._matrices:
            return found_by_all(engine, [])
        found = self._wrong(self._gathered(("weight",))["weight"], step)
        self._count += 1
        return found_by_all(engine, found)

    def _wrong(self, after: Tensor, step: int) -> list[Located]:
        run, matrix = self._engine.run, self._matrix
        spec = run.optimizer
        rate = learning_rate(run.learning_rate, step - 1, run.training.steps)

        def rows(x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            return torch.cat([flat[start:stop] for start, stop in matrix.runs]).double()

        gradient = rows(self._whole["gradient"]) * self._scale
        before, momentum = rows(self._whole["weight"]), rows(self._whole["momentum"])
        momentum = momentum + (1 - spec.momentum) * (gradient - momentum)
        lead = gradient + spec.momentum * (momentum - gradient) if spec.nesterov else momentum
        wire = lead.to(self._engine.device, DTYPES[wire_precision(run)])
        if spec.matrix_function:
            orthogonal = load_matrix_function(spec.matrix_function)(wire.unsqueeze(0))[0]
        else:
            orthogonal = orthogonalize(wire.unsqueeze(0), steps=spec.newton_schulz_steps)[0]
        size = _factor(spec.update_scale, matrix.rows, matrix.columns)
        right = -rate * spec.matrix_rate * size * orthogonal.double()
        observed = rows(after) - before * (1 - rate * spec.weight_decay)
        scale = float(right.norm()) or 1.0
        error, allowed = float((observed - right).norm()) / scale, ALLOWED.get(run.training.precision, 0.1)
        if error <= allowed or not rate:
            return []
        factor = fitted_factor(observed, right)
        cause = UNKNOWN
        if float((observed - factor * right).norm()) <= 0.1 * float((observed - right).norm()):
            cause = named_factor(factor, run, run.micro_batches, exact=False) or f"factor {factor:.4g} of the update"
        elif abs(float(observed.norm()) / scale - 1) < 0.5:
            cause = "another matrix was orthogonalised: a part of it, or with other momentum"
        name, rank = matrix.parameter, self._engine.groups.world.index
        return [Located(name, module_of(name), "update", step, None, rank, error, allowed, cause)]


def _factor(scale: str, rows: int, columns: int) -> float:
    """What multiplies an orthogonal matrix."""
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns) if scale == "spectral" else math.sqrt(max(1.0, rows / columns))
