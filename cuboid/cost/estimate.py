"""The front of the cost room: layouts in, seconds and bytes out.

>>> result = estimate_many(load_model("gpt3-175b"), machine_of(load_cluster("a100-80gx1024")), jobs)
>>> result.seconds, result.memory, result.fits                                    # one number per layout
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from cuboid.cost.compute import model_flops_per_token
from cuboid.cost.constants import (
    Chip,
    Engine,
    Fabric,
    Level,
    chip_from,
    default_fabric,
    engine_for,
    fabric_named,
    profiled,
)
from cuboid.cost.inputs import Array, Jobs, Shape, single
from cuboid.cost.memory import Memory, memory_by_rank
from cuboid.cost.pipeline import partition
from cuboid.cost.step import PARTS, StepTime, stall_depth, step_time
from cuboid.readers import parse_toml
from cuboid.spec.cluster import ClusterSpec, LinkTier, accelerator_names, accelerator_table, load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Accelerators and links, calibrated."""

    chip: Chip
    fabric: Fabric


def machine_of(cluster: ClusterSpec) -> Machine:
    """The calibration of a cluster; links that differ from those it was made with scale what collectives reach."""
    facts = {
        "peak_tflops": cluster.peak_tflops,
        "memory_gib": cluster.memory_gib,
        "memory_bandwidth": cluster.memory_bandwidth,
    }
    chip = chip_from(cluster.accelerator, facts)
    fabric = wired(fabric_named(default_fabric(cluster.accelerator)), cluster)
    return Machine(profiled(chip, cluster, "chip"), profiled(fabric, cluster, "fabric"))


def wired(fabric: Fabric, cluster: ClusterSpec) -> Fabric:
    """The fabric with the links of a cluster. An accelerator that no calibration knows reaches 75 % of the printed
    bandwidth inside a node and 80 % between nodes."""
    first, *beyond = cluster.tiers
    node = cluster.accelerators if not beyond else first.size
    reached, waits = (0.75e9, 0.8e9), (1e-6, 1e-6)
    if cluster.accelerator in accelerator_names().values():
        inner, *outer = _catalog_links(fabric.links)
        reached = (fabric.inner_bandwidth / inner.bandwidth, reached[1])
        waits = (fabric.inner_latency / inner.latency, waits[1])
        if outer:
            reached = (reached[0], fabric.outer_bandwidth / outer[0].bandwidth)
            waits = (waits[0], fabric.outer_latency / outer[0].latency)
    levels = [
        Level(below.size, reached[1] * tier.bandwidth, waits[1] * tier.latency)
        for below, tier in zip(cluster.tiers, beyond, strict=False)
    ]
    between = levels[0] if levels else Level(0, fabric.outer_bandwidth, fabric.outer_latency)
    return replace(
        fabric,
        node=max(node, 1),
        inner_bandwidth=reached[0] * first.bandwidth,
        inner_latency=waits[0] * first.latency,
        outer_bandwidth=between.bandwidth,
        outer_latency=between.latency,
        further=tuple(levels[1:]),
    )


@cache
def _catalog_links(accelerator: str) -> tuple[LinkTier, ...]:
    """Inside a node and between nodes."""
    per_node = accelerator_table(accelerator)["accelerators_per_node"] or 8
    return load_cluster(f"{accelerator}x{per_node * 100_000}").tiers


@dataclass(frozen=True)
class Estimates:
    """What layouts cost, one entry per layout."""

    time: StepTime
    memory_table: dict[str, Memory]
    """Pipeline rank (first, second, last) -> its bytes by kind."""
    memory: Array
    """Bytes of the fullest rank, as the engine's own reports count them."""
    capacity: float
    """Bytes one accelerator has."""
    fits: NDArray[np.bool_]
    """Whether the fullest rank stays within what the engine can use of the capacity."""
    tokens: Array
    """Tokens per second and accelerator."""
    utilization: Array
    """Model FLOPs per second over the 16-bit peak, attention counted in full and no recomputation (as Korthikanti)."""

    @property
    def seconds(self) -> Array:
        """Seconds of one step."""
        return self.time.total


def estimate_shapes(
    shape: Shape, jobs: Jobs, machine: Machine, engine: Engine, precision: str = "bf16", memory: Array | None = None
) -> Estimates:
    """What layouts cost; the shape may hold one model for all of them or one for each. `memory`: what `peak_memory`
    says of them, where that is known; there is no table then."""
    chip, fabric = machine.chip, machine.fabric
    table: dict[str, Memory] = {}
    if memory is None:
        table = memory_by_rank(shape, jobs, engine)
        totals = np.broadcast_arrays(*(memory.total for memory in table.values()))
        memory = np.asarray(engine.reserve * np.maximum.reduce(totals))
    fits = (memory <= engine.usable * chip.memory) & _starts(shape, jobs, engine)
    time = step_time(shape, jobs, chip, fabric, engine, precision)
    time = _thrash(time, jobs, memory, chip, engine)
    seconds = time.total
    per_second = jobs.global_batch * jobs.sequence / (seconds * jobs.world_size)
    peak = chip.peak["float32" if precision == "float32" else "bf16"]
    utilization = per_second * model_flops_per_token(shape, jobs.sequence) / peak
    return Estimates(time, table, memory, chip.memory, fits, per_second, utilization)


def _starts(shape: Shape, jobs: Jobs, engine: Engine) -> NDArray[np.bool_]:
    """Whether the engine gets past its start: every pipeline rank holds something."""
    starts = jobs.pp <= partition(shape, jobs, engine).filled
    if engine.needs_shards_if_tied:
        starts = starts & ~((shape.tied > 0) & (jobs.pp > 1) & (jobs.dp > 1) & (jobs.zero == 0))
    return np.asarray(starts)


def _thrash(time: StepTime, jobs: Jobs, memory: Array, chip: Chip, engine: Engine) -> StepTime:
    """Near the limit the allocator gives back and asks again within every micro-batch."""
    if not engine.thrash:
        return time
    pressed = (memory > engine.thrash_above * chip.memory) * engine.thrash * stall_depth(jobs) * jobs.micro_batches
    return replace(time, host=time.host + pressed)


def estimate_many(
    model: ModelSpec,
    machine: Machine,
    jobs: Jobs,
    engine: Engine | str = "cuboid",
    precision: str = "bf16",
    memory: Array | None = None,
) -> Estimates:
    """What many layouts of one model cost: the core of a search. `memory`: as `estimate_shapes` has it."""
    profile = engine_for(engine, machine.chip).in_precision(precision)
    return estimate_shapes(Shape.of(model), jobs, machine, profile, precision, memory)


@dataclass(frozen=True)
class Estimate:
    """What one layout costs."""

    seconds: float
    parts: dict[str, float]
    """Where the seconds go; they add up to them."""
    memory: float
    """Bytes of the fullest rank."""
    memory_table: dict[str, dict[str, float]]
    """Pipeline rank (first, second, last) -> kind -> bytes."""
    fits: bool
    tokens: float
    utilization: float


def estimate(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    *,
    global_batch: int,
    sequence: int,
    engine: Engine | str = "cuboid",
    precision: str = "bf16",
) -> Estimate:
    """What one layout costs, in numbers a reader can check."""
    alike, batch = layout.as_replica(layout.busiest_replica, global_batch)
    jobs = Jobs.of([alike], global_batch=batch, sequence=sequence)
    many = estimate_many(model, machine, jobs, engine, precision)

    table = {
        rank: {item.name: single(getattr(memory, item.name)) for item in fields(memory)}
        for rank, memory in many.memory_table.items()
    }
    parts = {name: single(getattr(many.time, name)) for name in PARTS}
    return Estimate(
        single(many.seconds),
        parts,
        single(many.memory),
        table,
        bool(np.ravel(many.fits)[0]),
        single(many.tokens) * global_batch / batch,
        single(many.utilization) * global_batch / batch,
    )


# How far predictions were off on published runs of the same kind: what a number that nobody measured is worth.
#
# `benchmarks/planner.py --errors` writes `data/errors.toml` from held-out rows.


SCALES = (8, 128, 1024)
"""Accelerators up to which runs are of one scale; those beyond are of another."""


@dataclass(frozen=True)
class Seen:
    """Errors of step time on held-out runs of one kind."""

    engine: str
    chip: str
    """Its family: h100."""
    kind: str
    """dense or moe."""
    scale: int
    """The most accelerators of such runs; 0: any number."""
    runs: int
    median: float
    most: float
    """Nine of ten are within this."""
    bias: float
    """The median of predicted over measured, less one."""

    @property
    def sentence(self) -> str:
        """For a reader of a plan."""
        size = {0: "", 10**9: f" on more than {SCALES[-1]:,} GPUs"}.get(self.scale, f" on up to {self.scale:,} GPUs")
        return (
            f"on {self.runs} published {self.kind} runs of {self.engine} on {self.chip}{size} the step time was off by "
            f"{self.median:.0%} in the median, {self.most:.0%} in nine of ten, bias {self.bias:+.0%}"
        )


def family(engine: str, chip: str) -> tuple[str, str]:
    """What engine and accelerator are listed as: releases of one engine together, sizes of memory too."""
    name = engine.split("@")[0]
    return "megatron-bridge" if name.startswith("megatron-bridge") else name, chip.split("-")[0]


def scale_of(accelerators: float) -> int:
    """The scale that a run of so many accelerators belongs to."""
    return next((most for most in SCALES if accelerators <= most), 10**9)


@cache
def _table() -> dict[tuple[str, str, str, int], Seen]:
    text = resources.files("cuboid.cost").joinpath("data", "errors.toml").read_text(encoding="utf-8")
    found = [Seen(**entry) for entry in parse_toml(text)["seen"]]
    return {(entry.engine, entry.chip, entry.kind, entry.scale): entry for entry in found}


def seen(engine: str, chip: str, mixture: bool, accelerators: int) -> Seen | None:
    """The errors on runs like this: of its scale where there are some, else of any; None where fewer than three were
    held out."""
    key = (*family(engine, chip), "moe" if mixture else "dense")
    return _table().get((*key, scale_of(accelerators))) or _table().get((*key, 0))


# The best utilization anyone has published for an accelerator: a prediction above it deserves doubt.
#
# Model FLOPs (attention in full, no recomputation) over the 16-bit peak, so 8-bit training can pass one half and more.
# Each number is the best of the published runs in benchmarks/published for that accelerator and precision.


@dataclass(frozen=True)
class Record:
    """The best published run."""

    utilization: float
    run: str


BEST: dict[tuple[str, str], Record] = {
    ("a100-40g", "bf16"): Record(0.581, "MPT-3B on 8 GPUs with FSDP (llm-foundry)"),
    ("a100-80g", "bf16"): Record(0.672, "Llama 2 7B on 128 GPUs with FSDP (IBM fms-fsdp)"),
    ("h100-80g", "bf16"): Record(0.624, "Llama 3 8B on 16 GPUs with NeMo (DGX Cloud)"),
    ("h100-80g", "fp8"): Record(0.898, "GPT-3 175B on 512 GPUs with NeMo 24.07"),
    ("h100-96g", "bf16"): Record(0.366, "Llama 3 8B on 8 GPUs with torchtitan"),
    ("h100-96g", "fp8"): Record(0.499, "Llama 3 8B on 8 GPUs with torchtitan"),
    ("b200", "bf16"): Record(0.573, "12 layers of Llama 3 70B on 8 GPUs with Megatron (SimuMax)"),
    ("b200", "fp8"): Record(0.788, "Llama 3 8B on 8 GPUs with Megatron Bridge"),
    ("gb200", "fp8"): Record(0.907, "Llama 3.1 405B on 256 GPUs with Megatron Bridge"),
    ("gb300", "fp8"): Record(1.088, "Llama 3.1 405B on 256 GPUs with Megatron Bridge"),
    ("v100-32g", "bf16"): Record(0.414, "GPT-1.3B on 8 GPUs with Megatron-DeepSpeed (bigscience)"),
}
LIKE = {"a800": "a100-80g", "h200": "h100-80g", "h800": "h100-80g", "b300": "b200", "gb200": "b200", "gb300": "gb200"}
"""Accelerator family -> the one whose record stands for it where it has none of its own."""


def record_of(accelerator: str, precision: str) -> Record | None:
    """The record of an accelerator, or of the one most like it."""
    seen = accelerator
    while (seen, precision) not in BEST:
        family = seen.split("-")[0]
        if family not in LIKE:
            alike = [name for name, kind in BEST if kind == precision and name.split("-")[0] == family]
            return BEST[alike[-1], precision] if alike else None
        seen = LIKE[family]
    return BEST[seen, precision]


def doubt(accelerator: str, precision: str, utilization: float, shown: str = "") -> str:
    """A sentence where a prediction beats every published run, else nothing. `shown`: the precision as the user calls
    it, where records know but one of 16 bits."""
    record = record_of(accelerator, precision)
    if record is None or utilization <= record.utilization:
        return ""
    return (
        f"predicted MFU {utilization:.1%} is above the best ever published for {accelerator} in {shown or precision}, "
        f"{record.utilization:.1%} ({record.run}); measure before you believe it"
    )
