"""Clusters by name (`h100x1024`, `cpux8`) and from TOML, out of the catalog of accelerators and links.

accelerator = "h100"          # whatever the file leaves out is as in the catalog
nodes = 4
memory_gib = 60.0

[[tiers]]
name = "nvlink"
size = 8
bandwidth = 400.0
latency = 3.0
"""

import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cuboid.errors import UserError, either, nearest_names
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import decode, field_types, read_toml, require_known

Table = dict[str, Any]

FACTS = ("peak_tflops", "memory_gib", "memory_bandwidth")


def cluster_from_text(text: str) -> ClusterSpec:
    """A cluster from its name or its file."""
    if text.endswith(".toml"):
        return cluster_from_file(Path(text))
    match = re.fullmatch(r"(.+)x(\d+)", text)
    if match is None:
        near = [f"{name}x8" for name in nearest_names(text, accelerator_names())]
        raise UserError(f"cluster={text} does not say how many accelerators; write it like {either(near)}")
    name, count = canonical_name(match[1]), int(match[2])
    per_node = accelerator_table(name)["accelerators_per_node"] or max(count, 1)
    if count < 1:
        raise UserError(f"cluster={text} has no accelerators; use {match[1]}x1 or more")
    if count > per_node and count % per_node:
        near = [f"{match[1]}x{number * per_node}" for number in (count // per_node, count // per_node + 1)]
        raise UserError(f"cluster={text} does not fill nodes of {per_node}; use {either(near)}")
    per_node = min(per_node, count)
    return _build({"name": text, "accelerator": name, "nodes": count // per_node, "accelerators_per_node": per_node})


def cluster_from_file(path: Path) -> ClusterSpec:
    """A cluster from a TOML file; what it leaves out is as in the catalog."""
    table = read_toml(path)
    table.pop("probe", None)  # the measurements behind a profile, for readers
    for key in table:
        require_known(key, field_types(ClusterSpec), "cluster")
    if "accelerator" not in table:
        raise UserError(f'cluster.accelerator is missing in {path}; write accelerator = "h100"')
    return _build({"name": path.stem, "nodes": 1, **table})


def accelerator_table(name: str) -> Table:
    """The catalog's entry of an accelerator, its base merged in."""
    entry = dict(_catalog()["accelerators"][name])
    base = entry.pop("base", None)
    if base is None:
        return entry
    merged = accelerator_table(base)
    return {**merged, "aliases": [], **entry, "source": {**merged["source"], **entry.get("source", {})}}


def accelerator_base(name: str) -> str | None:
    """The accelerator of which the catalog says this one is a variant."""
    base: str | None = _catalog()["accelerators"].get(name, {}).get("base")
    return base


@cache
def accelerator_names() -> dict[str, str]:
    """Every name and alias of an accelerator -> its name in the catalog."""
    names: dict[str, str] = {}
    for name, entry in _catalog()["accelerators"].items():
        names |= dict.fromkeys([*entry.get("aliases", []), name], name)
    return names


def canonical_name(name: str) -> str:
    """The catalog's name of an accelerator or of one of its aliases."""
    names = accelerator_names()
    if name.lower() not in names:
        raise UserError(f"unknown accelerator={name}; did you mean {either(nearest_names(name, names))}?")
    return names[name.lower()]


@cache
def _catalog() -> Table:
    return tomllib.loads((files("cuboid.spec.catalog") / "accelerators.toml").read_text(encoding="utf-8"))


def _build(table: Table) -> ClusterSpec:
    """A cluster whose left-out facts come from its accelerator, where the catalog knows it."""
    complete = all(key in table for key in (*FACTS, "tiers", "accelerators_per_node"))
    accelerator = table["accelerator"]
    if not isinstance(accelerator, str):
        raise UserError(f'cluster.accelerator={accelerator} is not a string; write accelerator = "h100"')
    if complete:
        return decode(ClusterSpec, table, "cluster")
    accelerator = canonical_name(accelerator)
    known = accelerator_table(accelerator)
    filled = {key: known[key] for key in (*FACTS, "accelerators_per_node")} | table | {"accelerator": accelerator}
    nodes, per_node = filled["nodes"], filled["accelerators_per_node"]
    if "tiers" not in filled and isinstance(nodes, int) and isinstance(per_node, int):
        filled["tiers"] = _tiers(known["tiers"], max(nodes * per_node, 1))
    return decode(ClusterSpec, filled, "cluster")


def _tiers(entries: list[Table], accelerators: int) -> list[Table]:
    """The tiers of a cluster of this size: no domain is larger than the cluster, and nothing lies beyond it."""
    tiers: list[Table] = []
    for entry in entries:
        link = _catalog()["links"][entry["link"]]
        size = min(entry["size"] or accelerators, accelerators)
        tiers.append({"name": entry["link"], "size": size, "bandwidth": link["bandwidth"], "latency": link["latency"]})
        if size == accelerators:
            break
    return tiers
