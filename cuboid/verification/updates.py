"""The first parameter that is wrong: as the step began, or after its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from cuboid.model.initialize import learning_rate_factor
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import groups
from cuboid.training.checks.hypotheses import RATE, UNKNOWN, Hypothesis, fitted_factor, named_factor, step_and_decay
from cuboid.training.checks.located import Located, module_of
from cuboid.training.learning_rate import learning_rate
from cuboid.verification.causes import first_cause
from cuboid.verification.evidence import Error, Evidence, Seen, part_of, shard_of, size
from cuboid.verification.follows import UPDATE, average_error, replayed
from cuboid.verification.muon_reference import MuonUpdates
from cuboid.verification.record import RankRecord, Shard
from cuboid.verification.reference import Tensors
from cuboid.verification.rounding import DECIDED, ROUNDOFF, TENSOR_ROUNDOFF, allowed, decided, walked


def first_weight(evidence: Evidence) -> Located | None:
    """What the first forward pass of the step computed with."""
    step = evidence.step
    now = evidence.before(evidence.follows, step)
    held = {(record.rank, shard[0].name): shard for record in evidence.ranks for shard in record.weights}
    for name in now:
        for record in evidence.ranks:
            shard = held.get((record.rank, name))
            if shard is None:
                continue
            seen = Seen(shard[3].double(), [shard_of(now[name].double(), shard)])
            # What updates before may differ by; less than one that is missing.
            before = evidence.before(evidence.follows, max(step - 1, 0))
            error = _weight_error(evidence, shard, seen, size(seen.right - shard_of(before[name].double(), shard)))
            if error.is_wrong:
                cause = _weight_cause(evidence, record.rank, shard, seen, step)
                told = error.error, error.allowed, cause
                return Located(name, module_of(name), "weights", step + 1, None, record.rank, *told)
    return None


def _weight_error(evidence: Evidence, shard: Shard, seen: Seen, moved: float) -> Error:
    """`moved`: by the last update."""
    scale = max(size(seen.right), evidence.run.learning_rate.peak)
    if seen.observed.shape != seen.right.shape:
        return Error(math.inf, 0.0)
    apart = size(seen.observed - seen.right)
    apart = apart if apart == apart else math.inf
    if not evidence.is_rounded:
        tolerance = 1e-9 if evidence.run.training.precision == "float64" else 1e-3
        return Error(apart / scale, tolerance)
    # ZeRO 3 may gather in fp8 what fp8 matmuls would round to it.
    rounding = TENSOR_ROUNDOFF.get(evidence.run.training.precision, ROUNDOFF)
    return Error(apart / scale, (0.5 * moved + 0.5 * rounding * scale) / scale)


def _weight_cause(evidence: Evidence, rank: int, shard: Shard, seen: Seen, step: int) -> str:
    """`step`: which begins with these weights."""
    part = shard[0]
    now = evidence.before(evidence.follows, step)[part.name].double()

    def hypotheses() -> Iterator[Hypothesis]:
        for back in range(1, step + 1):
            then = evidence.before(evidence.follows, step - back)[part.name].double()
            told = "by one step" if back == 1 else f"by {back} steps"
            yield f"stale {told}: the last update did not reach this rank's weights", lambda t=then: shard_of(t, shard)  # type: ignore[misc]
        if step and not evidence.is_rounded:
            then = shard_of(evidence.before(evidence.follows, step - 1)[part.name].double(), shard)
            nearer = (seen.observed - then).abs() < (seen.observed - seen.right).abs()
            some = f"stale by one step in {int(nearer.sum())} of its {nearer.numel()} elements: a shard did not arrive"
            yield some, lambda: torch.where(nearer, then, seen.right)
        cut = part.slice
        for record in evidence.ranks:
            other = record.parts.get(part.name)
            if other is not None and other.slice != cut and other.shape == part.shape:
                yield f"it is the slice of rank {record.rank}", lambda o=other: part_of(now, o).flatten()  # type: ignore[misc]
        for name, value in evidence.before(evidence.follows, step).items():
            if name != part.name and value.shape == now.shape:
                yield f"it is {name}", lambda v=value: part_of(v.double(), part).flatten()  # type: ignore[misc]
        yield "not a number", lambda: seen.observed if not seen.observed.isfinite().all() else None

    found = first_cause(hypotheses(), seen, evidence, "forward")
    if found:
        return found
    others = _copies(
        evidence, rank, shard, lambda record: record.weights if step == evidence.step else record.published
    )
    differ = [other for other, values in others.items() if not torch.equal(values, shard[3])]
    if step == 0:
        told = "another initial value: another seed, name or slice"
        return f"{told} than on rank {differ[0]}: copies differ" if differ and len(differ) < len(others) + 1 else told
    if differ:
        return f"copies differ: ranks {rank} and {differ[0]} should hold the same{_between(evidence, rank, differ[0])}"
    return named_factor(fitted_factor(seen.observed, seen.right), evidence.run, evidence.micro_batches) or UNKNOWN


def _copies(evidence: Evidence, rank: int, shard: Shard, of: Callable[[RankRecord], list[Shard]]) -> dict[int, Tensor]:
    """What other ranks hold in place of the same elements."""
    found = {}
    for record in evidence.ranks:
        for part, start, stop, values in of(record):
            if record.rank != rank and (part.name, part.slice, start, stop) == (
                shard[0].name,
                shard[0].slice,
                shard[1],
                shard[2],
            ):
                found[record.rank] = values
    return found


def _between(evidence: Evidence, one: int, other: int) -> str:
    for kind in ("tp", "dp", "cp", "pp"):
        if any(one in group and other in group for group in groups(evidence.run.layout)[kind]):
            return f", they differ in {kind}"
    return ""


# After the update.


def first_update(evidence: Evidence) -> Located | None:
    step = evidence.step
    now, after = evidence.before(evidence.follows, step), evidence.follows.parameters[step]
    bounds = _Bounds(evidence)
    for kind in ("updated", "averages"):
        if kind == "averages" and not evidence.observed.averages:
            continue
        for name in evidence.follows.parameters[step]:
            found = _wrong_average(evidence, name) if kind == "averages" else _wrong_update(evidence, bounds, name)
            if found is not None:
                return found
    return _wrong_weights(evidence, now, after) or _copies_that_differ(evidence)


def _wrong_weights(evidence: Evidence, before: Tensors, after: Tensors) -> Located | None:
    """Master weights are right, and weights that matmuls use do not follow."""
    for name in after:
        for record in evidence.ranks:
            for shard in record.published:
                if shard[0].name != name or shard[0].slice.start == shard[0].slice.stop:
                    continue
                seen = Seen(shard[3].double(), [shard_of(after[name].double(), shard)])
                moved = size(seen.right - shard_of(before[name].double(), shard))
                error = _weight_error(evidence, shard, seen, moved)
                if error.is_wrong:
                    cause = _weight_cause(evidence, record.rank, shard, seen, evidence.step + 1)
                    told = error.error, error.allowed, cause
                    return Located(name, module_of(name), "update", evidence.step + 1, None, record.rank, *told)
    return None


def _wrong_update(evidence: Evidence, bounds: _Bounds, name: str) -> Located | None:
    after = evidence.follows.parameters[evidence.step][name].double()
    for record in evidence.ranks:
        for shard in record.updated:
            if shard[0].name != name:
                continue
            seen = Seen(shard[3].double(), [shard_of(after, shard)])
            error = bounds.error(shard, seen)
            if error.is_wrong:
                cause = _update_cause(evidence, record.rank, shard, seen)
                told = error.error, error.allowed, cause
                return Located(name, module_of(name), "update", evidence.step + 1, None, record.rank, *told)
    return None


class _Bounds:
    """How far off a parameter may be: in 16 bits in parts of the learning rate, from what follows from the observed
    gradients; of matrices that Muon updates, of their way, where `rounding` says that it is decided."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        is_exact = evidence.run.training.precision == "float64"
        *rounded, exact = evidence.traces
        self._replayed = [] if is_exact else replayed(evidence.run, evidence.observed, exact.start)
        if not evidence.is_rounded:
            return
        steps = evidence.step + 1
        self._among = decided([trace.gradients[:steps] for trace in rounded], exact.gradients[:steps])[-1]
        every = [{name: torch.ones_like(x, dtype=torch.bool) for name, x in exact.start.items()}] * steps
        ways = walked(exact.parameters[:steps], exact.start, every)[-1]
        self._ways = {name: way.view(exact.start[name].shape) for name, way in ways.items()}

    def error(self, shard: Shard, seen: Seen) -> Error:
        evidence, part = self._evidence, shard[0]
        if seen.observed.shape != seen.right.shape:
            return Error(math.inf, 0.0)
        if not seen.right.numel():
            return Error(0.0, 1.0)
        if self._replayed and part.name in self._replayed[0] and not part.name.endswith("router.bias"):
            rate = learning_rate(evidence.run.learning_rate, evidence.step, evidence.run.training.steps)
            rounding = 2.0**-22 * float(seen.right.abs().max())
            error = max(size(seen.observed - seen.right) - rounding, 0.0) / (rate or 1.0)
            return Error(error if error == error else math.inf, UPDATE)
        if not evidence.is_rounded:
            tolerance = 1e-9 if evidence.run.training.precision == "float64" else 1e-3
            scale = max(float(seen.right.abs().max()), evidence.run.learning_rate.peak)
            error = float((seen.observed - seen.right).abs().max()) / scale
            return Error(error if error == error else math.inf, tolerance)
        return self._of_way(shard, seen)

    def _of_way(self, shard: Shard, seen: Seen) -> Error:
        evidence, name = self._evidence, shard[0].name
        among = shard_of(self._among[name], shard) if name in self._among else torch.zeros(0, dtype=torch.bool)
        if not bool(among.any()):
            return Error(0.0, 1.0)
        after = [trace.parameters[evidence.step][name].double() for trace in evidence.traces]
        *rounded, exact = [shard_of(each, shard) for each in after]
        way = size(shard_of(self._ways[name].double(), shard)[among]) or 1.0
        spread = max(size((each - exact)[among]) for each in rounded) / way
        error = size((seen.observed - rounded[0])[among]) / way
        return Error(error if error == error else math.inf, 1.5 * allowed(spread, max(4 * ROUNDOFF, 1 / DECIDED)))


def _wrong_average(evidence: Evidence, name: str) -> Located | None:
    step, key = evidence.step, f"average/{name}"
    if key not in evidence.observed.averages[step] or key not in evidence.follows.averages[step]:
        return None
    observed, right = (trace.averages[step][key].double() for trace in (evidence.observed, evidence.follows))
    now = evidence.follows.parameters[step][name].double()
    apart, limit = size(observed - right) / (size(right) or 1.0), 1e-9
    if evidence.is_rounded:
        apart, limit = average_error(evidence.run, step, observed, right), UPDATE
    if apart <= limit:
        return None
    seen = Seen(observed, [right])

    def hypotheses() -> Iterator[Hypothesis]:
        then = evidence.before(evidence.follows, step)[name].double()
        before = evidence.follows.averages[step - 1][key].double() if step else then
        decay = evidence.run.optimizer.average
        yield "stale by one step: it was not moved", lambda: before
        yield (
            "stale by one step: it is moved towards the weights before the update",
            lambda: before * decay + (1 - decay) * then,
        )
        yield "it moves away from the weights", lambda: before - (1 - decay) * (now - before)
        yield "it is the weights themselves", lambda: now
        yield "the decay is applied the wrong way round", lambda: before * (1 - decay) + decay * now

    cause = first_cause(hypotheses(), seen, evidence, "forward") or "the average of another shard, or of another step"
    told = apart, limit, cause
    return Located(f"average of {name}", module_of(name), "update", step + 1, None, None, *told)


def _update_cause(evidence: Evidence, rank: int, shard: Shard, seen: Seen) -> str:
    part, step, run = shard[0], evidence.step, evidence.run
    trace = evidence.follows
    begun = evidence.before(trace, step)[part.name].double()
    before = shard_of(begun, shard)
    right, observed = seen.right - before, seen.observed - before

    def hypotheses() -> Iterator[Hypothesis]:
        yield "stale by one step: it was not updated", lambda: before
        yield "the update has the wrong sign", lambda: before - right
        for told, whole in (*_adam_variants(evidence, part.name), *_muon_variants(evidence, part.name)):
            yield told, lambda w=whole: shard_of(w, shard)  # type: ignore[misc]
        # Whichever multiple of the gradient comes nearest: after what says more.
        yield (
            "the gradient is clipped by another norm than that of the whole gradient",
            lambda: _clipped_otherwise(evidence, shard, seen),
        )
        moved = trace.parameters[step][part.name].double() - begun
        flat = part_of(moved, part).flatten()
        length = shard[2] - shard[1]
        for other in range(0, flat.numel() - length + 1, max(length, 1)):
            if other != shard[1]:
                yield "it is the update of another shard", lambda o=other: before + flat[o : o + length]  # type: ignore[misc]
        for record in evidence.ranks:
            theirs = record.parts.get(part.name)
            if theirs is not None and theirs.slice != part.slice and theirs.shape == part.shape:
                yield (
                    f"it is the update of rank {record.rank}'s slice",
                    lambda t=theirs: before + part_of(moved, t).flatten()[shard[1] : shard[2]],  # type: ignore[misc]
                )

    found = first_cause(hypotheses(), seen, evidence, "forward") or _clipped_rows_cause(evidence, shard, seen)
    if found:
        return found
    # Decay depends on no gradient.
    rate = learning_rate(run.learning_rate, step, run.training.steps)
    decay = -rate * run.optimizer.weight_decay * before if begun.ndim > 1 else torch.zeros_like(before)
    if not evidence.is_rounded:
        found = step_and_decay(observed, right - decay, decay, 1e-4)
    else:
        factor = fitted_factor(observed - decay, right - decay)
        if size(observed - decay - factor * (right - decay)) <= 0.2 * size(observed - decay):
            named = named_factor(factor, run, evidence.micro_batches, exact=False)
            found = f"{RATE}: {named or f'factor {factor:.4g}'}"
    if found:
        return found
    if run.optimizer.is_muon and len(part.full_shape) > 1:
        return "another matrix was orthogonalised: a part of it, parts in the wrong places, or another momentum"
    return UNKNOWN


def _clipped_otherwise(evidence: Evidence, shard: Shard, seen: Seen) -> Tensor | None:
    """What comes nearest, whatever this step's gradient is multiplied by."""
    adam = _Adam.of(evidence, shard[0].name)
    if adam is None:
        return None
    best, width = 0.0, math.log(64)
    for _ in range(6):
        tries = [best + width * place / 16 for place in range(-16, 17)]
        best = min(tries, key=lambda each: size(seen.observed - shard_of(adam.after(last=math.exp(each)), shard)))
        width /= 8
    return shard_of(adam.after(last=math.exp(best)), shard)


def _adam_variants(evidence: Evidence, name: str) -> Iterator[tuple[str, Tensor]]:
    """What AdamW would have made of the same gradients, done wrongly in one way or another."""
    adam = _Adam.of(evidence, name)
    if adam is None:
        return
    yield "gradients are not clipped", adam.after(clipped=False)
    yield "no bias correction of the moments", adam.after(corrected=False)
    if adam.decays:
        yield "weight decay is missing", adam.after(decays=False)
    else:
        yield "weight decay on a parameter that has none", adam.after(decays=True)
    if evidence.step:
        yield "the moments of the steps before are lost", adam.after(fresh=True)
    for more in (1, -1, 2):
        if more + evidence.step >= 0:
            updates = f"{more + 1 + evidence.step} updates in place of {1 + evidence.step}"
            yield f"bias correction of {updates}: the step count is off", adam.after(more=more)


def _clipped_rows_cause(evidence: Evidence, shard: Shard, seen: Seen) -> str:
    """QK-clip multiplies the rows of a head, after all else."""
    part, start, stop, _ = shard
    if not evidence.run.optimizer.qk_clip or len(part.shape) != 2 or start % part.shape[1] or stop % part.shape[1]:
        return ""
    observed, right = (x.view(-1, part.shape[1]) for x in (seen.observed, seen.right))
    factors = (observed * right).sum(1, keepdim=True) / right.square().sum(1, keepdim=True).clamp(min=1e-300)
    if not evidence.explains((right * factors).flatten(), seen, "forward"):
        return ""
    low, high = float(factors.min()), float(factors.max())
    return (
        f"its rows have factors of their own, {low:.3g} to {high:.3g}: QK-clip saw the queries and keys of other tokens"
    )


def _muon_variants(evidence: Evidence, name: str) -> Iterator[tuple[str, Tensor]]:
    """The same of Muon, whose momentum is that of right steps before."""
    run, spec = evidence.run, evidence.run.optimizer
    if not spec.is_muon or spec.normuon or isinstance(run.model, PythonModelSpec):
        return
    other = "Nesterov's lead is missing" if spec.nesterov else "Nesterov's lead is taken, and should not be"
    yield from _muon_after(evidence, name, other, replace(spec, nesterov=not spec.nesterov))
    if evidence.step:
        yield from _muon_after(evidence, name, "the momentum of the steps before is lost", spec, fresh=True)
        yield from _muon_after(evidence, name, "gradients are not clipped", spec, clipped=False)
    yield from _muon_after(evidence, name, "weight decay is missing", replace(spec, weight_decay=0.0))
    for scale in get_args(get_type_hints(OptimizerSpec)["update_scale"]):
        if scale != spec.update_scale and not evidence.is_rounded:  # in 16 bits many factors come near
            told = f"the update is scaled as update_scale={scale} says"
            yield from _muon_after(evidence, name, told, replace(spec, update_scale=scale))


def _muon_after(
    evidence: Evidence, name: str, told: str, spec: OptimizerSpec, fresh: bool = False, clipped: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """`fresh`: the step that failed begins with a momentum of zero."""
    run, trace = evidence.run, evidence.follows
    parameters = {name: trace.start[name].clone()}
    updates = MuonUpdates(replace(run, optimizer=spec), parameters)
    for step in range(evidence.step + 1):
        if step == evidence.step and fresh:
            updates = MuonUpdates(replace(run, optimizer=spec), parameters)
        clip = run.training.gradient_clip if clipped else 0.0
        scale = min(1.0, clip / (trace.gradient_norms[step] + 1e-6)) if clip > 0 else 1.0
        parameters[name].copy_(evidence.before(trace, step)[name])
        parameters[name].grad = trace.gradients[step][name].to(parameters[name]) * scale
        updates.step(learning_rate(run.learning_rate, step, run.training.steps))
    if name in updates.names:
        yield told, parameters[name].double()


@dataclass(frozen=True)
class _Adam:
    """AdamW on one parameter, from the first step to the one that failed."""

    evidence: Evidence
    name: str
    decays: bool

    @classmethod
    def of(cls, evidence: Evidence, name: str) -> _Adam | None:
        """None where another optimizer has it."""
        matrix = evidence.follows.start[name].ndim > 1
        spec = evidence.run.optimizer
        other = spec.is_own or (spec.is_muon and matrix) or isinstance(evidence.run.model, PythonModelSpec)
        return None if other else cls(evidence, name, matrix)

    def after(
        self,
        clipped: bool = True,
        corrected: bool = True,
        decays: bool | None = None,
        fresh: bool = False,
        last: float = 1.0,
        more: int = 0,
    ) -> Tensor:
        """`fresh`: the step that failed begins with moments of zero. `last`: what multiplies its gradient besides.
        `more`: updates that are counted too many in it."""
        run, trace, name = self.evidence.run, self.evidence.follows, self.name
        spec, clip = run.optimizer, run.training.gradient_clip
        factor = learning_rate_factor(run.model, name) * spec.rate_of(name)
        value = trace.start[name].double()
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        for step in range(self.evidence.step + 1):
            is_last = step == self.evidence.step
            rate = learning_rate(run.learning_rate, step, run.training.steps)
            scale = min(1.0, clip / (trace.gradient_norms[step] + 1e-6)) if clipped and clip > 0 else 1.0
            gradient = trace.gradients[step][name].double() * scale * (last if is_last else 1.0)
            if fresh and is_last:
                first, second = torch.zeros_like(value), torch.zeros_like(value)
            first = spec.beta1 * first + (1 - spec.beta1) * gradient
            second = spec.beta2 * second + (1 - spec.beta2) * gradient.square()
            taken = step + 1 + more * is_last if corrected else 10**9
            root = (second / (1 - spec.beta2**taken)).sqrt() + spec.epsilon
            if self.decays if decays is None else decays:
                value = value * (1 - rate * spec.weight_decay)
            value = value - rate * factor * first / (1 - spec.beta1**taken) / root
        return value


def _copies_that_differ(evidence: Evidence) -> Located | None:
    """All are near enough to what is right, but not equal to one another, bit by bit."""
    for kind, where in (("reduced", "reduction"), ("updated", "update")):
        for record in evidence.ranks:
            for shard in getattr(record, kind):
                for other, values in _copies(evidence, record.rank, shard, lambda each: getattr(each, kind)).items():  # noqa: B023
                    if other > record.rank and not torch.equal(values, shard[3]):
                        name = shard[0].name
                        apart = size(values - shard[3]) / (size(values) or 1.0)
                        cause = f"copies differ: ranks {record.rank} and {other} should hold the same"
                        cause += _between(evidence, record.rank, other)
                        told = apart, 0.0, cause
                        step = evidence.step + 1
                        return Located(name, module_of(name), where, step, None, other, *told)  # type: ignore[arg-type]
    # What is recorded of no rank: moments, and averages of weights.
    for each in evidence.observed.unequal[evidence.step] if evidence.observed.unequal else ():
        cause = f"copies differ: {each}{_between(evidence, *(each.ranks + each.others)[:2])}"
        module, at = module_of(each.name.partition(" ")[0]), (evidence.step + 1, None, each.ranks[0])
        return Located(each.name, module, "update", *at, 1.0, 0.0, cause)
    return None
