"""Dataclasses from and to plain tables, with every key and type checked by name; tables from and to TOML and JSON."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import LARGEST_INTEGER, is_text, parse_json

T = TypeVar("T")
LARGEST_FLOAT = 1e30
"""Float32 holds no more than 3.4e38, and what is computed with a setting is larger than it."""

TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
}


_field_types: dict[Any, dict[str, Any]] = {}


def field_types(cls: Any) -> dict[str, Any]:
    """Field name -> type of a dataclass, resolved once per class, because a search builds layouts by the thousand."""
    if cls not in _field_types:
        hints = get_type_hints(cls)
        _field_types[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _field_types[cls]


def unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """The type without `None`, and whether `None` was allowed."""
    if get_origin(hint) in (Union, UnionType):
        kept = [argument for argument in get_args(hint) if argument is not NoneType]
        if len(kept) == 1:
            return kept[0], True
    return hint, False


def require_known(key: str, options: Mapping[str, Any], where: str) -> None:
    """Refuses a key that is not among the options, and names the nearest that are."""
    if key not in options:
        prefix = f"{where}." if where else ""
        near = either(prefix + name for name in nearest_names(key, options))
        raise UserError(f"unknown key {prefix}{key}; did you mean {near}?")


def convert(value: object, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, or a `UserError` that names the field `where`, its value and its type."""
    if (hint is bool and type(value) is bool) or (hint is int and type(value) is int and 0 <= value <= LARGEST_INTEGER):
        return value  # most are, and a search makes layouts by the thousand
    hint, optional = unwrap_optional(hint)
    if (value is None and optional) or hint is object:
        return value
    if get_origin(hint) is Literal:
        options = get_args(hint)
        if value not in options or not isinstance(value, str):
            raise UserError(f"{where}={show(value)} is unknown; use {either(str(option) for option in options)}")
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return decode(hint, value, where)
        raise UserError(f"{where}={show(value)} is {type_name(value)}; it must be a table")
    if get_origin(hint) in (tuple, list):
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}={show(value)} is {type_name(value)}; it must be a list")
        items = (convert(item, get_args(hint)[0], f"{where}[{index}]") for index, item in enumerate(value))
        return get_origin(hint)(items)
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where}={show(value)} is {type_name(value)}; it must be a table")
        return {key: convert(item, get_args(hint)[1], f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise UserError(f"{where} is an integer of more than 64 bits; it must be {TYPE_NAMES.get(hint, 'smaller')}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is a subclass of int, and `steps = true` is never meant as 1.
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where}={show(value)} is {type_name(value)}; it must be {TYPE_NAMES[hint]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}={value} is not finite; it must be a finite number")
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        raise UserError(f"{where}={value:g} is too large for float32; use a number of at most {LARGEST_FLOAT:g}")
    if isinstance(value, str) and not is_text(value):
        raise UserError(f"{where}={value!r} holds a NUL or half a character; it must be text")
    return value


def parse_text(text: str, hint: Any, where: str) -> Any:
    """A value written on a command line, as the type its field has; `none` means None where the field allows it."""
    hint, optional = unwrap_optional(hint)
    if optional and text.lower() == "none":
        return None
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{where}={text} is not true or false; use {where}=true or {where}=false")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return convert(hint(text), hint, where)
        except ValueError:
            raise UserError(f"{where}={text} has the wrong type; it must be {TYPE_NAMES[hint]}") from None
    if get_origin(hint) in (tuple, list) and text.startswith("["):
        try:
            return convert(parse_json(text), hint, where)
        except ValueError:
            raise UserError(f"{where}={text} is no list; write it as [1, 2]") from None
    return convert(text, hint, where)


def decode(cls: type[T], table: Mapping[str, object], where: str = "") -> T:
    """A dataclass from a table; unknown keys, missing keys and wrong types are refused by name."""
    types = field_types(cls)
    prefix = f"{where}." if where else ""
    values = {}
    for key, value in table.items():
        require_known(key, types, where)
        values[key] = convert(value, types[key], prefix + key)
    for name in required_fields(cls):
        if name not in values:
            raise UserError(f"{prefix}{name} is missing; it must be {describe(types[name])}")
    return cls(**values)


def check_types(instance: Any, where: str = "") -> None:
    """Checks every field of a frozen dataclass from its `__post_init__`; whole numbers become floats where meant."""
    prefix = f"{where}." if where else ""
    for name, hint in field_types(type(instance)).items():
        value = getattr(instance, name)
        object.__setattr__(instance, name, convert(value, hint, prefix + name))


def require_at_least(low: int, instance: object, where: str, names: Iterable[str]) -> None:
    """Refuses numbers below `low`, by name."""
    for name in names:
        if getattr(instance, name) < low:
            raise UserError(f"{where}.{name}={getattr(instance, name)} is too small; use {name}={low} or more")


def require_at_most(most: Mapping[str, int], instance: object, where: str) -> None:
    """Refuses numbers that no machine has memory or time for, by name."""
    for name, high in most.items():
        if getattr(instance, name) > high:
            raise UserError(f"{where}.{name}={getattr(instance, name)} is too large; use {name}={high} or less")


def encode(instance: Any) -> dict[str, Any]:
    """The table `decode` turns back into an equal dataclass; None is omitted, because TOML has no word for it."""
    table = {}
    for field in fields(instance):
        value = getattr(instance, field.name)
        if value is not None:
            table[field.name] = encode(value) if is_dataclass(value) else value
    return table


def required_fields(cls: type) -> Iterator[str]:
    """Names of the fields that have no default."""
    for field in fields(cls):
        if field.default is MISSING and field.default_factory is MISSING:
            yield field.name


def describe(hint: Any) -> str:
    """A type in the words of an error sentence."""
    hint, _ = unwrap_optional(hint)
    if get_origin(hint) is Literal:
        return either(str(option) for option in get_args(hint))
    return "a list" if get_origin(hint) in (tuple, list) else TYPE_NAMES.get(hint, "a table")


def type_name(value: object) -> str:
    """The type of a value in the words of an error sentence."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return "true or false"
    return TYPE_NAMES.get(type(value), "a list" if isinstance(value, list) else f"a {type(value).__name__}")


def show(value: object) -> str:
    """A value as it would stand in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def require_in_range(
    instance: object, where: str, names: Sequence[str], *, low: int, high: float | None = None
) -> None:
    """Refuses a field that is below `low` or above `high`."""
    for name in names:
        value = getattr(instance, name)
        if value < low:
            raise UserError(f"{where}.{name}={value} is too small; use {name}={low} or more")
        if high is not None and value > high:
            raise UserError(f"{where}.{name}={value} is too large; use {name}={high} or less")


def dumps(table: Mapping[str, Any]) -> str:
    """TOML text of strings, numbers, booleans, lists and tables; what is not a table comes first, as TOML wants it."""
    lines: list[str] = []
    _write_table(table, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and (plain or not inner):
        lines.extend(("", f"[{path}]"))
    lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
    for key, value in inner.items():
        _write_table(value, f"{path}.{_toml_key(key)}" if path else _toml_key(key), lines)


def _toml_key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isalnum() and bare.isascii() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants the delete character escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return text if any(sign in text for sign in ".en") else f"{text}.0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml_value(inner)}' for key, inner in value.items())}}}"
    raise TypeError(f"{value!r} has no form in TOML")
