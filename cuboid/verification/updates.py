"""The first parameter that is wrong: as the step began, or after its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cuboid.model.initialize import learning_rate_factor
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import groups
from cuboid.training.learning_rate import learning_rate
from cuboid.verification.causes import UNKNOWN, Hypothesis, first_cause, fitted_factor, named_factor
from cuboid.verification.evidence import Error, Evidence, Located, Seen, module_of, part_of, shard_of, size
from cuboid.verification.record import RankRecord, Shard
from cuboid.verification.rounding import DECIDED, ROUNDOFF, allowed, decided, walked


def first_weight(evidence: Evidence) -> Located | None:
    """What the first forward pass of the step computed with."""
    step = evidence.step
    now = evidence.before(evidence.traces[0], step)
    held = {(record.rank, shard[0].name): shard for record in evidence.ranks for shard in record.weights}
    for name in now:
        for record in evidence.ranks:
            shard = held.get((record.rank, name))
            if shard is None:
                continue
            seen = Seen(shard[3].double(), [shard_of(now[name].double(), shard)])
            error = _weight_error(evidence, name, shard, seen)
            if error.is_wrong:
                cause = _weight_cause(evidence, record.rank, shard, seen)
                told = error.error, error.allowed, cause
                return Located(name, module_of(name), "weights", step + 1, None, record.rank, *told)
    return None


def _weight_error(evidence: Evidence, name: str, shard: Shard, seen: Seen) -> Error:
    scale = size(seen.right)
    if seen.observed.shape != seen.right.shape:
        return Error(math.inf, 0.0)
    apart = size(seen.observed - seen.right)
    apart = apart if apart == apart else math.inf
    if not evidence.is_rounded:
        tolerance = 1e-9 if evidence.run.training.precision == "float64" else 1e-3
        return Error(apart / max(scale, evidence.run.learning_rate.peak), tolerance)
    # Rounding to 16 bits, and what updates may differ by: less than an update that is missing.
    moved = 0.0
    if evidence.step:
        before = evidence.before(evidence.traces[0], evidence.step - 1)
        moved = size(seen.right - shard_of(before[name].double(), shard))
    scale = max(scale, evidence.run.learning_rate.peak)
    return Error(apart / scale, (0.6 * moved + 0.5 * ROUNDOFF * scale) / scale)


def _weight_cause(evidence: Evidence, rank: int, shard: Shard, seen: Seen) -> str:
    part, step = shard[0], evidence.step
    now = evidence.before(evidence.traces[0], step)[part.name].double()

    def hypotheses() -> Iterator[Hypothesis]:
        for back in range(1, step + 1):
            then = evidence.before(evidence.traces[0], step - back)[part.name].double()
            told = "by one step" if back == 1 else f"by {back} steps"
            yield f"stale {told}: the last update did not reach this rank's weights", lambda t=then: shard_of(t, shard)  # type: ignore[misc]
        cut = part.slice
        for record in evidence.ranks:
            other = record.parts.get(part.name)
            if other is not None and other.slice != cut and other.shape == part.shape:
                yield f"it is the slice of rank {record.rank}", lambda o=other: part_of(now, o).flatten()  # type: ignore[misc]
        yield "not a number", lambda: seen.observed if not seen.observed.isfinite().all() else None

    found = first_cause(hypotheses(), seen, evidence, "forward")
    if found:
        return found
    others = _copies(evidence, rank, shard, lambda record: record.weights)
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
    bounds = _Bounds(evidence)
    for kind in ("updated", "averages"):
        if kind == "averages" and not evidence.observed.averages:
            continue
        for name in evidence.traces[0].parameters[step]:
            found = _wrong_average(evidence, name) if kind == "averages" else _wrong_update(evidence, bounds, name)
            if found is not None:
                return found
    return _copies_that_differ(evidence)


def _wrong_update(evidence: Evidence, bounds: _Bounds, name: str) -> Located | None:
    after = evidence.traces[0].parameters[evidence.step][name].double()
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
    """How far off a parameter may be: in 16 bits as `rounding` has it, of elements whose direction is decided."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        if not evidence.is_rounded:
            return
        *rounded, exact = evidence.traces
        steps = evidence.step + 1
        self._among = decided([trace.gradients[:steps] for trace in rounded], exact.gradients[:steps])[-1]
        every = [{name: torch.ones_like(x, dtype=torch.bool) for name, x in exact.start.items()}] * steps
        ways = walked(exact.parameters[:steps], exact.start, every)[-1]
        self._ways = {name: way.view(exact.start[name].shape) for name, way in ways.items()}

    def error(self, shard: Shard, seen: Seen) -> Error:
        evidence, part = self._evidence, shard[0]
        if seen.observed.shape != seen.right.shape:
            return Error(math.inf, 0.0)
        if not evidence.is_rounded:
            tolerance = 1e-9 if evidence.run.training.precision == "float64" else 1e-3
            scale = max(float(seen.right.abs().max()), evidence.run.learning_rate.peak) if seen.right.numel() else 1.0
            error = float((seen.observed - seen.right).abs().max()) / scale if seen.right.numel() else 0.0
            return Error(error if error == error else math.inf, tolerance)
        if part.name not in self._among:
            return Error(0.0, 1.0)
        among = shard_of(self._among[part.name], shard)
        if not bool(among.any()):
            return Error(0.0, 1.0)
        *rounded, exact = [
            shard_of(trace.parameters[evidence.step][part.name].double(), shard) for trace in evidence.traces
        ]
        way = size(shard_of(self._ways[part.name].double(), shard)[among]) or 1.0
        spread = max(size((each - exact)[among]) for each in rounded) / way
        error = size((seen.observed - rounded[0])[among]) / way
        return Error(error if error == error else math.inf, 1.5 * allowed(spread, max(4 * ROUNDOFF, 1 / DECIDED)))


def _wrong_average(evidence: Evidence, name: str) -> Located | None:
    step, key = evidence.step, f"average/{name}"
    if key not in evidence.observed.averages[step] or key not in evidence.traces[0].averages[step]:
        return None
    observed, right = (trace.averages[step][key].double() for trace in (evidence.observed, evidence.traces[0]))
    now = evidence.traces[0].parameters[step][name].double()
    apart, moved = size(observed - right), size(right - now)
    limit = 1e-9 * max(size(right), evidence.run.learning_rate.peak) if not evidence.is_rounded else 0.6 * moved
    if not apart > limit:
        return None
    seen = Seen(observed, [right])

    def hypotheses() -> Iterator[Hypothesis]:
        then = evidence.before(evidence.traces[0], step)[name].double()
        before = evidence.traces[0].averages[step - 1][key].double() if step else then
        decay = evidence.run.optimizer.average
        yield "stale by one step: it was not moved", lambda: before
        yield (
            "stale by one step: it is moved towards the weights before the update",
            lambda: before * decay + (1 - decay) * then,
        )
        yield "it is the weights themselves", lambda: now
        yield "the decay is applied the wrong way round", lambda: before * (1 - decay) + decay * now

    cause = first_cause(hypotheses(), seen, evidence, "forward") or "the average of another shard, or of another step"
    told = apart / (size(right) or 1.0), limit / (size(right) or 1.0), cause
    return Located(f"average of {name}", module_of(name), "update", step + 1, None, None, *told)


def _update_cause(evidence: Evidence, rank: int, shard: Shard, seen: Seen) -> str:
    part, step, run = shard[0], evidence.step, evidence.run
    trace = evidence.traces[0]
    begun = evidence.before(trace, step)[part.name].double()
    before = shard_of(begun, shard)
    right, observed = seen.right - before, seen.observed - before

    def hypotheses() -> Iterator[Hypothesis]:
        yield "stale by one step: it was not updated", lambda: before
        yield "the update has the wrong sign", lambda: before - right
        for told, whole in _adam_variants(evidence, part.name):
            yield told, lambda w=whole: shard_of(w, shard)  # type: ignore[misc]
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

    found = first_cause(hypotheses(), seen, evidence, "forward")
    if found:
        return found
    factor = fitted_factor(observed, right)
    if size(observed - factor * right) <= (1e-6 if not evidence.is_rounded else 0.2) * size(observed):
        named = named_factor(factor, run, evidence.micro_batches, exact=not evidence.is_rounded)
        return f"the update is too large or too small: {named or f'factor {factor:.4g}'}"
    if run.optimizer.is_muon and len(part.full_shape) > 1:
        return "another matrix was orthogonalised: a part of it, or one put together wrongly"
    return UNKNOWN


def _adam_variants(evidence: Evidence, name: str) -> Iterator[tuple[str, Tensor]]:
    """What AdamW would have made of the same gradients, done wrongly in one way or another."""
    run, trace, step = evidence.run, evidence.traces[0], evidence.step
    spec, clip = run.optimizer, run.training.gradient_clip
    if (
        spec.is_own
        or (spec.is_muon and trace.parameters[step][name].ndim > 1)
        or isinstance(run.model, PythonModelSpec)
    ):
        return
    rates = [learning_rate(run.learning_rate, each, run.training.steps) for each in range(step + 1)]
    factor = learning_rate_factor(run.model, name) * spec.rate_of(name)
    decays = trace.parameters[step][name].ndim > 1

    def scales(clipped: bool) -> list[float]:
        norms = trace.gradient_norms[: step + 1]
        return [min(1.0, clip / (norm + 1e-6)) if clipped and clip > 0 else 1.0 for norm in norms]

    def run_adam(
        clipped: bool = True, corrected: bool = True, decay: bool = decays, fresh: bool = False, last: bool = False
    ) -> Tensor:
        value = trace.start[name].double() if name in trace.start else evidence.traces[-1].start[name].double()
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        for each, scale in enumerate(scales(clipped)):
            gradient = trace.gradients[each][name].double() * scale
            if fresh and each == step:
                first, second = torch.zeros_like(value), torch.zeros_like(value)
            first = spec.beta1 * first + (1 - spec.beta1) * gradient
            second = spec.beta2 * second + (1 - spec.beta2) * gradient.square()
            taken = each + 1 if corrected else 10**9
            lead = first / (1 - spec.beta1**taken)
            root = (second / (1 - spec.beta2**taken)).sqrt() + spec.epsilon
            wrong_now = each == step or not last
            if decay and (wrong_now or decays):
                value = value * (1 - rates[each] * spec.weight_decay)
            value = value - rates[each] * factor * lead / root
        return value

    yield "gradients are not clipped", run_adam(clipped=False)
    yield "no bias correction of the moments", run_adam(corrected=False)
    if decays:
        yield "weight decay is missing", run_adam(decay=False)
    else:
        yield "weight decay on a parameter that has none", run_adam(decay=True)
    if step:
        yield "the moments of the steps before are lost", run_adam(fresh=True)


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
    return None
