"""Constants of the cost model from samples of kernels and steps. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.constants import Chip, engine_named, fabric_named
from cuboid.cost.engine import Engine
from cuboid.cost.estimate import Machine, estimate_many
from cuboid.cost.inputs import Array, Jobs, single
from cuboid.probe.cases import cases
from cuboid.probe.samples import Sample

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


def product_speed(samples: Sequence[Sample], narrow: float | None = None) -> Speed:
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
    speed = product_speed(some(samples, "product", trained))
    (alone,) = some(samples, "product", trained, "alone")
    busy = next(sample for sample in some(samples, "product", trained) if sample.size == alone.size)
    together = min(alone.seconds / busy.seconds, 1.0)
    together = together if together < 0.9 else 1.0  # as much is noise
    rates = {trained: speed.rate}
    for precision in {sample.precision for sample in some(samples, "product")} - {trained}:
        rates[precision] = product_speed(some(samples, "product", precision), speed.narrow).rate
    peaks = {precision: rate / together for precision, rate in rates.items()}
    (memory,) = some(samples, "memory", way="alone")
    (shared,) = some(samples, "memory")
    bandwidth = 2 * memory.size[0] / memory.seconds
    floor = min(sample.seconds for sample in some(samples, "product", trained)) / 3
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
