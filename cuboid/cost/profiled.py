"""Constants that `cuboid probe` measured on a cluster, in place of the calibrated ones."""

from dataclasses import fields, replace
from typing import TypeVar

from cuboid.cost.constants import Chip, Fabric
from cuboid.cost.engine import Engine
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import convert, field_types, require_known

Constants = TypeVar("Constants", Chip, Fabric, Engine)
KINDS = {"chip": Chip, "fabric": Fabric, "engine": Engine}


def profiled(constants: Constants, cluster: ClusterSpec, kind: str) -> Constants:
    """The constants of one of the `KINDS`, those replaced that the cluster's profile has."""
    for key in cluster.measured:
        require_known(key, KINDS, "cluster.measured")
    types, where = field_types(KINDS[kind]), f"cluster.measured.{kind}"
    values = {}
    for key, value in cluster.measured.get(kind, {}).items():
        require_known(key, types, where)
        values[key] = convert(value, types[key], f"{where}.{key}")
    return replace(constants, **values)


SECONDS: dict[str, tuple[str, ...]] = {
    "chip": ("kernel_floor",),
    "fabric": ("inner_latency", "outer_latency", "spill"),
    "engine": tuple(
        item.name for item in fields(Engine) if item.name.startswith("host_") and item.name != "host_jitter"
    ),
}
"""Kind of constants -> those that are seconds."""
RATES: dict[str, tuple[str, ...]] = {"chip": ("host_link",), "fabric": ("inner_bandwidth", "outer_bandwidth", "alone")}
"""… that are so much a second; those of an accelerator's data sheet stand in the cluster itself."""


def slowed(cluster: ClusterSpec, factor: float, chip: Chip, fabric: Fabric, engine: Engine) -> ClusterSpec:
    """The cluster as if every second of it, by these constants, were so many: whatever a step does takes so much
    longer."""
    measured: dict[str, dict[str, object]] = {kind: dict(values) for kind, values in cluster.measured.items()}
    for kind, constants in (("chip", chip), ("fabric", fabric), ("engine", engine)):
        values = measured.setdefault(kind, {})
        values |= {name: factor * getattr(constants, name) for name in SECONDS[kind]}
        values |= {name: getattr(constants, name) / factor for name in RATES.get(kind, ())}
    measured["fabric"]["curve"] = {name: [value / factor for value in each] for name, each in fabric.curve.items()}
    measured["fabric"]["delay"] = {name: [value * factor for value in each] for name, each in fabric.delay.items()}
    peaks = {name: value / factor for name, value in cluster.peak_tflops.items()}
    bandwidth = cluster.memory_bandwidth / factor
    return replace(cluster, peak_tflops=peaks, memory_bandwidth=bandwidth, measured=measured)
