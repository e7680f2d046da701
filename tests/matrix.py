"""Which cases of a matrix every run of the tests tries. The others, in which the same parts meet in other combinations,
are tried with --thorough."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def rest(*cases: Any) -> list[ParameterSet]:
    """Cases for --thorough alone."""
    return [_thorough(case if isinstance(case, tuple) else (case,)) for case in cases]


def crossed(*axes: Sequence[Any], every: int = 2) -> list[ParameterSet]:
    """All combinations, of which each run tries one in `every`: all values of every axis, if it has as many."""
    return [
        pytest.param(*(value for _, value in case)) if tried else _thorough(tuple(value for _, value in case))
        for case in product(*(list(enumerate(axis)) for axis in axes))
        for tried in [sum(place for place, _ in case) % every == 0]
    ]


def _thorough(case: tuple[Any, ...]) -> ParameterSet:
    return pytest.param(*case, marks=pytest.mark.thorough)
