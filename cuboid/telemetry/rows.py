"""Rows of a run's logs, a step each, with the types that whoever reads them counts on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuboid.readers import is_finite, parse_rows, read_rows

Row = dict[str, Any]

NUMBERS = (
    *("seconds", "tokens", "tokens_per_second", "labelled_tokens", "learning_rate", "time", "goodput", "peak"),
    *("loss_scale", "overflows", "first", "clock"),
)
LARGEST, SHORTEST = 1e30, 1e-9
"""Beyond these no number of a run is, and no step in seconds: sums and quotients of them stay finite."""
NUMBERS_OR_NONE = ("loss", "gradient_norm", "activation_rms", "validation_loss", "z_loss")
"""JSON has no word for what is not finite."""
NUMBERS_OF_SAVES = ("step", "bytes", "stall_seconds", "write_seconds")
NEEDED: dict[str, tuple[str, ...]] = {
    "metrics": ("seconds", "tokens"),
    "experts": ("first",),
    "memory": ("peak", "before", "weights", "gradients", "optimizer"),
}
"""Log, as its file is called -> numbers that each of its rows has."""


def metric_rows(path: Path) -> list[Row]:
    """Rows of `metrics.jsonl`, and of logs like it, none if there is no such file."""
    return read_rows(path, _needs(path))


def parse_metric_rows(path: Path, content: bytes) -> list[Row]:
    """As `metric_rows`, of what was read."""
    return parse_rows(path, content, _needs(path))


def _needs(path: Path) -> Callable[[Row], bool]:
    """What a row of this file must have."""
    kind = path.name.partition(".")[0].partition("-")[0]
    there = {"metrics": NUMBERS_OR_NONE[:2], "experts": ("loads",)}.get(kind, ())
    return lambda row: (
        is_metric(row)
        and all(is_finite(row.get(name)) for name in NEEDED.get(kind, ()))
        and all(name in row for name in there)
    )


def are_rank_times(row: Row) -> bool:
    """Whether a row of `ranks-*.jsonl` has a step, and its ranks have numbers."""
    ranks = row.get("ranks", [])
    known = isinstance(ranks, list) and all(isinstance(each, dict) and _is_count(each.get("rank")) for each in ranks)
    return known and _is_count(row.get("step"))


def is_metric(row: Row) -> bool:
    """Whether a row has a step, and what else is known of has its type."""
    return (
        _is_count(row.get("step"))
        and _numbers(row, NUMBERS)
        and all(abs(row.get(name, 0)) <= LARGEST for name in NUMBERS)
        and (not row.get("seconds") or row["seconds"] >= SHORTEST)
        and all(row.get(name) is None or is_finite(row[name]) for name in NUMBERS_OR_NONE)
        and isinstance(row.get("finite", True), bool)
        and isinstance(row.get("left_out", ""), str)
        and _numbers(row.get("spent", {}))
        and all(map(_is_save, _list(row, "checkpoints")))
        and all(isinstance(told, dict) and isinstance(told.get("text"), str) for told in _list(row, "warnings"))
        and _is_slowest(row.get("slowest"))
        and _are_layers(row.get("layers", {}))
        and _are_routers(row.get("routers", {}))
        and _is_round(row.get("islands", {}))
        and ("loads" not in row or _are_loads(row["loads"]))
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_save(save: object) -> bool:
    """One that says its bytes says the rest too."""
    told = isinstance(save, Mapping) and (not save.get("bytes") or all(name in save for name in NUMBERS_OF_SAVES))
    return told and _numbers(save, NUMBERS_OF_SAVES)


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
    if not isinstance(told, dict) or not isinstance(told.get("because"), str):
        return False
    return all(is_finite(told.get(name)) for name in ("rank", "seconds", "peers"))


def _are_loads(loads: object) -> bool:
    """Of each layer, by expert."""
    return isinstance(loads, list) and bool(loads) and all(_is_load(layer) for layer in loads)


def _is_load(layer: object) -> bool:
    return isinstance(layer, list) and bool(layer) and all(map(is_finite, layer))


def _are_routers(told: object) -> bool:
    largest = told.get("largest_load", []) if isinstance(told, dict) else None
    return isinstance(largest, list) and _numbers(told, ("dead",))


def _is_round(told: object) -> bool:
    """Of islands."""
    return isinstance(told, Mapping) and all(
        is_finite(value) or (value is None and name in ("outer_gradient_norm", "drift")) for name, value in told.items()
    )


def _are_layers(kinds: object) -> bool:
    return isinstance(kinds, dict) and all(
        isinstance(values, list) and all(value is None or is_finite(value) for value in values)
        for values in kinds.values()
    )
