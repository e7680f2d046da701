"""The calibrated numbers of the cost model, by accelerator, by fabric and by engine; each file names its sources."""

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from cuboid.cost.engine import Engine
from cuboid.errors import UserError, nearest_names
from cuboid.spec.cluster import accelerator_base, accelerator_table

PRECISIONS = ("bf16", "fp8", "fp4", "float32")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator and how well its kernels run."""

    name: str
    peak: dict[str, float]
    """FLOP/s of dense matrix multiplication by precision, as the vendor prints it."""
    memory: float
    """Bytes a process can see."""
    memory_bandwidth: float
    """Bytes per second, as printed."""
    linear_efficiency: dict[str, float]
    """Share of the peak that a large matrix multiplication of a training step reaches."""
    kernel_floor: float = 6e-6
    """Seconds no kernel goes below."""
    narrow: float = 0.0
    """Output columns at which a multiplication loses half of its efficiency (0: none)."""
    attention_forward: float = 0.5
    """Share of the bf16 peak fused causal attention reaches, counting the causal half."""
    attention_backward: float = 0.4
    together: float = 1.0
    """Share of its speed a rank has while all compute, where ranks share cores; these figures are for that case, and
    a rank that others wait for runs faster."""
    memory_efficiency: float = 0.8
    """Share of the memory bandwidth element-wise kernels reach."""
    host_link: float = 2.0e10
    """Bytes per second to CPU memory, and from it at once, while all accelerators of a node copy (PCIe 4)."""
    best_utilization: dict[str, float] = field(default_factory=dict)
    """Precision -> the best share of the 16-bit peak a published run reached (model FLOPs, attention in full)."""
    source: str = ""


@dataclass(frozen=True)
class Level:
    """Links between groups of nodes: a tier of a cluster beyond the one that joins nodes."""

    inside: int
    """Accelerators of one domain of the level below."""
    bandwidth: float
    """Bytes per second and accelerator out of such a domain that collectives reach."""
    latency: float
    """Seconds per hop."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links between accelerators: fast ones inside a node, slower ones between nodes."""

    name: str
    node: int = 8
    """Accelerators that share the fast links."""
    inner_bandwidth: float
    """Bytes per second and accelerator, one direction, that collectives reach inside a node."""
    inner_latency: float = 4e-6
    """Seconds per hop inside a node."""
    outer_bandwidth: float
    """Bytes per second and accelerator that collectives reach between two nodes."""
    outer_latency: float = 1.2e-5
    further: tuple[Level, ...] = ()
    """Levels beyond the links between nodes, where a cluster has them."""
    links: str = ""
    """The accelerator whose links in the catalog these figures are for: other links scale them."""
    spill: float = 0.0
    """Seconds a tensor-parallel collective loses when its group leaves the node, for two nodes."""
    partial: float = 1.0
    """Share of that bandwidth left to a group that has several ranks on a node but not the whole node."""
    decay: float = 0.0
    """Power of the number of nodes by which the bandwidth between them falls."""
    curve: dict[str, list[float]] = field(default_factory=dict)
    """Measured bus bandwidth (GB/s) of a collective over 1, 2, 4, … whole nodes, where someone measured it."""
    delay: dict[str, list[float]] = field(default_factory=dict)
    """Measured seconds of a collective over 1, 2, 4, … whole nodes before its bytes count, likewise."""
    alone: float = 0.0
    """Bytes per second between two nodes for a rank whose neighbours are silent; 0: nobody measured it, ports are each
    rank's own, and a pipeline with several ranks on a node stays inside it."""
    straggler: float = 0.0
    """Share a step grows by with every doubling of nodes: the slowest rank decides."""
    source: str = ""


def _table(file: str) -> dict[str, Any]:
    text = resources.files("cuboid.cost").joinpath("data", file).read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Everything calibrated, as plain tables: kind -> name -> field -> value."""
    return {kind: _table(f"{kind}.toml") for kind in ("chips", "fabrics", "engines")}


def _merged(kind: str, name: str) -> dict[str, Any]:
    """The entry of a name, its bases merged in."""
    table = tables()[kind]
    if name not in table:
        near = nearest_names(name, tuple(table)) or tuple(table)
        raise UserError(f"{kind[:-1]}={name} is unknown; use {' or '.join(near)}")
    base = table[name].get("base")
    return {**(_merged(kind, base) if base else {}), **table[name], "name": name}


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(cls)}
    return {key: value for key, value in values.items() if key in names}


@cache
def chip_named(name: str) -> Chip:
    """An accelerator of the catalog with its calibration."""
    return chip_from(name, accelerator_table(name))


def chip_from(name: str, facts: dict[str, Any]) -> Chip:
    """An accelerator with some peaks, memory and bandwidth; one without a calibration or base runs like an H100."""
    calibrated: str | None = name
    while calibrated and calibrated not in tables()["chips"]:
        calibrated = accelerator_base(calibrated)
    peaks = {precision: 1e12 * peak for precision, peak in facts["peak_tflops"].items()}
    peaks.setdefault("bf16", peaks.get("fp16", peaks.get("float32", 1e12)))
    peaks.setdefault("float32", peaks["bf16"] / 8)
    values = _known(Chip, _merged("chips", calibrated or "h100-80g")) | {"name": name}
    memory, bandwidth = facts["memory_gib"] * 2**30, facts["memory_bandwidth"] * 1e9
    return Chip(**values, peak=peaks, memory=memory, memory_bandwidth=bandwidth)


@cache
def fabric_named(name: str) -> Fabric:
    """A fabric of the calibration."""
    return Fabric(**_known(Fabric, _merged("fabrics", name)))


@cache
def engine_named(name: str) -> Engine:
    """An engine profile."""
    return Engine(**_known(Engine, _merged("engines", name)))


def engine_for(name: Engine | str, chip: Chip) -> Engine:
    """An engine profile on an accelerator: `name@family` where its rows on that family say something else."""
    if isinstance(name, Engine):
        return name
    special = f"{name}@{chip.name.split('-')[0]}"
    return engine_named(special if special in tables()["engines"] else name)


FABRIC_OF = {"gb200": "nvl72", "gb300": "nvl72", "a800": "a100", "h200": "h100", "h800": "h100", "b300": "b200"}
"""Accelerator family -> the fabric it is usually wired with, where that has another name."""


def default_fabric(accelerator: str) -> str:
    """The fabric clusters of an accelerator usually have."""
    family = accelerator.split("-")[0]
    name = FABRIC_OF.get(family, family)
    return name if name in tables()["fabrics"] else ("mi300x" if family.startswith("mi") else "h100")
