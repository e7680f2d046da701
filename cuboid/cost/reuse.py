"""What is computed once: answers that were just given of the same arrays, and layouts that are alike in what a cost
depends on. Several parts of the cost model ask for the same, and a search asks for the same layer under every ZeRO and
schedule."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.inputs import Array, Jobs, Shape

Given = TypeVar("Given")
Result = TypeVar("Result")
Rows = NDArray[np.intp]
FEW = 600
"""Layouts that are costed sooner than they are compared."""


class Taking(Protocol):
    """The rows that a cost is asked of, taken out of other arrays."""

    def __call__(self, arrays: Given, /) -> Given: ...


def each_once(shape: Shape, jobs: Jobs, columns: Sequence[Array], cost: Callable[[Jobs, Taking], Result]) -> Result:
    """What `cost` says of layouts of one model, asked of one of all that agree in the columns (whole numbers)."""
    size = jobs.dp.size
    alone = size <= FEW or shape.hidden.ndim > 0 or jobs.sequence.ndim > 0
    found = None if alone else _distinct([each for each in columns if each.ndim], size)
    if found is None:
        return cost(jobs, _all)
    first, of_each = found

    def taken(arrays: Given) -> Given:
        return _rows(arrays, first, size)

    return _rows(cost(taken(jobs), taken), of_each, len(first))


def _all(arrays: Given) -> Given:
    return arrays


def _distinct(columns: Sequence[Array], size: int) -> tuple[Rows, Rows] | None:
    """Rows that differ, and for every row the place of the one it equals; nothing where that would not pay."""
    key = np.zeros(size, dtype=np.int64)
    most = 1
    for column in columns:
        values = int(column.max()) + 1
        most *= values
        if most >= 2**62:
            return None
        if values > 1:
            key = key * values + column.astype(np.int64)
    order = np.argsort(key)
    starts = np.diff(key[order], prepend=-1) > 0
    if 2 * np.count_nonzero(starts) > len(key):
        return None
    of_each = np.empty(len(key), dtype=np.intp)
    of_each[order] = np.cumsum(starts) - 1
    return order[starts], of_each


def _rows(value: Given, which: Rows, size: int) -> Given:
    """Some rows of all arrays in a value that have one for each of `size` layouts."""
    taken: Any = value
    if isinstance(value, np.ndarray):
        taken = value.take(which) if value.shape == (size,) else value
    elif isinstance(value, tuple):
        taken = tuple([_rows(each, which, size) for each in value])
    elif names := _given(cast(Hashable, type(value))):
        given = [getattr(value, name) for name in names]
        once = {id(each): _rows(each, which, size) for each in given}  # what is the same stays the same
        taken = type(value)(**{name: once[id(each)] for name, each in zip(names, given, strict=True)})
    return cast(Given, taken)


@cache
def _given(kind: Hashable) -> tuple[str, ...]:
    """What a dataclass is made of."""
    return tuple(each.name for each in fields(kind) if each.init) if is_dataclass(kind) else ()


Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
KEPT = 8
"""Answers of each function: a search asks for those of one part of its space at a time."""


def recent(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """The function, with its last few answers remembered by which objects it was given, not by what is in them: they
    are kept alive with the answer, and nobody writes into arrays of the cost model."""
    answers: dict[tuple[int, ...], tuple[tuple[Any, ...], Answer]] = {}

    @wraps(function)
    def remembered(*given: Asked.args, **named: Asked.kwargs) -> Answer:
        objects = (*given, *named.values())
        key = tuple(map(id, objects))
        known = answers.get(key)
        if known is None:
            known = (objects, function(*given, **named))
            if len(answers) >= KEPT:
                answers.pop(next(iter(answers), key), None)
            answers[key] = known
        return known[1]

    return remembered
