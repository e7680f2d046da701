"""Tiers come back out of samples that were made from them, noise or not."""

import pytest

from cuboid.probe.fit import FACTORS, fit_fabric, line
from cuboid.probe.samples import Sample

SIZES = (4096, 65536, 1 << 20)


def ring(kind: str, ranks: int, nodes: int, start: float, bandwidth: float) -> list[Sample]:
    factor = FACTORS.get(kind, 1.0)
    return [
        Sample(kind, (size,), (factor * (start + (ranks - 1) / ranks * size / bandwidth),), "", ranks, nodes)
        for size in SIZES
    ]


def test_one_host_has_one_tier() -> None:
    samples = [sample for kind in FACTORS for sample in ring(kind, 4, 1, 3 * 2e-4, 1e9)]
    found = fit_fabric(samples, local=4, nodes=1)
    assert found["inner_latency"] == pytest.approx(2e-4)
    assert found["inner_bandwidth"] == pytest.approx(1e9)
    assert "outer_bandwidth" not in found


def test_several_hosts_have_curves_by_the_number_of_hosts() -> None:
    samples = [sample for kind in FACTORS for sample in ring(kind, 2, 1, 2e-4, 1e9)]
    for span, start, bandwidth in ((2, 1e-3, 1e8), (4, 3e-3, 5e7)):
        for kind in (*FACTORS, "all_to_all"):
            samples += ring(kind, 2 * span, span, start, bandwidth)
    for way, bandwidth in (("facing", 5e7), ("alone", 1e8)):
        samples += [Sample("shift", (size,), (1e-3 + size / bandwidth,), "", 4, 4, way) for size in SIZES]
    found = fit_fabric(samples, local=2, nodes=4)
    assert found["outer_bandwidth"] == pytest.approx(5e7)
    assert found["alone"] == pytest.approx(1e8)
    assert found["curve"]["all_gather"] == pytest.approx([0.1, 0.1, 0.05])  # type: ignore[index]
    assert found["delay"]["all_reduce"] == pytest.approx([1e-3, 1e-3, 3e-3])  # type: ignore[index]


def test_noise_never_makes_time_negative() -> None:
    falling = [Sample("shift", (size,), (seconds,)) for size, seconds in zip(SIZES, (3e-3, 2e-3, 1e-3), strict=True)]
    start, slope = line(falling, [1.0] * 3, [float(size) for size in SIZES])
    assert start > 0 and slope > 0
    below = [Sample("shift", (size,), (size / 1e9 * size / 1e6,)) for size in SIZES]
    start, slope = line(below, [1.0] * 3, [float(size) for size in SIZES])
    assert start > 0 and slope > 0
