"""Options and arguments that are what they say, read without the parser's own checks: those load pydantic, for longer
than many commands take. Whatever is not plain, errors among it, is left to the parser."""

import re
from math import isfinite
from typing import Any

from typer.core import TyperCommand

from cuboid.errors import UserError

INTEGER = re.compile(r"[0-9]{1,18}")
NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?(e[0-9]{1,2})?")
NOT_PLAIN = object()


def plain_first(parameters: list[Any]) -> list[Any]:
    """The parameters of a command, their values looked at by `plain` first."""
    for parameter in parameters:
        parsers = getattr(parameter, "get_runtime_param", None)  # older versions of the parser load no pydantic
        if parsers is not None and not isinstance(parsers, PlainFirst):
            parameter.get_runtime_param = PlainFirst(parsers)
    return parameters


class PlainCommand(TyperCommand):
    """A command that reads plain values itself, and begins with none that cannot be computed with."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain_first(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            option = name.replace("_", "-")
            if isinstance(value, float) and not isfinite(value):
                raise UserError(f"{option}={value} is no number to compute with; use a finite one")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{option} is an integer of more than 64 bits; use a smaller one")
        return super().invoke(ctx)


class PlainFirst:
    """In place of the parser's own reader of a parameter."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers

    def __call__(self) -> "PlainFirst":
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """A value as its parameter has it."""
        several = param.multiple or param.nargs == -1
        found = plain(value, param.type_descriptor.annotation, param.type_descriptor.parameter_info, several)
        return self._parsers().coerce(value, param=param, ctx=ctx) if found is NOT_PLAIN else found


def plain(value: Any, annotation: Any, about: Any, several: bool) -> Any:
    """What the parser would make of a value, where that is plain to see."""
    if value is None:
        return () if several else None
    if about.parser is not None:
        return NOT_PLAIN
    if annotation == list[str] and isinstance(value, tuple | list) and all(type(each) is str for each in value):
        return list(value)
    if annotation is str and type(value) is str:
        return value
    if annotation is int and type(value) is str and INTEGER.fullmatch(value):
        value = int(value)
    elif annotation is float and type(value) is str and NUMBER.fullmatch(value):
        value = float(value)
    within = about.min is None and about.max is None
    within = within or (type(value) in (int, float) and _between(about.min, value, about.max))
    return value if annotation in (int, float) and type(value) is annotation and within else NOT_PLAIN


def _between(low: float | None, value: float, high: float | None) -> bool:
    return (low is None or low <= value) and (high is None or value <= high)
