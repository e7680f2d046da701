"""Latency and bandwidth of every tier, and how collectives run over 1, 2, 4, … nodes, from samples. No torch."""

from collections.abc import Sequence

import numpy as np

from cuboid.probe.samples import Sample

LEAST = 1e-7
"""Seconds below which no latency is believed."""
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""How often a ring of this collective moves its bytes past a rank."""


def line(samples: Sequence[Sample], starts: Sequence[float], moved: Sequence[float]) -> tuple[float, float]:
    """Seconds of one start and of one byte that fit best: least squares of relative errors, neither below zero."""
    seconds = np.array([sample.seconds for sample in samples])
    first, second = np.array(starts) / seconds, np.array(moved) / seconds
    slope, start = 0.0, 0.0
    if len(samples) > 1:
        solution = np.linalg.lstsq(np.stack([first, second], axis=1), np.ones(len(seconds)), rcond=None)[0]
        start, slope = float(solution[0]), float(solution[1])
    if slope <= 0:  # noise hid the bytes: what the largest took is the most they can cost
        slope = float(seconds[-1] / moved[-1])
        start = float(max(np.median(seconds - slope * np.array(moved)), 0.0) / starts[0])
    if start <= 0:
        start, slope = LEAST, float(np.sum(second) / np.sum(second**2))
    return max(start, LEAST), slope


def fit_fabric(samples: Sequence[Sample], local: int, nodes: int) -> dict[str, object]:
    """Constants of `Fabric`."""
    inside = [s for s in samples if s.kind in FACTORS and s.nodes == 1 and s.way == "together"]
    found: dict[str, object] = {"spill": 0.0, "partial": 1.0, "decay": 0.0, "straggler": 0.0}
    if inside:
        factors = [FACTORS[s.kind] for s in inside]
        starts = [factor * (s.ranks - 1) for factor, s in zip(factors, inside, strict=True)]
        moved = [factor * (s.ranks - 1) / s.ranks * s.size[0] for factor, s in zip(factors, inside, strict=True)]
        latency, byte = line(inside, starts, moved)
        found |= {"inner_latency": latency, "inner_bandwidth": 1 / byte}
    if nodes == 1:
        return found
    across = [s for s in samples if s.nodes > 1]
    facing = _messages(across, "facing")
    alone = _messages(across, "alone")
    found |= {"outer_latency": alone[0], "outer_bandwidth": 1 / facing[1], "alone": 1 / min(alone[1], facing[1])}
    if not inside:
        found |= {"inner_latency": facing[0], "inner_bandwidth": 1 / facing[1]}
    curve: dict[str, list[float]] = {}
    delay: dict[str, list[float]] = {}
    for kind in (*FACTORS, "all_to_all"):
        factor = FACTORS.get(kind, 1.0)
        points, delays = [], []
        for span in sorted({s.nodes for s in across if s.way == "together"}):
            of = [s for s in across if s.kind == kind and s.nodes == span and s.way == "together"]
            ranks = span * local
            start, byte = line(of, [factor] * len(of), [factor * (ranks - 1) / ranks * s.size[0] for s in of])
            points.append(1e-9 / byte)
            delays.append(start)
        # Nothing reads the first point, of one node, where the inner constants stand.
        delay[kind] = [delays[0], *delays]
        if kind in FACTORS:
            curve[kind] = [points[0], *points]
    return found | {"curve": curve, "delay": delay}


def _messages(samples: Sequence[Sample], way: str) -> tuple[float, float]:
    """Seconds of a message's start and of its bytes."""
    sent = [sample for sample in samples if sample.kind == "shift" and sample.way == way]
    return line(sent, [1.0] * len(sent), [float(sample.size[0]) for sample in sent])
