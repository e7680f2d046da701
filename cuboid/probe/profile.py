"""The hardware profile: what was measured as a cluster that the planner takes, in TOML. No torch."""

from collections.abc import Sequence
from typing import Any

from cuboid.cost.constants import at_host_speed, chip_from, engine_named, profiled
from cuboid.probe.fit import fit_chip, fit_engine, fit_fabric, some
from cuboid.probe.samples import Sample
from cuboid.spec.cluster import ClusterSpec, LinkTier, accelerator_names, load_cluster
from cuboid.spec.coding import dumps, encode

GIB = 2**30


def catalog_name(device: str) -> str:
    """The catalog's accelerator that a device calls itself like; the longest name wins, `cpu` stands for itself."""
    words = device.lower().replace(" ", "-")
    names = accelerator_names()
    known = [name for name in names if name in words]
    return names[max(known, key=len)] if known else "h100-80g"


def make_cluster(
    samples: Sequence[Sample], *, device: str, memory: float, host_memory: float, local: int, nodes: int
) -> ClusterSpec:
    """The cluster with its measured constants. `memory`: bytes of a host's device, or of its own memory for CPUs."""
    on_cpu = device == "cpu"
    peaks, chip, bandwidth = fit_chip(samples, "float32" if on_cpu else "bf16")
    table: dict[str, Any] = {
        "name": f"{device.lower().replace(' ', '-')}x{local * nodes}",
        "accelerator": catalog_name(device),
        "nodes": nodes,
        "accelerators_per_node": local,
        "peak_tflops": {precision: _short(peak / 1e12) for precision, peak in sorted(peaks.items())},
        "memory_gib": _short(memory / GIB / (local if on_cpu else 1)),
        "memory_bandwidth": _short(bandwidth / 1e9),
        "host_memory_gib": _short(host_memory / GIB),
    }
    found: dict[str, dict[str, object]] = {"chip": chip}
    tiers = load_cluster(f"{table['accelerator']}x1").tiers
    if local * nodes > 1:  # else there was no link to measure
        found["fabric"] = fit_fabric(samples, local, nodes)
        tiers = _tiers(found["fabric"], local, nodes)
    if on_cpu:
        plain = chip_from("cpu", table)
        bare = ClusterSpec(**table, tiers=tiers, measured={"chip": chip})
        engine, floor = fit_engine(samples, profiled(plain, bare, "chip"))
        chip["kernel_floor"] = floor
        found["engine"] = engine
    else:  # the kernels were measured themselves, and need no factor
        (routing,) = some(samples, "routing")
        scales = {"linear_scale": 1.0, "attention_scale": 1.0, "attention_back": 1.0}
        found["engine"] = {**scales, **at_host_speed(engine_named("cuboid"), routing.seconds)}
    rounded = {kind: {key: _rounded(value) for key, value in constants.items()} for kind, constants in found.items()}
    return ClusterSpec(**table, tiers=tiers, measured=rounded)


def _tiers(fabric: dict[str, object], local: int, nodes: int) -> tuple[LinkTier, ...]:
    tiers: list[LinkTier] = []
    for name, size, kind in (("host", local, "inner"), ("network", local * nodes, "outer")):
        if not tiers or size > local:
            bandwidth, latency = fabric[f"{kind}_bandwidth"], fabric[f"{kind}_latency"]
            assert isinstance(bandwidth, float) and isinstance(latency, float)
            tiers.append(
                LinkTier(name=name, size=size, bandwidth=_short(bandwidth / 1e9), latency=_short(latency * 1e6))
            )
    return tuple(tiers)


def profile_table(cluster: ClusterSpec) -> dict[str, Any]:
    """The cluster without links that nobody measured, for which readers take the catalog's."""
    table = encode(cluster) | {"tiers": [encode(tier) for tier in cluster.tiers]}
    if "fabric" not in cluster.measured:
        del table["tiers"]
    return table


def dump_profile(cluster: ClusterSpec, samples: Sequence[Sample], about: dict[str, object]) -> str:
    """The file: the cluster, and under `probe` every sample with its median and range."""
    table = profile_table(cluster)
    del table["name"]  # a file is called what it is called
    probe = {**about, "samples": [sample.row() for sample in samples]}
    return dumps({**table, "probe": probe})


def _short(value: float) -> float:
    """Four digits: more were never measured."""
    return float(f"{value:.4g}")


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return _short(value) if isinstance(value, float) else value
