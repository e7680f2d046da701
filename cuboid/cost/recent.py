"""What was just computed of the same arrays, not computed again: several parts of the cost model ask for the same."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
KEPT = 8
"""Answers of each function: a search asks for those of one part of its space at a time."""


def recent(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, with its last few answers remembered by which objects it was given, not by what is in them: they
    are kept alive with the answer, and nobody writes into arrays of the cost model."""
    answers: dict[tuple[int, ...], tuple[tuple[Any, ...], Result]] = {}

    @wraps(function)
    def remembered(*given: Given.args, **named: Given.kwargs) -> Result:
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
