"""Constants of the cost model from samples of kernels, steps and links; and the small trainings whose steps are timed.
No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.constants import Chip, Engine, engine_named, fabric_named
from cuboid.cost.estimate import Machine, estimate_many
from cuboid.cost.inputs import Array, Jobs, single
from cuboid.probe.samples import Sample
from cuboid.spec.run import Run, build_run

_SHAPES = (
    {"hidden": 64, "layers": 6, "ffn": 192, "vocab": 256, "sequence": 64},
    {"hidden": 256, "layers": 4, "ffn": 704, "vocab": 256, "sequence": 256},
    {"hidden": 256, "layers": 1, "ffn": 704, "vocab": 8192, "sequence": 256},
    {"hidden": 512, "layers": 2, "ffn": 1408, "vocab": 256, "sequence": 128},
)
"""One that is all overhead, one of usual layers, one that is all vocabulary, one of wide layers and few tokens."""


def cases() -> list[Run]:
    """One run for each case."""
    return [_case(dict(shape)) for shape in _SHAPES]


def _case(shape: dict[str, int]) -> Run:
    sequence = shape.pop("sequence")
    training = {"global_batch": 1, "sequence": sequence, "precision": "float32", "device": "cpu"}
    model = {**shape, "heads": 8, "kv_heads": 4, "family": "llama"}
    return build_run({"model": model, "training": training, "data": {"source": "synthetic"}})


NARROW = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True)
class Speed:
    """How matmuls of one precision run: seconds = FLOP / rate × (1 + narrow / shortest side)."""

    rate: float
    narrow: float
    error: float
    """Median of the relative errors over the samples."""


def some(samples: Sequence[Sample], kind: str, precision: str | None = None, way: str = "together") -> list[Sample]:
    """Those of a kind."""
    return [s for s in samples if s.kind == kind and s.way == way and precision in (None, s.precision)]


def matmul_speed(samples: Sequence[Sample], narrow: float | None = None) -> Speed:
    """The best fit to the time of triples of matmuls, those that are all overhead skipped where there are others."""
    large = [sample for sample in samples if min(sample.size) > 32] or list(samples)
    sizes = np.array([sample.size for sample in large], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in large])
    flops, shortest = 6 * sizes.prod(axis=1), sizes.min(axis=1)
    best: Speed | None = None
    for tried in NARROW if narrow is None else (narrow,):
        rates = flops * (1 + tried / shortest) / seconds
        rate = float(np.exp(np.median(np.log(rates))))
        error = float(np.median(np.abs(rates / rate - 1)))
        if best is None or error < best.error:
            best = Speed(rate, tried, error)
    assert best is not None
    return best


def fit_chip(samples: Sequence[Sample], trained: str) -> tuple[dict[str, float], dict[str, object], float]:
    """Peaks by precision (FLOP/s), constants of `Chip`, and memory bandwidth (bytes/s): peaks and bandwidth of a
    rank alone, while the constants say what is left of them when all are busy."""
    speed = matmul_speed(some(samples, "matmul", trained))
    (alone,) = some(samples, "matmul", trained, "alone")
    busy = next(sample for sample in some(samples, "matmul", trained) if sample.size == alone.size)
    together = min(alone.seconds / busy.seconds, 1.0)
    together = together if together < 0.9 else 1.0  # as much is noise
    rates = {trained: speed.rate}
    for precision in {sample.precision for sample in some(samples, "matmul")} - {trained}:
        rates[precision] = matmul_speed(some(samples, "matmul", precision), speed.narrow).rate
    peaks = {precision: rate / together for precision, rate in rates.items()}
    (memory,) = some(samples, "memory", way="alone")
    (shared,) = some(samples, "memory")
    bandwidth = 2 * memory.size[0] / memory.seconds
    floor = min(sample.seconds for sample in some(samples, "matmul", trained)) / 3
    constants: dict[str, object] = {
        "linear_efficiency": dict.fromkeys(peaks, together),
        "kernel_floor": floor,
        "narrow": speed.narrow,
        "together": together,
        "memory_efficiency": min(memory.seconds / shared.seconds, 1.0),
    }
    copies = [sample for kind in ("to_device", "to_host") for sample in some(samples, kind)]
    if copies:  # a CPU has none
        constants["host_link"] = min(sample.size[0] / sample.seconds for sample in copies)
    for kind, passes in (("attention_forward", 0.5), ("attention_backward", 1.25)):
        largest = max(some(samples, kind), key=lambda sample: sample.size)
        tokens, heads, width = largest.size
        seconds = largest.seconds
        if kind == "attention_backward":  # it was timed with the pass forward that it needs
            forward = next(s for s in some(samples, "attention_forward") if s.size == largest.size)
            seconds = max(seconds - forward.seconds, 0.1 * seconds)
        constants[kind] = passes * 4 * tokens**2 * heads * width / seconds / peaks["bf16"]
    return peaks, constants, bandwidth


def fit_engine(samples: Sequence[Sample], chip: Chip) -> tuple[dict[str, object], float]:
    """Constants of `Engine` from real steps, and seconds of a kernel's floor: what a layer costs beside its matmuls.

    The gradients' time is linear in three numbers: the floor of a kernel, the traffic of a layer and of the loss."""
    plain = replace(engine_named("cuboid@cpu"), linear_scale=1.0, attention_scale=1.0)
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    nothing = replace(plain, hidden_traffic=0.0, ffn_traffic=0.0, loss_traffic=0.0)
    layers = replace(nothing, hidden_traffic=plain.hidden_traffic, ffn_traffic=plain.ffn_traffic)
    loss = replace(nothing, loss_traffic=plain.loss_traffic)
    bare = replace(chip, kernel_floor=0.0)
    seconds, base, parts, passes = [], [], [], []
    for number, run in enumerate(cases()):
        jobs = Jobs.of([run.layout], global_batch=1, sequence=run.training.sequence)

        def compute(engine: Engine, of: Chip) -> float:
            machine = Machine(of, fabric_named("cpu"))
            return single(estimate_many(run.model, machine, jobs, engine, "float32").time.compute)  # noqa: B023

        gradients, update = (
            [s for s in some(samples, kind) if s.size == (number,)] for kind in ("gradients", "update")
        )
        if not gradients or not update:
            continue
        zero = compute(nothing, bare)
        unit = compute(nothing, replace(bare, kernel_floor=1.0)) - zero
        seconds.append(gradients[0].seconds)
        base.append(zero)
        parts.append([unit, compute(layers, bare) - zero, compute(loss, bare) - zero])
        passes.append(update[0].seconds * bandwidth / run.model.parameters - 4)
    floor, scale, logits = _not_negative(np.array(parts), np.array(seconds) - np.array(base), np.array(seconds))
    found: dict[str, object] = {
        "linear_scale": 1.0,
        "attention_scale": 1.0,
        "tensor_overlap": 0.0,
        "hidden_traffic": plain.hidden_traffic * scale,
        "ffn_traffic": plain.ffn_traffic * scale,
        "loss_traffic": plain.loss_traffic * logits,
        "optimizer_passes": float(max(np.median(passes[1:] or passes), 0.0)),
    }
    return found, floor


def _not_negative(columns: Array, target: Array, scale: Array) -> list[float]:
    """Least squares of relative errors with no coefficient below zero: the best over all subsets of columns."""
    weighted, wanted = columns / scale[:, None], target / scale
    count = columns.shape[1]
    best: tuple[float, list[float]] = (float(np.sum(wanted**2)), [0.0] * count)
    for subset in range(1, 2**count):
        chosen = [index for index in range(count) if subset >> index & 1]
        solution = np.linalg.lstsq(weighted[:, chosen], wanted, rcond=None)[0]
        error = float(np.sum((weighted[:, chosen] @ solution - wanted) ** 2))
        if np.all(solution >= 0) and error < best[0]:
            values = [0.0] * count
            for index, value in zip(chosen, solution.tolist(), strict=True):
                values[index] = value
            best = (error, values)
    return best[1]


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
