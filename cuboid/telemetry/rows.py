"""Rows of a run's logs, a step each, with the types that whoever reads them counts on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuboid.readers import is_finite, parse_rows, read_rows

Row = dict[str, Any]

NUMBERS = (
    *("seconds", "tokens", "tokens_per_second", "labelled_tokens", "learning_rate", "time", "goodput", "peak"),
    *("loss_scale", "overflows", "first", "clock"),
)
NUMBERS_OR_NONE = ("loss", "gradient_norm", "activation_rms", "validation_loss")
"""JSON has no word for what is not finite."""
NUMBERS_OF_SAVES = ("step", "bytes", "stall_seconds", "write_seconds")


def metric_rows(path: Path) -> list[Row]:
    """Rows of `metrics.jsonl`, and of logs like it, none if there is no such file."""
    return read_rows(path, is_metric)


def parse_metric_rows(path: Path, content: bytes) -> list[Row]:
    """As `metric_rows`, of what was read."""
    return parse_rows(path, content, is_metric)


def is_metric(row: Row) -> bool:
    """Whether a row has a step, and what else is known of has its type."""
    step = row.get("step")
    return (
        isinstance(step, int)
        and not isinstance(step, bool)
        and step >= 0
        and _numbers(row, NUMBERS)
        and all(row.get(name) is None or is_finite(row[name]) for name in NUMBERS_OR_NONE)
        and isinstance(row.get("finite", True), bool)
        and isinstance(row.get("left_out", ""), str)
        and _numbers(row.get("spent", {}))
        and all(_numbers(save, NUMBERS_OF_SAVES) for save in _list(row, "checkpoints"))
        and all(isinstance(told, dict) and isinstance(told.get("text"), str) for told in _list(row, "warnings"))
        and _is_slowest(row.get("slowest"))
        and _are_layers(row.get("layers", {}))
        and isinstance(row.get("routers", {}), dict)
        and all(isinstance(loads, list) and loads and all(map(is_finite, loads)) for loads in _list(row, "loads"))
    )


def _numbers(table: object, names: tuple[str, ...] = ()) -> bool:
    """Whether a table has numbers under these names, where it has any; without names, under all."""
    return isinstance(table, Mapping) and all(is_finite(table[name]) for name in names or table if name in table)


def _list(row: Row, name: str) -> list[Any]:
    """What is no list holds something that is no table."""
    value = row.get(name, [])
    return value if isinstance(value, list) else [None]


def _is_slowest(told: object) -> bool:
    if told is None:
        return True
    return isinstance(told, dict) and all(is_finite(told.get(name)) for name in ("rank", "seconds", "peers"))


def _are_layers(kinds: object) -> bool:
    return isinstance(kinds, dict) and all(
        isinstance(values, list) and all(value is None or is_finite(value) for value in values)
        for values in kinds.values()
    )
