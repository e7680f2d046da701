"""Hypotheses about the cause of an error, each computed and compared with what was observed. `cuboid verify` and the
checks of a running training share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run

UNKNOWN = "unknown: nothing that was tried explains it"
DRIFTED = "copies differ"
RATE = "the update is too large or too small, as another learning rate makes it"
Hypothesis = tuple[str, Callable[[], Tensor | None]]
"""The cause in words, and what would have been observed."""


def degrees(run: Run, micro_batches: int) -> dict[str, int]:
    """Numbers that may explain a factor: the layout's degrees, and some pairs of them multiplied."""
    layout = run.layout
    found = {"tp": layout.tp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp}
    found["micro-batches"] = micro_batches
    found["replicas of shards"] = layout.dp // layout.shard_size if layout.zero else 1
    single = {name: count for name, count in found.items() if count > 1}
    pairs = (("dp", "cp"), ("tp", "cp"), ("dp", "micro-batches"))
    both = {f"{one} × {other}": found[one] * found[other] for one, other in pairs if {one, other} <= single.keys()}
    return single | both


def factors_of_model(run: Run) -> dict[str, float]:
    """Numbers that a model multiplies activations by."""
    model, mixture = run.model, run.model.mixture
    found = {"embedding_scale": model.embedding_scale, "mixture.scaling": mixture.scaling if mixture else 1.0}
    found["query_scale × √head_dim"] = model.query_scale * model.head_dim**0.5 if model.query_scale else 1.0
    return {name: value for name, value in found.items() if value != 1}


def named_factor(factor: float, run: Run, micro_batches: int, exact: bool = True, of_activations: bool = False) -> str:
    """`factor 2 = dp`; empty where it is no degree of the layout. `of_activations`: of a forward pass, where nothing is
    divided by the number of replicas or micro-batches, and the model has factors of its own."""
    close = 1e-6 if exact else 0.06
    plain = {"2": 2.0, "1/2": 0.5, "-1": -1.0, "0": 0.0}
    counts: dict[str, float] = {**degrees(run, micro_batches)}
    if of_activations:
        counts = {name: count for name, count in counts.items() if name in ("tp", "cp", "ep", "tp × cp")}
        counts |= {} if isinstance(run.model, PythonModelSpec) else factors_of_model(run)
    shapes: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("{}", lambda count: count),
        ("1/{}", lambda count: 1 / count),
        ("{}²", lambda count: count**2),
        ("1/{}²", lambda count: count**-2),
        ("√{}", math.sqrt),
        ("1/√{}", lambda count: count**-0.5),
    )
    for shape, value_of in shapes:
        whole = {name: f"({name})" if " " in name and shape != "{}" else name for name in counts}
        # Roots of small numbers are close to many fractions.
        near_by = close / 3 if "√" in shape else close
        near = [name for name, count in counts.items() if abs(factor / value_of(count) - 1) <= near_by]
        names = [shape.format(whole[name]) for name in near]
        if names:
            return f"factor {factor:.4g} = {' or '.join(names)}"
    for text, value in plain.items():
        if abs(factor - value) <= close:
            return f"factor {text}" if value else "it is zero"
    return ""


def fitted_factor(observed: Tensor, right: Tensor) -> float:
    square = float((right.double() ** 2).sum())
    return float((observed.double() * right.double()).sum()) / square if square else math.nan


def count_named(extra: float, among: float, counts: Collection[int], close: float) -> str:
    """How many times a part is counted in a sum that is too large by `extra`; `among`: the part itself. Empty: no
    number of times that the layout explains."""
    if not among:
        return ""
    for count in sorted(counts):
        for times, text in ((count, f"{count}"), (1 / count, f"1/{count}")):
            if count > 1 and abs(extra - (times - 1) * among) <= close * abs(extra):
                return f"counted {text} times"
    return "not counted" if abs(extra + among) <= close * abs(extra) else ""


def step_and_decay(observed: Tensor, step: Tensor, decay: Tensor, close: float) -> str:
    """Why weights did not move by `step` + `decay`: one of the two, or both, has a factor."""
    both = torch.stack((step.flatten(), decay.flatten())).double()
    if not bool(both[1].any()):
        factor = fitted_factor(observed, step)
        explains = float((observed - factor * step).norm()) <= close * float((observed - step).norm())
        return f"{RATE}: factor {factor:.4g}" if explains else ""
    found = torch.linalg.lstsq(both.T, observed.flatten().double().unsqueeze(1)).solution.flatten()
    apart = float((observed.flatten() - found @ both).norm())
    if not apart <= close * float((observed - step - decay).norm()):
        return ""
    of_step, of_decay = found.tolist()
    near = max(close, 1e-6)
    if abs(of_step - 1) <= near:
        return f"weight decay is applied {of_decay:.4g} times"
    if abs(of_step - of_decay) <= near * abs(of_step):
        return f"{RATE}: factor {of_step:.4g}"
    if abs(of_decay - 1) <= near:
        return f"{RATE}: factor {of_step:.4g}, beside a weight decay that is right"
    return f"{RATE}: factor {of_step:.4g}, and weight decay {of_decay:.4g} times"


def shifted(observed: Tensor, right: Tensor) -> Iterator[Hypothesis]:
    """The right elements, some places further: of those that came in from outside nothing is known. Both are flat."""
    for distance in (1, 2, 4, 8, 16, 32, 64):
        if 4 * distance > right.numel():
            return
        for by in (distance, -distance):
            told = f"its elements are shifted by {distance}: a shard begins at another place"
            kept = slice(distance, None) if by > 0 else slice(None, -distance)
            yield told, lambda by=by, kept=kept: _moved(observed, right, by, kept)  # type: ignore[misc]


def _moved(observed: Tensor, right: Tensor, by: int, kept: slice) -> Tensor:
    made = observed.clone()
    made[kept] = right.roll(by)[kept]
    return made


# Sums over ranks and micro-batches.

Axes = dict[str, int]
"""Where a part of a sum comes from: dp, cp, tp, pp and micro-batch."""


def sum_hypotheses(parts: list[tuple[Axes, Tensor]]) -> Iterator[Hypothesis]:
    """Ways to sum the parts wrongly: some are missing, some are counted twice."""
    whole = torch.stack([part for _, part in parts]).sum(0)
    axes = {axis: sorted({place[axis] for place, _ in parts}) for axis in parts[0][0]}

    def of(*wanted: tuple[str, int]) -> Tensor:
        chosen = [part for place, part in parts if all(place[axis] == value for axis, value in wanted)]
        return torch.stack(chosen).sum(0) if chosen else torch.zeros_like(whole)

    many = {axis: values for axis, values in axes.items() if len(values) > 1}
    for axis, values in many.items():
        named = "micro-batch" if axis == "micro-batch" else axis
        for value in values:
            if axis == "micro-batch":
                yield f"micro-batch {value + 1} is missing", lambda v=value: whole - of(("micro-batch", v))  # type: ignore[misc]
                yield f"micro-batch {value + 1} is counted twice", lambda v=value: whole + of(("micro-batch", v))  # type: ignore[misc]
                yield f"only micro-batch {value + 1} is in it", lambda v=value: of(("micro-batch", v))  # type: ignore[misc]
            else:
                yield (
                    f"sum missing over {named}: only the part of {named} rank {value} is in it",
                    lambda a=axis, v=value: of((a, v)),  # type: ignore[misc]
                )
                if len(values) > 2:
                    yield f"the part of {named} rank {value} is missing", lambda a=axis, v=value: whole - of((a, v))  # type: ignore[misc]
                yield (
                    f"the part of {named} rank {value} is counted twice",
                    lambda a=axis, v=value: whole + of((a, v)),  # type: ignore[misc]
                )
    for axis, values in many.items():
        if axis != "micro-batch":
            for some in _runs(values):
                cause = f"sum missing over {axis}: only the parts of {axis} ranks {listed(tuple(some))} are in it"
                yield cause, lambda a=axis, s=some: torch.stack([of((a, value)) for value in s]).sum(0)  # type: ignore[misc]
    names = list(many)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            for value in many[one]:
                for second in many[other]:
                    if "micro-batch" in (one, other):
                        rank_axis, rank_value = (one, value) if other == "micro-batch" else (other, second)
                        chunk = second if other == "micro-batch" else value
                        yield (
                            f"micro-batch {chunk + 1} of {rank_axis} rank {rank_value} is missing",
                            lambda a=one, v=value, b=other, w=second: whole - of((a, v), (b, w)),  # type: ignore[misc]
                        )
                        yield (
                            f"micro-batch {chunk + 1} of {rank_axis} rank {rank_value} is counted twice",
                            lambda a=one, v=value, b=other, w=second: whole + of((a, v), (b, w)),  # type: ignore[misc]
                        )
                    else:
                        yield (
                            f"sum missing over {one} and {other}",
                            lambda a=one, v=value, b=other, w=second: of((a, v), (b, w)),  # type: ignore[misc]
                        )


def _runs(values: list[int]) -> Iterator[list[int]]:
    """Groups of neighbours, and groups of ranks at equal distances: how some of the replicas may form a group."""
    for width in range(2, len(values) // 2 + 1):
        if len(values) % width == 0:
            count = len(values) // width
            yield from (values[index * width : (index + 1) * width] for index in range(count))
            yield from (values[index::count] for index in range(count))


def listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
