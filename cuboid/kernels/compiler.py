"""What torch.compile is told of our functions, without importing it.

Its modules take as long to import as the rest of torch, and a run that compiles nothing never needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_UNCOMPILED: list[Callable[..., Any]] = []


def uncompiled(function: Function) -> Function:
    """As `torch.compiler.disable`, of a method or of a function that is called through its module."""
    _UNCOMPILED.append(function)
    return function


def tell_compiler() -> None:
    """Before anything is compiled that may call an `uncompiled` function."""
    while _UNCOMPILED:
        function = _UNCOMPILED.pop()
        owner: Any = sys.modules[function.__module__]
        *classes, name = function.__qualname__.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, name, torch.compiler.disable(function))


def operation(name: str) -> Callable[[Callable[..., Any]], Any]:
    """As `torch.library.custom_op` with nothing mutated: one operation to the compiler, whatever it is made of. What
    `custom_op` makes imports the compiler when it is first called, and takes the host longer at every call."""

    def register(function: Callable[..., Any]) -> Any:
        # define + impl, not custom_op: see above; the schema comes from the types of the function.
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, ("cpu", "cuda"), function)
        space, word = name.split("::")
        return getattr(getattr(torch.ops, space), word).default

    return register
