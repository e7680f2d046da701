"""Tables as TOML text: the inverse of the standard library's `tomllib`, which only reads.

Training must work with what a GPU image has, so this small writer stands in for a package that such images lack."""

import json
from collections.abc import Mapping
from typing import Any


def dumps(table: Mapping[str, Any]) -> str:
    """TOML text of strings, numbers, booleans, lists and tables; what is not a table comes first, as TOML wants it."""
    lines: list[str] = []
    _write(table, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and (plain or not inner):
        lines.extend(("", f"[{path}]"))
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in inner.items():
        _write(value, f"{path}.{_key(key)}" if path else _key(key), lines)


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isalnum() and bare.isascii() else _value(key)


def _value(value: Any) -> str:
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
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())}}}"
    raise TypeError(f"{value!r} has no form in TOML")
