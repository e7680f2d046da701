"""Calibrates the constants of the cost model on published runs: `python benchmarks/fit_planner.py [stage ...] [--dry]`.

Needs scipy. Only rows whose hashed id is not held out (published_rows.py) are seen. Each stage fits the named constants
of some accelerators, fabrics and engines on the runs of some sources, starting from the values in cuboid/cost/data, and
writes the result back there. The loss is a soft absolute error of the logarithm, so that a few broken runs do not bend
the physics; a weak prior keeps constants that a stage cannot see near where they were, and bounds keep them physical.

`--without TEXT` checks a stage on models it has not seen: it fits without the runs whose source and model contain the
text (`playbook Llama-like-8B`), leaves the files alone, and prints the errors on those runs.
"""

import argparse
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from published_rows import Run, load
from scipy.optimize import least_squares

from cuboid.cost import constants
from cuboid.cost.constants import Chip, Engine, Fabric
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.memory import peak_memory
from cuboid.cost.published import links_of, stack
from cuboid.cost.step import step_time

DATA = Path(constants.__file__).parent / "data"

BOUNDS: tuple[tuple[str, float, float], ...] = (
    # The best that single kernels reach: SimuMax's tables for A100 and B200, cuBLAS and Transformer Engine for H100.
    ("chip:a100.*linear_efficiency.bf16", 0.4, 0.80),
    ("chip:h.*linear_efficiency.bf16", 0.4, 0.74),
    ("chip:h.*linear_efficiency.fp8", 0.3, 0.68),
    (".*linear_efficiency", 0.2, 0.80),
    (".*memory_efficiency", 0.5, 0.92),
    (".*attention_(forward|backward)", 0.2, 0.65),
    (".*_overlap", 0.001, 0.97),
    ("fabric:jean-zay-v100::inner_bandwidth", 5e9, 9e11),
    (".*::inner_bandwidth", 4e10, 9e11),
    # What the network ports can carry at most.
    ("fabric:(vtrain|jean-zay-v100)::outer_bandwidth", 1e9, 12.5e9),
    ("fabric:jean-zay-a100::outer_bandwidth", 1e9, 6.25e9),
    ("fabric:roce-a100::outer_bandwidth", 1e9, 6.25e9),
    ("fabric:mosaic-a100::outer_bandwidth", 1e9, 25e9),
    ("fabric:(h100|b200|playbook)::outer_bandwidth", 1e9, 47e9),
    (".*::narrow", 2, 120),
    (".*::inner_latency", 1e-6, 2e-5),
    (".*::partial", 0.15, 1.0),
    (".*::transfer_exposed", 0.02, 1.5),
    (".*::linear_scale", 0.95, 2.0),
    (".*::cast_traffic", 0.5, 9.0),
    (".*::kernel_floor", 2e-6, 1.5e-5),
    (".*::hidden_traffic", 16.0, 80.0),
    # Whatever a head takes beside its matmuls, in these rows more than its bytes.
    ("engine:megatron-deepspeed::loss_traffic", 3.0, 400.0),
    (".*_traffic", 3.0, 100.0),
    (".*::straggler", 1e-4, 0.03),
    (".*::decay", 1e-3, 0.5),
    (".*::grouped_scale", 0.8, 4.0),
    (".*::grouped_fp8", 0.8, 2.0),
    (".*::fixed", 1e7, 6e9),
    (".*::gradient_bytes", 1.9, 4.4),
    (".*::optimizer_bytes", 7.0, 12.5),
    (".*::kept_logit", 0.5, 20.0),
)
"""Constant -> the range a fit may move it in; the first pattern that matches counts."""


@dataclass(frozen=True)
class Stage:
    """One fit: which runs, which constants (`kind:name|name::field`), of time or of memory."""

    name: str
    sources: tuple[str, ...]
    parameters: tuple[str, ...]
    memory: bool = False
    chips: str = ""
    prior: float = 0.1
    scale: float = 0.05
    weights: tuple[tuple[str, float], ...] = ()
    """Source -> weight of its runs, where not 1."""
    keep: Callable[[Run], bool] | None = None


@dataclass(frozen=True)
class Batch:
    """Runs of one accelerator, fabric, engine and precision."""

    names: dict[str, str]
    precision: str
    shape: Shape
    jobs: Jobs
    truth: Array
    weight: Array


def batches(stage: Stage, runs: Sequence[Run], unseen: bool = False) -> list[Batch]:
    """The runs a stage sees, stacked; with `unseen` the held-out ones too."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        truth = run.memory if stage.memory else run.seconds
        if run.case is None or run.out_of_memory or not np.isfinite(truth) or (run.held_out and not unseen):
            continue
        if run.source not in stage.sources or not re.match(stage.chips, run.case.chip):
            continue
        if stage.keep is None or stage.keep(run):
            case = run.case
            groups.setdefault((case.chip, case.fabric, case.engine, case.precision), []).append(run)
    weights = dict(stage.weights)
    result = []
    for (chip, fabric, engine, precision), members in groups.items():
        shape, jobs = stack([run.case for run in members if run.case])
        measured = np.array([run.memory if stage.memory else run.seconds for run in members])
        weight = np.array([weights.get(run.source, 1.0) for run in members])
        names = {"chip": chip, "fabric": fabric, "engine": engine}
        result.append(Batch(names, precision, shape, jobs, measured, weight))
    return result


def split(parameter: str) -> tuple[str, tuple[str, ...], str]:
    """`kind:name|name::field` in its parts."""
    kind, rest = parameter.split(":", 1)
    names, field = rest.split("::", 1)
    return kind, tuple(names.split("|")), field


def current(parameter: str) -> float:
    """The value a constant has now."""
    kind, names, field = split(parameter)
    loaded = {"chip": constants.chip_named, "fabric": constants.fabric_named, "engine": constants.engine_named}[kind]
    value = getattr(loaded(names[0]), field.split(".")[0])
    return float(value[field.split(".")[1]] if "." in field else value)


def changed(batch: Batch, values: dict[str, float]) -> tuple[Chip, Fabric, Engine]:
    """The batch's constants with the values being tried."""
    objects: dict[str, Any] = {
        "chip": constants.chip_named(batch.names["chip"]),
        "fabric": constants.fabric_named(batch.names["fabric"]),
        "engine": constants.engine_named(batch.names["engine"]),
    }
    for parameter, value in values.items():
        kind, names, field = split(parameter)
        if _owner(kind, batch.names[kind], field.split(".")[0]) not in names:
            continue
        if "." in field:
            outer, inner = field.split(".")
            objects[kind] = replace(objects[kind], **{outer: {**getattr(objects[kind], outer), inner: value}})
        else:
            objects[kind] = replace(objects[kind], **{field: value})
    fabric = links_of(batch.names["chip"], batch.names["fabric"], objects["fabric"])
    return objects["chip"], fabric, objects["engine"]


def _owner(kind: str, name: str, field: str) -> str:
    """The entry that a constant of another comes from: its own, or that of a base."""
    table = constants.tables()[f"{kind}s"]
    while name in table and field not in table[name] and "base" in table[name]:
        name = table[name]["base"]
    return name


def predicted(stage: Stage, batch: Batch, values: dict[str, float]) -> Array:
    """What the model says of the batch."""
    chip, fabric, engine = changed(batch, values)
    if stage.memory:
        result = peak_memory(batch.shape, batch.jobs, engine) / 2**30
    else:
        result = step_time(batch.shape, batch.jobs, chip, fabric, engine, batch.precision).total
    return np.broadcast_to(result, batch.truth.shape)


def limits(parameter: str) -> tuple[float, float]:
    """The range of a constant."""
    return next(((low, high) for pattern, low, high in BOUNDS if re.match(pattern, parameter)), (1e-9, 1e13))


def fit(stage: Stage, runs: Sequence[Run]) -> dict[str, float]:
    """The constants of a stage, fitted."""
    data = batches(stage, runs)
    low, high = np.log(np.array([limits(name) for name in stage.parameters])).T
    start = np.log(np.maximum([current(name) for name in stage.parameters], 1e-9))
    start = np.clip(start, low + 1e-3, high - 1e-3)

    def residuals(point: Array) -> Array:
        values = dict(zip(stage.parameters, np.exp(point), strict=True))
        errors = [batch.weight * np.log(predicted(stage, batch, values) / batch.truth) for batch in data]
        count = sum(len(error) for error in errors)
        return np.concatenate([*errors, 0.1 * stage.prior * np.sqrt(count) * (point - start)])

    result = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=stage.scale, max_nfev=80)
    return dict(zip(stage.parameters, (float(value) for value in np.exp(result.x)), strict=True))


def write(values: dict[str, float]) -> None:
    """Puts fitted constants into the calibration files."""
    for parameter, value in values.items():
        kind, names, field = split(parameter)
        for name in names:
            _write_one(DATA / f"{kind}s.toml", name, field, value)
    for loaded in (constants.tables, constants.chip_named, constants.fabric_named, constants.engine_named):
        loaded.cache_clear()


def _write_one(path: Path, name: str, field: str, value: float) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    start = lines.index(f"[{name}]" if re.fullmatch(r"[\w-]+", name) else f'["{name}"]') + 1
    end = next((index for index in range(start, len(lines)) if lines[index].startswith("[")), len(lines))
    key, text = field, f"{value:.4g}"
    if "." in field:
        key, inner = field.split(".")
        table = {**constants.chip_named(name).linear_efficiency}
        old = tomllib.loads("\n".join(lines[start:end])).get(key, table)
        text = "{ " + ", ".join(f"{k} = {v:.4g}" for k, v in {**old, inner: value}.items()) + " }"
    line = f"{key} = {text}"
    found = next((index for index in range(start, end) if lines[index].startswith(f"{key} =")), None)
    if found is not None:
        lines[found] = line
    else:
        while end > start and not lines[end - 1].strip():
            end -= 1
        lines.insert(end, line)
    path.write_text("\n".join(lines), encoding="utf-8")


def _all(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}::{name}" for name in names)


HOST = (
    "host_forward",
    "host_backward",
    "host_collective",
    "host_jitter",
    "host_fallback",
    "host_micro_batch",
    "host_step",
)
AMPERE, HOPPER = "chip:a100-80g|a100-40g", "chip:h100-80g|h200|h100-96g"
KERNELS = ("kernel_floor", "memory_efficiency", "narrow", "attention_forward", "attention_backward")
NEMO, BRIDGE = "engine:nemo", "engine:megatron-bridge"

STAGES = (
    Stage(
        "ampere-hopper",
        (
            *(
                "vtrain-single",
                "vtrain-multi",
                "bs176",
                "bloom",
                "korth-t5",
                "zb",
                "internevo",
                "llmf",
                "llmf-old",
                "fms",
            ),
            *("torchtitan", "dgxc", "dgxc-log", "nemo2407", "nemo2407a", "nemo-longseq", "mlm-llama", "tinyllama"),
        ),
        (
            *_all(AMPERE, "linear_efficiency.bf16", *KERNELS),
            *_all(HOPPER, *KERNELS),
            *_all("chip:h100-80g|h200", "linear_efficiency.bf16", "linear_efficiency.fp8"),
            *_all("chip:h100-96g", "linear_efficiency.bf16", "linear_efficiency.fp8"),
            *_all(
                "engine:megatron-deepspeed",
                *HOST,
                "attention_scale",
                "hidden_traffic",
                "loss_traffic",
                "transfer_exposed",
            ),
            *_all(
                "fabric:vtrain", "partial", "decay", "inner_latency", "inner_bandwidth", "outer_bandwidth", "straggler"
            ),
            *_all("fabric:jean-zay-a100", "partial", "inner_bandwidth", "outer_bandwidth", "straggler"),
            *_all("engine:fsdp", "hidden_traffic", "ffn_traffic", "loss_traffic", "linear_scale", "attention_scale"),
            "fabric:mosaic-a100::outer_bandwidth",
            *_all("engine:internevo", "hidden_traffic", "linear_scale", "gradient_overlap", "attention_scale"),
            *_all("fabric:roce-a100", "outer_bandwidth", "decay"),
            *_all("engine:megatron-zero-bubble", "linear_scale", "hidden_traffic", "attention_scale"),
            "engine:megatron::linear_scale",
            "engine:megatron-2021::linear_scale",
            *_all(NEMO, "cast_traffic", "hidden_traffic", "ffn_traffic", "tensor_overlap", "transfer_exposed"),
            *_all(NEMO, "gradient_overlap", "gather_overlap", "context_overlap", "attention_scale", "linear_scale"),
            *_all(NEMO, "expert_overlap", "grouped_scale", "grouped_fp8", "routing_traffic"),
            *_all("fabric:h100", "inner_bandwidth", "outer_bandwidth", "straggler", "inner_latency"),
            *_all(
                "engine:torchtitan",
                "linear_scale",
                "hidden_traffic",
                "cast_traffic",
                "tensor_overlap",
                "attention_scale",
            ),
            *_all("engine:maxtext", "linear_scale", "shard_overlap"),
        ),
        chips="[ah]",
        weights=(("vtrain-single", 0.33),),
    ),
    Stage(
        "hopper-mixtures",
        ("dgxc",),
        _all(NEMO, "grouped_scale", "grouped_fp8", "routing_traffic", "expert_overlap"),
        chips="h",
        keep=lambda run: bool(run.case and run.case.shape["experts"]),
    ),
    Stage(
        "long-sequences",
        ("nemo-longseq", "dgxc"),
        _all(NEMO, "context_overlap"),
        chips="h",
        keep=lambda run: bool(run.case and run.case.job["cp"] > 1),
    ),
    Stage(
        "volta",
        ("bs104tune", "bs13b", "bs1b3", "bsgpt2"),
        (
            *_all("chip:v100-32g|v100-16g", "linear_efficiency.bf16", "memory_efficiency", "kernel_floor", "narrow"),
            *_all("fabric:jean-zay-v100", "partial", "inner_bandwidth", "outer_bandwidth", "straggler"),
            *_all("engine:megatron-deepspeed-zero3", "shard_overlap", "shard_decay"),
        ),
        chips="v100",
        # So that these rows do not pay for those of the others: with 2 they are 1.4 points worse than they were.
        weights=(("bs104tune", 3.2),),
    ),
    Stage(
        "deepspeed-loss",
        ("vtrain-single", "vtrain-multi", "bs176", "bloom"),
        ("engine:megatron-deepspeed::loss_traffic",),
        chips="a100",
        weights=(("vtrain-single", 0.33),),
    ),
    # How much of a message between stages is waited for, and what a collective takes before its bytes count: after the
    # stages of the accelerators, because runs of several see it.
    Stage(
        "deepspeed-transfers",
        ("vtrain-single", "vtrain-multi", "bs176", "bloom", "bs104tune", "bs13b", "bs1b3", "bsgpt2"),
        ("engine:megatron-deepspeed::transfer_exposed", "fabric:vtrain::inner_latency"),
        weights=(("vtrain-single", 0.33),),
    ),
    Stage(
        "bridge-transfers",
        ("mbridge", "mbskill"),
        ("engine:megatron-bridge|megatron-bridge-26.08::transfer_exposed",),
    ),
    Stage(
        "nanotron",
        ("playbook",),
        (
            *_all("engine:nanotron", "host_forward", "host_backward", "host_crossing", "host_micro_batch", "host_step"),
            *_all(
                "engine:nanotron", "linear_scale", "hidden_traffic", "ffn_traffic", "loss_traffic", "attention_scale"
            ),
            *_all("engine:nanotron", "gradient_overlap", "transfer_exposed", "tensor_overlap"),
            *_all("fabric:playbook", "inner_bandwidth", "outer_bandwidth", "partial", "inner_latency", "straggler"),
            "fabric:playbook::spill",
        ),
        scale=0.03,
        # Near full memory the allocator, not the layout, sets the time.
        keep=lambda run: run.memory < 74,
    ),
    Stage(
        "nanotron-memory",
        ("playbook", "nanotron"),
        _all(
            "engine:nanotron",
            *("gradient_bytes", "optimizer_bytes", "buffer_bytes", "kept_hidden", "kept_ffn", "kept_logit"),
            *("working_whole", "fixed"),
        ),
        memory=True,
        prior=0.05,
        scale=0.03,
    ),
    Stage(
        "b200",
        ("simumax",),
        (
            *_all(
                "chip:b200",
                "linear_efficiency.bf16",
                "attention_forward",
                "attention_backward",
                "narrow",
                "kernel_floor",
            ),
            *_all("engine:megatron-serial", "hidden_traffic", "ffn_traffic", "attention_scale", "grouped_scale"),
            *_all("engine:megatron-serial", "routing_traffic", "loss_traffic", "optimizer_passes", "host_step"),
            *_all("fabric:b200", "inner_bandwidth", "inner_latency"),
        ),
        prior=0.2,
        scale=0.03,
    ),
    Stage(
        "blackwell",
        ("mbridge", "mbskill"),
        (
            *(f"chip:{name}::linear_efficiency.fp8" for name in ("b200", "b300", "gb200", "gb300")),
            *(f"chip:{name}::linear_efficiency.fp4" for name in ("gb200", "gb300")),
            "chip:gb200|gb300::linear_efficiency.bf16",
            *_all("chip:gb200|gb300|b300", "attention_forward", "attention_backward"),
            *_all(BRIDGE, "linear_scale", "hidden_traffic", "ffn_traffic", "cast_traffic", "attention_scale"),
            *_all(BRIDGE, "grouped_scale", "grouped_fp8", "routing_traffic", "expert_overlap"),
            *_all(BRIDGE, "host_mixture", "host_cast"),
            *_all(BRIDGE, "gradient_overlap", "gather_overlap", "loss_traffic"),
            *_all("engine:megatron-bridge-26.08", "grouped_scale", "routing_traffic", "host_mixture", "host_cast"),
            *_all("engine:megatron-bridge-26.08", "linear_scale", "expert_overlap"),
            *_all("fabric:nvl72", "inner_bandwidth", "straggler"),
            *_all("fabric:b200", "outer_bandwidth", "straggler"),
        ),
    ),
    Stage(
        "megatron-deepspeed-memory",
        ("bs176", "bs1b3", "bsgpt2", "bs104tune"),
        _all("engine:megatron-deepspeed", "gradient_bytes", "kept_hidden", "kept_boundary", "kept_logit", "fixed"),
        memory=True,
    ),
    Stage(
        "zero-bubble-memory",
        ("zb",),
        _all("engine:megatron-zero-bubble", "gradient_bytes", "kept_hidden", "kept_scores", "fixed"),
        memory=True,
    ),
    Stage(
        "torchtitan-memory",
        ("torchtitan",),
        _all("engine:torchtitan", "kept_selective", "kept_logit", "kept_boundary", "fixed"),
        memory=True,
    ),
    Stage(
        "nemo-memory",
        ("mbskill", "dgxc-log"),
        _all("engine:nemo|megatron-bridge", "gradient_bytes", "optimizer_bytes", "kept_hidden", "kept_ffn", "fixed"),
        memory=True,
    ),
    Stage(
        "b200-memory",
        ("simumax",),
        _all(
            "engine:megatron-serial",
            *("buffer_layer", "buffer_expert", "kept_hidden", "kept_query", "kept_ffn", "kept_logit", "kept_routed"),
            *("fixed", "working_layer", "working_logit"),
        ),
        memory=True,
        prior=0.02,
        scale=0.02,
    ),
)


def _check(stage: Stage, runs: Sequence[Run], away: Sequence[Run]) -> None:
    """Fits without some runs and prints the errors on them."""
    data = batches(stage, away, unseen=True)
    if data:
        values = fit(stage, runs)
        errors = np.abs(np.concatenate([predicted(stage, batch, values) / batch.truth - 1 for batch in data]))
        print(f"{stage.name}: {len(errors)} unseen runs, median {np.median(errors):.1%}, mean {np.mean(errors):.1%}")


def main() -> None:
    """Runs the stages asked for, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=", ".join(stage.name for stage in STAGES))
    parser.add_argument("--dry", action="store_true", help="print the constants and leave the files alone")
    parser.add_argument("--without", default="", help="check on the runs whose source and model contain this text")
    options = parser.parse_args()
    runs = load()
    away = [run for run in runs if options.without and options.without in f"{run.source} {run.row['model']}"]
    gone = {run.id for run in away}
    runs = [run for run in runs if run.id not in gone]
    for stage in STAGES:
        if options.stages and stage.name not in options.stages:
            continue
        if options.without:
            _check(stage, runs, away)
            continue
        print(f"{stage.name}: {sum(len(batch.truth) for batch in batches(stage, runs))} runs")
        before = {name: current(name) for name in stage.parameters}
        values = fit(stage, runs)
        for name, value in values.items():
            print(f"  {name:48s} {before[name]:.4g} -> {value:.4g}")
        if not options.dry:
            write(values)


if __name__ == "__main__":
    main()
