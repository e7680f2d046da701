"""What a chain of layouts carries from one to the next, and where it first differs from one process.

Each rank notes what it holds after loading and again before saving. Beside the files between, that tells a bad load
from a bad save, and both from a bad step. The first that is wrong in this order is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.shards import Extent
from cuboid.checkpoint.state import AVERAGE, PARAMETER, Moments, state_to_load
from cuboid.checkpoint.storage import whole_tensors
from cuboid.parallel.parallelize import Engine
from cuboid.spec.run import Run
from cuboid.training.checks.hypotheses import UNKNOWN, fitted_factor
from cuboid.training.checks.located import Located, Pass, module_of
from cuboid.verification.compare import FLOOR, relative_error
from cuboid.verification.reference import OneProcess, Tensors, Trace

LOADED, TRAINED = "loaded", "trained"
STEPS_TO_TRY = 16
"""Of other samples, to explain a loss."""


@dataclass(frozen=True)
class Held:
    """By one rank, at one time."""

    rank: int
    updates: int
    """Of the optimizer."""
    slices: list[tuple[str, Extent, Tensor]]


def note(engine: Engine, optimizer: Moments, folder: str, when: str, step: int, rank: int) -> None:
    """Everything this rank keeps now, copies of other ranks' state included."""
    held = [
        (name, (part.offsets, part.lengths), values.detach().cpu().clone())
        for name, sharded in state_to_load(engine, optimizer).items()
        for part, values in sharded.slices
    ]
    path = Path(folder) / "held"
    path.mkdir(exist_ok=True)
    torch.save((optimizer.steps_taken, held), path / f"{step:08d}-{when}-{rank:05d}.pt")


def noted(folder: str, when: str, step: int, ranks: int) -> Iterator[Held]:
    for rank in range(ranks):
        path = Path(folder) / "held" / f"{step:08d}-{when}-{rank:05d}.pt"
        yield Held(rank, *torch.load(path, weights_only=True))


def floor_of(kind: str, expected: Tensors, update: float) -> float:
    """What is too small to matter is compared on a scale that does: a parameter's of an update, a first moment's of a
    gradient, a second's of its square."""
    largest = max(x.abs().max().item() for name, x in expected.items() if name.partition("/")[0] == kind)
    return update if kind == PARAMETER else FLOOR ** (2 if kind.endswith("_sq") else 1) * largest


class Carried:
    """`known`: after as many steps as the key says, what one process holds."""

    def __init__(self, runs: Sequence[Run], folder: str, reference: Trace, tolerance: float) -> None:
        self._runs, self._folder, self._reference, self._tolerance = runs, folder, reference, tolerance
        self._known: dict[int, Tensors] = {}
        for step, parameters in enumerate([reference.start, *reference.parameters]):
            self._known[step] = {f"{PARAMETER}/{name}": x for name, x in parameters.items()}
            self._known[step] |= reference.moments.get(step, {})
        if reference.averages:
            self._known[0] |= {f"{AVERAGE}/{name}": x for name, x in reference.start.items()}
        self._floors: dict[str, float] = {}

    def first_wrong(self, losses: Sequence[Sequence[float]]) -> Located | None:
        step = 0
        for run, seen in zip(self._runs, losses, strict=True):
            first, step = step, step + len(seen)
            ranks = run.layout.world_size
            found = self._of_ranks(LOADED, first, ranks) if first else None
            found = found or self._of_losses(first, seen)
            found = found or self._of_ranks(TRAINED, step, ranks) or self._of_file(step, ranks)
            if found is not None:
                return found
        return None

    def _of_ranks(self, when: str, step: int, ranks: int) -> Located | None:
        held = list(noted(self._folder, when, step, ranks))
        where: Pass = "load" if when == LOADED else "update"
        for each in held:
            if each.updates != step:
                cause = f"the optimizer counts {each.updates} updates and not {step}: its bias correction is another"
                apart = float(abs(each.updates - step))
                return Located("number of updates", "optimizer", where, step, None, each.rank, apart, 0.0, cause)
        return self._first(where, step, held)

    def _of_file(self, step: int, ranks: int) -> Located | None:
        """Rank by rank, the part of it that each should have written."""
        whole = whole_tensors(checkpoint_path(locate(self._folder), step))
        held = [
            Held(each.rank, step, [(name, at, _part(whole[name], at)) for name, at, _ in each.slices if name in whole])
            for each in noted(self._folder, TRAINED, step, ranks)
        ]
        return self._first("save", step, held)

    def _first(self, where: Pass, step: int, held: Sequence[Held]) -> Located | None:
        expected = self._known[step]
        self._floors = {
            kind: floor_of(kind, expected, self._runs[0].learning_rate.peak)
            for kind in {name.partition("/")[0] for name in expected}
        }
        for name, right in expected.items():
            kind, _, parameter = name.partition("/")
            scale = max(right.abs().max().item(), self._floors[kind])
            for each in held:
                for other, at, observed in each.slices:
                    if other != name:
                        continue
                    apart = (observed - _part(right, at)).abs() / (scale or 1.0)
                    error = apart.max().item() if apart.isfinite().all() else float("inf")
                    if error > self._tolerance:
                        wrong = ~(apart <= self._tolerance)
                        cause = self._cause(where, step, name, at, observed, wrong, scale, held)
                        tensor = parameter if kind == PARAMETER else f"{kind} of {parameter}"
                        told = error, self._tolerance, cause
                        return Located(tensor, module_of(parameter), where, step, None, each.rank, *told)
        return None

    def _cause(
        self,
        where: Pass,
        step: int,
        name: str,
        at: Extent,
        observed: Tensor,
        wrong: Tensor,
        scale: float,
        held: Sequence[Held],
    ) -> str:
        """Of what is wrong in it: all, or a part."""
        near = self._tolerance * (scale or 1.0)
        seen = observed[wrong]
        share = "" if bool(wrong.all()) else f", in {int(wrong.sum())} of {wrong.numel()} elements"
        right = _part(self._known[step][name], at)

        def equal(other: Tensor) -> bool:
            return other.shape == observed.shape and bool(((other[wrong] - seen).abs() <= near).all())

        if bool(seen.isnan().all()):
            return f"no rank wrote it{share}" if where == "save" else f"not a number{share}"
        if not bool(seen.any()):
            return f"it is zero{share}: what was kept of it is lost"
        for other in sorted(self._known, key=lambda each: abs(each - step)):
            values = self._known[other].get(name)
            if other != step and values is not None and equal(_part(values, at)):
                when = f"after step {other}" if other else "with which the run begins"
                return f"stale: it is that {when}{share}"
        for each in held:
            for other_name, there, _ in each.slices:
                elsewhere = other_name == name and there != at and there[1] == at[1]
                if elsewhere and equal(_part(self._known[step][name], there)):
                    return f"it is another slice of it, that of rank {each.rank}{share}"
        for other_name, values in self._known[step].items():
            if other_name != name and values.shape == self._known[step][name].shape and equal(_part(values, at)):
                kind, _, parameter = other_name.partition("/")
                return f"it is {'that' if kind == PARAMETER else kind} of {parameter}{share}"
        if bool(((seen.sort().values - right[wrong].sort().values).abs() <= near).all()):
            return f"the right numbers in another order{share}: chunks are joined in another order than they were cut"
        factor = fitted_factor(seen, right[wrong])
        if bool(((seen - factor * right[wrong]).abs() <= near).all()):
            return f"factor {factor:.4g}{share}"
        if where == "update":
            return "loaded right, and the update is another: try the layout alone"
        return UNKNOWN

    def _of_losses(self, first: int, seen: Sequence[float]) -> Located | None:
        for step, (observed, right) in enumerate(zip(seen, self._reference.losses[first:], strict=False), first):
            error = relative_error(observed, right)
            if not error <= self._tolerance:
                cause = self._loss_cause(step, observed) if step == first and first else UNKNOWN
                return Located("loss", "loss", "loss", step + 1, None, None, error, self._tolerance, cause)
        return None

    def _loss_cause(self, step: int, observed: float) -> str:
        """Of the first after a load that was right: other samples, or weights that it did not reach."""
        whole = self._runs[0]
        ways = [(step, 0, "loaded weights do not reach the model: it computes with those of the beginning")]
        ways += [
            (batch, step, f"after the load come the samples of step {batch + 1}: their position is not carried on")
            for batch in range(min(whole.training.steps, STEPS_TO_TRY))
            if batch != step
        ]
        for batch, after, told in ways:
            weights = {name.partition("/")[2]: x for name, x in self._known[after].items() if _is_parameter(name)}
            process = OneProcess(whole, weights=weights)
            process.step(step, batch)
            if relative_error(observed, process.trace.losses[0]) <= self._tolerance:
                return told
        return f"{UNKNOWN}; loaded state is right on all ranks: copies that are used, dropout, or samples"


def _is_parameter(name: str) -> bool:
    return name.startswith(f"{PARAMETER}/")


def _part(whole: Tensor, at: Extent) -> Tensor:
    for dimension, (offset, length) in enumerate(zip(*at, strict=True)):
        whole = whole.narrow(dimension, offset, length)
    return whole
