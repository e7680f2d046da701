"""`ClusterSpec`: accelerators in nodes, and the tiers of links between them; by name (`h100x1024`, `cpux8`) and from
TOML, out of the catalog of accelerators and links.

accelerator = "h100"          # whatever the file omits is as in the catalog
nodes = 4
memory_gib = 60.0

[[tiers]]
name = "nvlink"
size = 8
bandwidth = 400.0
latency = 3.0
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from cuboid.errors import UserError, either, nearest_names, up_to
from cuboid.readers import Table, parse_toml, read_toml
from cuboid.spec.coding import check_types, decode, field_types, require_known

MOST_ACCELERATORS = 10_000_000
MOST_WATTS = 1e5
"""Of one accelerator; a wafer takes a quarter of it."""
PEAKS = ("bf16", "fp16", "fp8", "fp4", "tf32", "float32", "float64")
NEEDED = ("bf16", "fp16", "float32")
"""Precisions of which every accelerator has one."""
MOST_TFLOPS = 1e6
# What lies beyond these bounds was written in another unit: MiB, bytes, bytes per second, seconds.
UNITS = {
    "memory_gib": (1e-3, 1e4, "GiB of one accelerator"),
    "memory_bandwidth": (1e-2, 1e8, "GB/s of one accelerator's memory"),
}
LINK_UNITS = {
    "bandwidth": (1e-6, 1e6, "GB/s of one accelerator in one direction"),
    "latency": (1e-3, 1e7, "microseconds"),
}
"""Field -> the least and the most, and its unit."""


@dataclass(frozen=True, kw_only=True)
class LinkTier:
    """One kind of link; neighbours in rank share the fast ones."""

    name: str
    size: int
    """How many accelerators one domain of this tier spans."""
    bandwidth: float
    """GB/s per accelerator in one direction."""
    latency: float
    """Microseconds per hop."""

    def __post_init__(self) -> None:
        check_types(self, "tier")
        if self.size < 1:
            raise UserError(f"tier.size={self.size} of {self.name} is too small; use size=1 or more")
        for name in ("bandwidth", "latency"):
            value = getattr(self, name)
            if value <= 0:
                raise UserError(f"tier.{name}={value} of {self.name} is not positive; use a number above 0")
            low, high, unit = LINK_UNITS[name]
            if not low <= value <= high:
                raise UserError(
                    f"tier.{name}={value:g} of {self.name} is not between {low:g} and {high:g}; write it in {unit}"
                )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster whose ranks fill node after node, and domain after domain of each tier."""

    name: str
    accelerator: str
    """Its name in the catalog."""
    nodes: int
    accelerators_per_node: int
    tiers: tuple[LinkTier, ...]
    """From the fastest to the slowest; the last one spans the cluster."""
    peak_tflops: dict[str, float] = field(hash=False)
    """Precision (bf16, fp16, fp8, fp4, tf32, float32, float64) -> dense peak of one accelerator."""
    memory_gib: float
    """What one process can see of its accelerator's memory."""
    memory_bandwidth: float
    """GB/s."""
    host_memory_gib: float = 0.0
    """Memory of a node's own, for what is offloaded; 0: not known."""
    watts: float = 0.0
    """Board power of one accelerator; 0: not known."""
    measured: dict[str, dict[str, object]] = field(default_factory=dict, hash=False)
    """What `cuboid probe` found, in place of the planner's calibration: chip, fabric, engine -> constant -> value."""

    def __post_init__(self) -> None:
        check_types(self, "cluster")
        for name in ("nodes", "accelerators_per_node", "memory_gib", "memory_bandwidth"):
            if getattr(self, name) <= 0:
                raise UserError(f"cluster.{name}={getattr(self, name)} is not positive; use {name}=1 or more")
        for name, (low, high, unit) in UNITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"cluster.{name}={value:g} is not between {low:g} and {high:g}; write it in {unit}")
        if self.accelerators > MOST_ACCELERATORS:
            raise UserError(
                f"cluster.nodes={self.nodes} makes {self.accelerators} accelerators; use {MOST_ACCELERATORS} or less"
            )
        if self.host_memory_gib < 0:
            raise UserError(f"cluster.host_memory_gib={self.host_memory_gib} is negative; use 0 where it is not known")
        if not 0 <= self.watts <= MOST_WATTS:
            raise UserError(
                f"cluster.watts={self.watts:g} is not from 0 to {MOST_WATTS:g}; use 0 where board power is not known"
            )
        for precision, peak in self.peak_tflops.items():
            require_known(precision, dict.fromkeys(PEAKS), "cluster.peak_tflops")
            if peak <= 0:
                raise UserError(f"cluster.peak_tflops.{precision}={peak} is not positive; use a number above 0")
            if peak > MOST_TFLOPS:
                raise UserError(
                    f"cluster.peak_tflops.{precision}={peak:g} is more than {MOST_TFLOPS:g}; write it in TFLOPS"
                )
        if not self.peak_tflops.keys() & set(NEEDED):
            raise UserError(f"cluster.peak_tflops has none of {', '.join(NEEDED)}; add {NEEDED[0]} = 100.0 or the like")
        sizes = [tier.size for tier in self.tiers]
        if not sizes or sizes != sorted(set(sizes)) or sizes[-1] != self.accelerators:
            shown = either(f"{tier.name}={tier.size}" for tier in self.tiers) or "none"
            raise UserError(
                f"cluster.tiers sizes {shown} do not grow to the cluster; end with size={self.accelerators}"
            )

    @property
    def accelerators(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.accelerators_per_node

    def node_of(self, rank: int) -> int:
        """The node a rank sits on."""
        return rank // self.accelerators_per_node

    def tier_of(self, ranks: Iterable[int]) -> LinkTier:
        """The slowest tier that traffic between these ranks crosses; the fastest one for a single rank."""
        members = list(ranks)
        for tier in self.tiers:
            if len({rank // tier.size for rank in members}) <= 1:
                return tier
        raise UserError(f"rank={max(members)} is outside {self.name}; use {up_to(self.accelerators - 1, 'rank=')}")


FACTS = ("peak_tflops", "memory_gib", "memory_bandwidth")


def load_cluster(text: str) -> ClusterSpec:
    """A cluster from a name such as `h100x1024`, from a TOML file, or one group of a file: `sites.toml:oregon`."""
    if ".toml:" in text:
        from cuboid.spec.groups import load_groups  # which reads clusters with this module

        return load_groups(text).groups[0].cluster
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
    """A cluster from a TOML file; what it omits is as in the catalog."""
    return cluster_from_table(read_toml(path), path)


def cluster_from_table(table: Table, path: Path) -> ClusterSpec:
    """The same from what a file says. `path`: named in errors, and after the file a cluster is called."""
    if "groups" in table:
        from cuboid.spec.groups import load_groups  # which reads clusters with this module

        found = load_groups(str(path)).groups
        if len(found) == 1:
            return found[0].cluster
        names = " or ".join(f"{path}:{group.name}" for group in found[:2])
        raise UserError(f"{path} has groups of accelerators and this takes one kind; name one of them, as in {names}")
    table.pop("probe", None)  # the measurements behind a profile, for readers
    for key in table:
        require_known(key, {**field_types(ClusterSpec), "groups": None, "links": None}, "cluster")
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


def link_table() -> dict[str, Table]:
    """The catalog's links by name."""
    return dict(_catalog()["links"])


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
    if name.lower() in names:
        return names[name.lower()]
    raise UserError(f"unknown accelerator={name}; did you mean {either(_near(name))}?")


def _near(name: str) -> list[str]:
    inside = _names_in(name)
    found = nearest_names(name, [known for known in accelerator_names() if not inside or inside[0] in known])
    return list(dict.fromkeys([*inside, *found]))[:3]


def _names_in(name: str) -> list[str]:
    """The longest name that is in a longer one, such as a driver's: rtx4090 in NVIDIA GeForce RTX 4090."""
    known = {re.sub("[^a-z0-9]", "", each): each for each in accelerator_names()}
    between = "[^a-z0-9]*"
    found = [each for each in known if re.search(rf"{between.join(each)}(?!\d)", name.lower())]
    return [known[max(found, key=len)]] if found else []


def tables_of(table: Table, key: str) -> list[Table]:
    """`[[key]]` of a file."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise UserError(f"{key} is no list of tables; write [[{key}]] before each of them")
    return [dict(each) for each in value]


@cache
def _catalog() -> Table:
    return parse_toml((files("cuboid.spec.catalog") / "accelerators.toml").read_text(encoding="utf-8"))


def _build(table: Table) -> ClusterSpec:
    """A cluster whose omitted facts come from its accelerator, where the catalog knows it."""
    complete = all(key in table for key in (*FACTS, "tiers", "accelerators_per_node"))
    accelerator = table["accelerator"]
    if not isinstance(accelerator, str):
        raise UserError(f'cluster.accelerator={accelerator} is not a string; write accelerator = "h100"')
    if "tiers" in table:
        tables_of(table, "tiers")
    if complete:
        return decode(ClusterSpec, {"watts": _watts(accelerator)} | table, "cluster")
    _require_described(accelerator, table)
    accelerator = canonical_name(accelerator)
    known = accelerator_table(accelerator)
    filled = {key: known[key] for key in (*FACTS, "accelerators_per_node")} | {"watts": _watts(accelerator)}
    filled |= table | {"accelerator": accelerator}
    nodes, per_node = filled["nodes"], filled["accelerators_per_node"]
    if isinstance(per_node, int) and per_node < 1:
        raise UserError(
            f"cluster.accelerators_per_node={per_node} is not positive; use accelerators_per_node=1 or more"
        )
    if "tiers" not in filled and isinstance(nodes, int) and isinstance(per_node, int):
        filled["tiers"] = _tiers(known["tiers"], max(nodes * per_node, 1), known["accelerators_per_node"], per_node)
    return decode(ClusterSpec, filled, "cluster")


def _require_described(accelerator: str, table: Table) -> None:
    """Of an accelerator that the catalog does not know a file says everything."""
    if accelerator.lower() in accelerator_names():
        return
    counted = re.fullmatch(r"(.+)x(\d+)", accelerator)
    if counted and counted[1].lower() in accelerator_names():
        raise UserError(
            f'accelerator={accelerator} is an accelerator and a number; write accelerator = "{counted[1]}", '
            "and nodes and accelerators_per_node"
        )
    needed = ("tiers", *FACTS)
    missing = [key for key in (*needed, "accelerators_per_node") if key not in table]
    if table.keys() & set(needed):
        raise UserError(
            f"unknown accelerator={accelerator}; use {either(_near(accelerator))}, or add also "
            f"{' and '.join(missing)}, which the catalog does not know of it"
        )


def _watts(accelerator: str) -> float:
    """The catalog's, of one that it knows."""
    name = accelerator_names().get(accelerator.lower())
    return float(accelerator_table(name).get("watts", 0.0)) if name else 0.0


def _tiers(entries: list[Table], accelerators: int, usual_node: int, node: int) -> list[Table]:
    """The tiers of a cluster of this size: links within a node end with the node, no domain is larger than the cluster,
    and nothing lies beyond it."""
    tiers: list[Table] = []
    for entry in entries:
        link = _catalog()["links"][entry["link"]]
        size = node if entry["size"] == usual_node else entry["size"] or accelerators
        size = min(size, accelerators)
        tiers.append({"name": entry["link"], "size": size, "bandwidth": link["bandwidth"], "latency": link["latency"]})
        if size == accelerators:
            break
    return tiers
