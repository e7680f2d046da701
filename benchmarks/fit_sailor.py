"""Calibrates what Sailor's rows need: `python benchmarks/fit_sailor.py [layers|engine|memory ...] [--dry]`.

Needs scipy. `layers`: accelerators, links inside a node and kernels, on blocks and heads that Sailor timed one by one
(`sailor_layers.csv`). `engine`: what the host and messages add, and `memory`: what is fixed, on the runs with equal
accelerators that a hash of their ids does not hold out. No run on mixed accelerators is seen by any of them."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import sailor
from fit_planner import current, split, write
from published_rows import FOLDER, held_out
from scipy.optimize import least_squares

from cuboid.cost import constants
from cuboid.cost.compute import kernels
from cuboid.cost.inputs import Array, Jobs, single
from cuboid.cost.inputs import Shape as ModelShape
from cuboid.cost.layers import layer_times
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.groups import load_groups
from cuboid.spec.layout import Layout

LONG = 5e-3
"""Seconds of a block on GH200 from which the device sets the pace, though taking the times slowed the host."""
CHIPS = ("gh200-96g", "rtx-3090", "rtx-2080-ti", "titan-rtx")
LAYERS = {
    **{f"chip:{name}::linear_efficiency.float32": (0.1, 0.95) for name in CHIPS},
    **{f"chip:{name}::memory_efficiency": (0.4, 0.95) for name in CHIPS},
    "engine:sailor::hidden_traffic": (10.0, 200.0),
    "engine:sailor::ffn_traffic": (3.0, 50.0),
    "engine:sailor::attention_scale": (0.3, 5.0),
    "engine:sailor::attention_back": (0.5, 3.0),
    "engine:sailor::loss_traffic": (8.0, 200.0),
    "fabric:geforce::inner_bandwidth": (2e9, 1e10),
    "fabric:gh200::inner_bandwidth": (5e10, 4e11),
}
ENGINE = {
    "engine:sailor::host_forward": (1e-4, 5e-3),
    "engine:sailor::host_backward": (1e-4, 5e-3),
    "engine:sailor::host_step": (1e-4, 0.1),
    "engine:sailor::host_micro_batch": (1e-5, 1e-2),
    "engine:sailor::transfer_exposed": (0.05, 8.0),
}
MEMORY = {
    "engine:sailor::fixed": (1e9, 8e9),
    "engine:sailor::kept_logit": (2.0, 30.0),
    "engine:sailor::working_layer": (0.3, 2.0),
    "engine:sailor::reserve": (1.0, 1.3),
}


@dataclass(frozen=True)
class Layer:
    """A block of OPT-350M on one node, and the head, in seconds."""

    gpu: str
    tp: int
    micro_batch: int
    forward: float
    backward: float
    head: float


def layers() -> list[Layer]:
    """All that the device set the pace of."""
    found = []
    with (FOLDER / "sailor_layers.csv").open(newline="", encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            head = float(row["head_forward_ms"]) + float(row["head_backward_ms"])
            times = (float(row["forward_ms"]) / 1e3, float(row["backward_ms"]) / 1e3, head / 1e3)
            found.append(Layer(row["gpu"], int(row["tp"]), int(row["mbs"]), *times))
    return [each for each in found if each.gpu not in sailor.TF32 or each.forward + each.backward >= LONG]


def layer_seconds(layer: Layer) -> tuple[float, float, float]:
    """Forward, backward and head, without the host."""
    if layer.gpu == "rtx-3090":
        cluster = load_groups(f"{FOLDER / 'sailor.toml'}:rtx-3090").groups[0].cluster
    else:
        cluster = load_cluster(f"{layer.gpu}x{4 if layer.gpu in sailor.TF32 else 8}")
    if layer.gpu in sailor.TF32:
        cluster = replace(cluster, peak_tflops={**cluster.peak_tflops, "float32": sailor.TF32[layer.gpu]})
    dp = cluster.accelerators // layer.tp
    layout = Layout(tp=layer.tp, dp=dp, micro_batch=layer.micro_batch, sequence_parallel=False)
    batch = 8 * layout.batch_unit
    asked = Question(
        model=sailor.OPT, cluster=cluster, global_batch=batch, sequence=2048, precision="float32", engine="sailor"
    )
    shape, jobs = ModelShape.of(sailor.OPT), Jobs.of([layout], global_batch=batch, sequence=2048)
    parts = kernels(shape, jobs, asked.machine.chip, asked.profile, "float32")
    ahead, back = layer_times(shape, jobs, asked.machine.fabric, asked.profile, parts, "float32").dense
    head = parts.head_forward + parts.head_backward
    return single(ahead.total - ahead.host), single(back.total - back.host), single(head)


def _layer_errors(seen: Sequence[Layer]) -> Array:
    errors = []
    for layer in seen:
        forward, backward, head = layer_seconds(layer)
        errors.append(np.log((forward + backward) / (layer.forward + layer.backward)))
        errors += [0.5 * np.log(forward / layer.forward), 0.5 * np.log(backward / layer.backward)]
        if layer.tp < 4 or layer.gpu in sailor.TF32:  # beyond, its time is that of a sum over slow links
            errors.append(0.5 * np.log(head / layer.head))
    return np.array(errors)


def _try(values: dict[str, float]) -> None:
    for parameter, value in values.items():
        kind, names, field = split(parameter)
        for name in names:
            table = constants.tables()[f"{kind}s"][name]
            outer, _, inner = field.partition(".")
            table[outer] = {**table[outer], inner: value} if inner else value
    for loaded in (constants.chip_named, constants.fabric_named, constants.engine_named):
        loaded.cache_clear()


def fit(bounds: dict[str, tuple[float, float]], errors: Callable[[], Array], prior: float) -> dict[str, float]:
    """The constants, with a soft absolute error of the logarithm and a weak pull to where they were."""
    low, high = np.log(np.array(list(bounds.values()))).T
    start = np.clip(np.log([current(name) for name in bounds]), low + 1e-3, high - 1e-3)

    def residuals(point: Array) -> Array:
        _try(dict(zip(bounds, np.exp(point).tolist(), strict=True)))
        found = errors()
        return np.concatenate([found, 0.1 * prior * np.sqrt(len(found)) * (point - start)])

    result = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=40)
    values = dict(zip(bounds, np.exp(result.x).tolist(), strict=True))
    _try(values)
    return values


def main() -> None:
    """Runs the stages asked for, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="layers, engine, memory")
    parser.add_argument("--dry", action="store_true", help="print the constants and leave the files alone")
    options = parser.parse_args()
    blocks = layers()
    runs = [row for row in sailor.rows() if not row.mixed and not held_out(row.id)]

    def of_runs(place: int) -> Array:
        measured = [(row.seconds, row.memory)[place] for row in runs]
        return np.log(np.array([sailor.predicted(row)[place] for row in runs]) / np.array(measured))

    stages: dict[str, tuple[dict[str, tuple[float, float]], Callable[[], Array], float]] = {
        "layers": (LAYERS, lambda: _layer_errors(blocks), 0.05),
        "engine": (ENGINE, lambda: of_runs(0), 0.02),
        "memory": (MEMORY, lambda: of_runs(1), 0.02),
    }
    for name, (bounds, errors, prior) in stages.items():
        if options.stages and name not in options.stages:
            continue
        before = {parameter: current(parameter) for parameter in bounds}
        values = fit(bounds, errors, prior)
        print(f"{name}: median {np.median(np.abs(np.expm1(errors()))):.1%}")
        for parameter, value in values.items():
            print(f"  {parameter:48s} {before[parameter]:.4g} -> {value:.4g}")
        if not options.dry:
            write(values)


if __name__ == "__main__":
    main()
