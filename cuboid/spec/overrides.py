"""`--set a.b=c`: one value in a table, named by its path and typed by its field."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from cuboid.errors import UserError
from cuboid.spec.coding import field_types, parse_text, require_known, unwrap_optional
from cuboid.spec.layout import parse_layout_fields


def apply_overrides(table: dict[str, Any], overrides: Sequence[str], types: Mapping[str, Any]) -> None:
    """Changes `table` in place; later overrides win. `types` are the types of the outermost fields."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} has no value; write it like training.steps=20")
        path, text = path.strip(), text.strip()
        if path in ("model", "layout"):
            table[path] = {"base": text} if path == "model" else parse_layout_fields(text)
        else:
            _set(table, path.split("."), text, types, path)


def _set(table: dict[str, Any], keys: list[str], text: str, types: Mapping[str, Any], path: str) -> None:
    key, *rest = keys
    done = path[: len(path) - len(".".join(keys))].rstrip(".")
    if (done, key) == ("model", "base"):
        types = {"base": str}
    # Of a user's own model or optimizer, which alone knows their types.
    if (done, key) in (("model", "options"), ("optimizer", "options")) and rest:
        table[key] = {**table.get(key, {}), ".".join(rest): _literal(text)}
        return
    require_known(key, types, done)
    hint, optional = unwrap_optional(types[key])
    nested = is_dataclass(hint) and isinstance(hint, type)
    if not rest:
        if nested and not (optional and text.lower() == "none"):
            raise UserError(
                f"{path}={text} would replace a whole table; set one field, like {path}.{next(iter(field_types(hint)))}"
            )
        table[key] = None if nested else parse_text(text, types[key], path)
        return
    if not nested:
        raise UserError(f"unknown key {path}; {done + '.' if done else ''}{key} is a single value, not a table")
    inner = table.get(key)
    table[key] = dict(inner) if isinstance(inner, Mapping) else {}
    _set(table[key], rest, text, field_types(hint), path)


def _literal(text: str) -> object:
    """A value as TOML reads it; a word that is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
