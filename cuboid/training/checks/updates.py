"""Updates: the optimizer's update of sampled elements is computed once more, in float64, from the gradients, moments
and weights before it; so is the update of an average of weights. Of optimizers that need whole matrices, only this is
checked: a weight with a gradient moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cuboid.checkpoint.state import AVERAGE
from cuboid.kernels.precision import join_halves
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard
from cuboid.training.checks.check import CheckDefaults, found_by_all, sampled_places
from cuboid.training.checks.hypotheses import UNKNOWN, step_and_decay
from cuboid.training.checks.located import Located, module_of
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult

ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-2}
"""How far off a weight may be, as a fraction of the learning rate."""
ROUNDING = {torch.float64: 2e-16, torch.float32: 1.2e-7}


@dataclass(frozen=True)
class Sampled:
    """Of the sampled elements of a shard, in float64 on the CPU."""

    weights: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


CLIPPED = ("attention.query.bias", "attention.key.bias")
"""Of what AdamW updates, what QK-clip scales."""


class Updates(CheckDefaults):
    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._before: dict[str, Sampled] = {}
        self._norm = self._own_norm = self._scale = 0.0
        self._taken = 0
        self._dtype = engine.units[0].accumulate
        self._sampled_step: SampledStep | None = None

    def begin(self, sampled: SampledStep) -> None:
        self._sampled_step = sampled

    def see_gradients(self, result: StepResult) -> None:
        optimizer = self._optimizer
        self._norm, self._scale, self._taken = result.gradient_norm, result.loss_scale or 1.0, optimizer.steps_taken
        self._before = self._sampled()
        if self._sampled_step is not None and self._sampled_step.covers_all:
            norms = torch._foreach_norm([shard.gradient for shard in self._shards()], 2, torch.float64)
            self._own_norm = math.hypot(*map(float, norms)) / self._scale

    def _shards(self) -> list[OptimizerShard]:
        """Those that an optimizer updates."""
        sampled = self._sampled_step
        units = [unit for unit in self._engine.units if unit.uses and (sampled is None or sampled.includes(unit))]
        return [shard for unit in units for shard in unit.optimizer_shards()]

    def _sampled(self) -> dict[str, Sampled]:
        """Now. One copy from the device for all of them."""
        kept: list[tuple[str, str, Tensor]] = []
        for shard in self._shards():
            name, size = shard.part.name, shard.stop - shard.start
            kept += [(name, "weights", _weights(shard, size)), (name, "gradient", _sampled(shard.gradient, size))]
            state = self._optimizer.state_of(shard).items()
            kept += [(name, kind, _sampled(x, size)) for kind, x in state if x.numel() == size]
        if not kept:
            return {}
        values = torch.cat([x.to(self._engine.device) for *_, x in kept]).cpu().double()
        found: dict[str, dict[str, Tensor]] = {}
        parts = torch.split(values, [len(x) for *_, x in kept])
        for (name, kind, _), x in zip(kept, parts, strict=True):
            found.setdefault(name, {})[kind] = x
        return {
            name: Sampled(own.pop("weights"), own.pop("gradient") / self._scale, own) for name, own in found.items()
        }

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        now, shards = self._sampled(), self._shards()
        found: list[Located] = []
        if shards and not self._are_right(shards, now, step):
            for shard in shards:
                found += list(self._wrong(shard, self._before[shard.part.name], now[shard.part.name], step))
        return found_by_all(engine, found)

    def _are_right(self, shards: list[OptimizerShard], now: dict[str, Sampled], step: int) -> bool:
        """All at once, where all are AdamW's; False where one may be wrong, or where another optimizer updates them."""
        before, after = ([kept[shard.part.name] for shard in shards] for kept in (self._before, now))
        spec, run = self._engine.run.optimizer, self._engine.run
        if spec.is_own or spec.average or not all("exp_avg" in each.state for each in before):
            return False
        counts = torch.tensor([len(each.weights) for each in before])

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

        def together(of: Callable[[Sampled], Tensor]) -> Tensor:
            return torch.cat([of(each) for each in before])

        state = {kind: together(lambda each, kind=kind: each.state[kind]) for kind in ("exp_avg", "exp_avg_sq")}  # type: ignore[misc]
        whole = Sampled(together(lambda each: each.weights), together(lambda each: each.gradient), state)
        rate = learning_rate(run.learning_rate, step - 1, run.training.steps)
        rates = spread([rate * shard.part.rate_factor for shard in shards])
        held = 1 - spread([rate * spec.weight_decay * (len(shard.part.full_shape) > 1) for shard in shards])
        right = self._moved(whole, rates, held)
        # The bound of each shard alone, or a closer one: where it is exceeded, shards are compared one by one.
        apart = (torch.cat([each.weights for each in after]) - right).abs()
        return bool((apart <= ALLOWED[self._dtype] * rates + 4 * ROUNDING[self._dtype] * whole.weights.abs()).all())

    def _wrong(self, shard: OptimizerShard, before: Sampled, now: Sampled, step: int) -> Iterator[Located]:
        spec, run = self._engine.run.optimizer, self._engine.run
        dtype, after = self._dtype, now.weights
        rate = learning_rate(run.learning_rate, step - 1, run.training.steps) * shard.part.rate_factor
        place = (step, None, self._engine.groups.world.index)
        name = shard.part.name
        clipped = spec.qk_clip > 0 and name.endswith(CLIPPED)  # scaled once more, behind the update
        if "exp_avg" in before.state and not spec.is_own and not clipped:
            right = self._adamw(before, rate, shard)
            unit = rate or 1.0
            allowed = ALLOWED[dtype] + 4 * ROUNDING[dtype] * float(before.weights.abs().max()) / unit
            error = float((after - right).abs().max()) / unit
            if not error <= allowed:
                cause = self._cause(before, after, right, rate, shard)
                error = error if error == error else math.inf
                yield Located(name, module_of(name), "update", *place, error, allowed, cause)
                return
        elif rate and bool(before.gradient.any()) and torch.equal(after, before.weights):
            yield Located(name, module_of(name), "update", *place, 1.0, 0.0, "not updated, though it has a gradient")
            return
        yield from self._wrong_average(shard, before, now, step)

    def _adamw(
        self,
        before: Sampled,
        rate: float,
        shard: OptimizerShard,
        clips: bool = True,
        moments: bool = True,
        corrects: bool = True,
        decays: bool | None = None,
        by_own_norm: bool = False,
        more: int = 0,
    ) -> Tensor:
        """Weights after the update, or after one with a bug. `more`: updates that are counted too many."""
        if decays is None:
            decays = len(shard.part.full_shape) > 1
        decay = self._engine.run.optimizer.weight_decay if decays else 0.0
        held = 1 - rate / shard.part.rate_factor * decay
        return self._moved(before, rate, held, clips, moments, corrects, by_own_norm, more)

    def _moved(
        self,
        before: Sampled,
        rate: float | Tensor,
        held: float | Tensor,
        clips: bool = True,
        moments: bool = True,
        corrects: bool = True,
        by_own_norm: bool = False,
        more: int = 0,
    ) -> Tensor:
        """`held`: the factor that weight decay leaves of the weights."""
        spec, clip = self._engine.run.optimizer, self._engine.run.training.gradient_clip
        norm = self._own_norm if by_own_norm else self._norm
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 and clips else 1.0
        gradient = before.gradient * scale
        first, second = before.state["exp_avg"] * moments, before.state["exp_avg_sq"] * moments
        first = first + (1 - spec.beta1) * (gradient - first)
        second = spec.beta2 * second + (1 - spec.beta2) * gradient.square()
        done = max(self._taken + 1 + more, 1) if corrects else 10**7
        mean = first / (1 - spec.beta1**done)
        root = second.sqrt() / math.sqrt(1 - spec.beta2**done) + spec.epsilon
        return before.weights * held - rate * mean / root

    def _cause(self, before: Sampled, after: Tensor, right: Tensor, rate: float, shard: OptimizerShard) -> str:
        if not bool(after.isfinite().all()):
            return "not a number"
        is_matrix = len(shard.part.full_shape) > 1
        apart = float((after - right).norm())
        decay = "no weight decay" if is_matrix else "weight decay on a parameter that has none"
        hypotheses = (
            ("not updated", before.weights),
            ("not clipped", self._adamw(before, rate, shard, clips=False)),
            ("clipped by the norm of this rank's own gradients", self._adamw(before, rate, shard, by_own_norm=True)),
            ("moments were lost: those of the steps before are zero", self._adamw(before, rate, shard, moments=False)),
            ("no bias correction", self._adamw(before, rate, shard, corrects=False)),
            (decay, self._adamw(before, rate, shard, decays=not is_matrix)),
            *(
                (f"bias correction of {updates} updates in place of {self._taken + 1}: the step count is off", made)
                for more in (1, -1, 2)
                if (updates := self._taken + 1 + more) > 0
                for made in [self._adamw(before, rate, shard, more=more)]
            ),
        )
        for cause, made in hypotheses:
            if float((after - made).norm()) <= 0.02 * apart:
                return cause
        moved, should = after - before.weights, right - before.weights
        decayed = -rate / shard.part.rate_factor * self._engine.run.optimizer.weight_decay * before.weights * is_matrix
        cause = step_and_decay(moved, should - decayed, decayed, 0.02)
        if cause:
            return cause
        return f"{UNKNOWN}; moments or gradient of another shard, or of another step"

    def _wrong_average(self, shard: OptimizerShard, before: Sampled, now: Sampled, step: int) -> Iterator[Located]:
        decay = self._engine.run.optimizer.average
        if not decay or AVERAGE not in before.state:
            return
        average, moved, after = before.state[AVERAGE], now.state[AVERAGE], now.weights
        right = average + (1 - decay) * (after - average)
        scale = float((after - average).abs().max()) * (1 - decay)
        apart = float((moved - right).abs().max())
        dtype = self._dtype
        allowed = ALLOWED[dtype] * scale + 4 * ROUNDING[dtype] * float(after.abs().max())
        if apart <= allowed or not scale:
            return
        cause = UNKNOWN
        hypotheses = (
            ("not moved", average),
            ("it took in weights before the update: stale", average + (1 - decay) * (before.weights - average)),
            ("it moves away from the weights", average - (1 - decay) * (after - average)),
        )
        for text, made in hypotheses:
            if float((moved - made).abs().max()) <= max(0.02 * apart, allowed):
                cause = text
                break
        name, place = shard.part.name, (step, None, self._engine.groups.world.index)
        yield Located(f"average of {name}", module_of(name), "update", *place, apart / scale, allowed / scale, cause)


def _sampled(x: Tensor, size: int) -> Tensor:
    return x.detach().flatten()[sampled_places(size, x.device)]


def _weights(shard: OptimizerShard, size: int) -> Tensor:
    if not shard.is_halved or shard.weight is None:
        return _sampled(shard.kept, size)
    kept = _sampled(shard.kept, size).to(shard.weight.device)
    return join_halves(_sampled(shard.weight.view(torch.int16), size), kept)
