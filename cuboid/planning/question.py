"""What a planner is asked, and which parts of the answer the user has already decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from cuboid.cost.constants import Engine, engine_for, profiled
from cuboid.cost.estimate import Machine, machine_of
from cuboid.errors import UserError, either, nearest_names
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import convert
from cuboid.spec.fitting import check_fp8
from cuboid.spec.groups import Groups
from cuboid.spec.layout import Layout, parse_layout_fields, require_positive
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run, check_supported
from cuboid.spec.training import TrainingSpec

PRECISIONS = ("bf16", "fp16", "fp8", "float32")
SCALINGS = ("tensor", "row", "block")
NOT_HOPPER = ("b200", "b300", "gb200", "gb300", "mi300x", "mi355x", "l40s", "rtx-")
"""Accelerators with matmuls in fp8, but for scales of blocks and for experts none that torch offers."""
MEMORY_FRACTION = 0.95
"""Fraction of an accelerator's memory that a plan stays within unless asked otherwise: fragmentation needs the rest."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model to be trained on a cluster with a batch."""

    model: ModelSpec
    cluster: ClusterSpec
    global_batch: int
    sequence: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    """Or muon, which keeps less, computes more and has matrices travel."""
    average: float = 0.0
    """Decay of a moving average of the weights; 0: none is kept."""
    gradient_sums: str = "float32"
    """Or bf16, which halves the memory and the traffic of gradients."""
    fp8_scaling: str = "tensor"
    """Of fp8: tensor, row or block."""
    fp8_experts: bool = False
    """Of fp8: routed experts too."""
    engine: str = "cuboid"
    """Whose profile of costs to use."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Layout fields the user has decided."""
    memory_limit: float | None = None
    """Most bytes a rank may hold; default: 95 % of the accelerator's memory."""
    target: str = ""
    """Whose files the plan must be sayable in; empty: this program's."""
    beyond_engine: bool = False
    """Also plan what the engine cannot train yet."""
    priced: bool = False
    """Seconds of a step count once for each accelerator: parts of a cluster are compared by what they cost."""
    paces: tuple[tuple[int, float], ...] = ()
    """… or over those that a step on so many accelerators takes already, of which there are no others."""

    def __post_init__(self) -> None:
        if isinstance(self.model, PythonModelSpec) and (self.precision == "fp8" or self.engine != "cuboid"):
            raise UserError(
                f"model={self.model.name} is one's own, which only this program trains, and not in fp8; use "
                "engine=cuboid and precision=bf16"
            )
        require_positive("global_batch", self.global_batch)
        require_positive("sequence", self.sequence)
        if self.precision not in PRECISIONS:
            near = either(f"precision={name}" for name in nearest_names(self.precision, PRECISIONS))
            raise UserError(f"unknown precision={self.precision}; use {near}")
        if self.precision == "fp8" and "fp8" not in self.cluster.peak_tflops:
            raise UserError(f"precision=fp8 is not in {self.cluster.accelerator}; use precision=bf16")
        if self.optimizer not in ("adamw", "muon"):
            raise UserError(f"unknown optimizer={self.optimizer}; use optimizer=adamw or optimizer=muon")
        if self.optimizer == "muon" and (self.engine != "cuboid" or isinstance(self.model, PythonModelSpec)):
            raise UserError(
                "optimizer=muon is counted for models of the catalog and engine=cuboid; use optimizer=adamw"
            )
        self._check_fp8()
        if self.gradient_sums not in ("float32", "bf16"):
            raise UserError(f"unknown gradient_sums={self.gradient_sums}; use float32 or bf16")
        if self.gradient_sums == "bf16" and (self.engine != "cuboid" or self.precision not in ("bf16", "fp8")):
            raise UserError(
                "gradient_sums=bf16 is counted for engine=cuboid and precision=bf16 or fp8; use gradient_sums=float32"
            )
        model = self.model
        if model.positions == "learned" and self.sequence > model.max_positions:
            raise UserError(
                f"seq={self.sequence} is longer than max_positions={model.max_positions} of {model.name}; "
                f"use seq={model.max_positions} or less"
            )
        for name in ("layers", "batch_weights", "shard_weights"):
            if self.fixed.get(name):
                raise UserError(
                    f"{name} cannot be fixed: for groups --one-job chooses it; use cuboid explain for your own"
                )
        # What depends on fields that are still open is left to the search.
        open_fields = {"dp", "ep", "shard"} | (set() if "schedule" in self.fixed else {"vpp"})
        open_fields |= set() if "cp" in self.fixed else {"cp_method", "cp_inner"}
        Layout(**{name: value for name, value in self.fixed.items() if name not in open_fields})

    def _check_fp8(self) -> None:
        if self.fp8_scaling not in SCALINGS:
            raise UserError(f"unknown fp8_scaling={self.fp8_scaling}; use {either(SCALINGS)}")
        lacking = self.cluster.accelerator.startswith(NOT_HOPPER) and self.engine == "cuboid"
        if self.precision == "fp8" and lacking and (self.fp8_scaling == "block" or self.fp8_experts):
            asked, instead = ("fp8_scaling=block", "fp8_scaling=row")
            if self.fp8_scaling != "block":
                asked, instead = ("fp8_experts=true", "fp8_experts=false")
            raise UserError(
                f"{asked} needs matmuls that torch has for Hopper, not for {self.cluster.accelerator}; use {instead}"
            )
        if self.fp8_experts and self.precision == "fp8" and self.model.mixture is None:
            raise UserError(f"fp8_experts=true needs experts and {self.model.name} has none; use fp8_experts=false")

    @cached_property
    def machine(self) -> Machine:
        """The cluster with its calibration."""
        return machine_of(self.cluster)

    @cached_property
    def profile(self) -> Engine:
        """The engine's profile; a process on CPUs has no device context and no buffers of collectives there."""
        profile = engine_for(self.engine, self.machine.chip).in_precision(self.cost_precision)
        if self.precision == "fp16" and profile.own_collectives:  # its master weights are whole, not bf16's other half
            profile = replace(profile, optimizer_bytes=profile.optimizer_bytes + 2)
        profile = profile.with_muon() if self.optimizer == "muon" else profile
        profile = profile.with_bf16_sums() if self.gradient_sums == "bf16" else profile
        if self.precision == "fp8" and self.engine == "cuboid":
            profile = profile.with_fp8(self.fp8_scaling, self.fp8_experts)
        if self.average:  # float32; read and written beside the master weights
            bytes_moved = 12.0
            profile = replace(
                profile,
                optimizer_bytes=profile.optimizer_bytes + 4,
                optimizer_passes=profile.optimizer_passes + bytes_moved,
            )
        profile = replace(profile, fixed=min(profile.fixed, 0.25 * 2**30)) if self.on_cpu else profile
        return profiled(profile, self.cluster, "engine") if self.engine == "cuboid" else profile

    @property
    def on_cpu(self) -> bool:
        """Whether the accelerators' memory is the host's, so that offloading to it changes nothing."""
        return self.cluster.accelerator == "cpu"

    @property
    def fixed_offload(self) -> bool:
        return bool(self.fixed.get("offload", False)) and not self.on_cpu

    @property
    def tries_offload(self) -> bool:
        """Whether what does not fit is tried with the optimizer's state in CPU memory: the user left that open,
        and the engine does it without the host's computing."""
        resident = self.optimizer != "adamw" or self.average > 0
        possible = not resident and not self.on_cpu and self.profile.offload_elements > 0
        return "offload" not in self.fixed and possible

    @property
    def host_limit(self) -> float:
        """Most bytes a rank may keep in CPU memory."""
        node = self.cluster.host_memory_gib * 2**30
        return MEMORY_FRACTION * node / self.cluster.accelerators_per_node if node else float("inf")

    @property
    def cost_precision(self) -> str:
        """What the cost model calls the precision: one word for both 16-bit formats."""
        return "bf16" if self.precision == "fp16" else self.precision

    @property
    def limit(self) -> float:
        """Most bytes a rank may hold."""
        return MEMORY_FRACTION * self.machine.chip.memory if self.memory_limit is None else self.memory_limit

    def untrainable(self, layout: Layout) -> str:
        """Why Cuboid's engine cannot train a layout of this model yet, or nothing."""
        return untrainable(self.model, layout)

    def lacks_fp8(self, layout: Layout) -> str:
        """Why the linears of a layout cannot be multiplied in fp8, or nothing."""
        try:
            if self.precision == "fp8":
                check_fp8(layout, self.model, self.sequence, experts=self.fp8_experts)
        except UserError as reason:
            return str(reason)
        return ""

    @cached_property
    def explores(self) -> frozenset[str]:
        """Which of cp and ep to search: what the engine trains, or all where that is not the question."""
        names = frozenset({"cp", "ep"} if self.model.mixture else {"cp"})
        if self.beyond_engine or self.engine != "cuboid" or untrainable(self.model, Layout()):
            return names
        return frozenset(name for name in names if not untrainable(self.model, Layout.parse(f"dp=2,{name}=2")))


@lru_cache(maxsize=256)
def untrainable(model: ModelSpec, layout: Layout) -> str:
    """Why Cuboid's engine cannot train a layout of a model yet, or nothing."""
    try:
        sizes = TrainingSpec(global_batch=layout.batch_unit, sequence=2 * layout.cp * layout.tp)
        check_supported(Run(model=model, layout=layout, training=sizes))
    except UserError as reason:
        return str(reason)
    return ""


def precision_on(cluster: ClusterSpec, asked: str | None) -> str:
    """The precision asked for; skipped, bf16 where the accelerators have it, else fp16 or float32."""
    usual = next((name for name in ("bf16", "fp16") if name in cluster.peak_tflops), "float32")
    if asked in ("bf16", "fp8") and asked not in cluster.peak_tflops:
        raise UserError(f"precision={asked} is not in {cluster.accelerator}; use precision={usual}")
    return asked or usual


def common_precision(groups: Groups, asked: str | None) -> str:
    """That of all groups, which train one model alike."""
    found = [precision_on(group.cluster, asked) for group in groups.groups]
    return asked or next(name for name in ("float32", "fp16", *found) if name in found)


def parse_fixed(parts: Sequence[str]) -> dict[str, Any]:
    """`--fix tp=8 --fix pp=4,zero=1` as layout fields."""
    return parse_layout_fields(",".join(parts))


def parse_memory(text: str, capacity: float) -> float:
    """`60`, `60GiB` or `90%` as bytes."""
    number, unit = text.strip().lower().removesuffix("b").removesuffix("gi").removesuffix("g"), 2.0**30
    if number.endswith("%"):
        number, unit = number[:-1], capacity / 100
    try:
        value = float(convert(float(number), float, "max_memory")) * unit
    except ValueError:
        raise UserError(f"max-memory={text} is not a size; write it like 60GiB or 90%") from None
    if not 0 < value <= capacity:
        raise UserError(
            f"max-memory={text} is outside the accelerator's {capacity / 2**30:.4g} GiB; "
            f"use max-memory={capacity / 2**30:.4g} or less"
        )
    return value


# The same cluster with fewer or more accelerators.


FEW_NODES = 12
"""Clusters so small that every part of them is tried."""


def resized_cluster(cluster: ClusterSpec, accelerators: int) -> ClusterSpec:
    """The cluster with so many accelerators: whole nodes, or a part of one."""
    per_node = min(cluster.accelerators_per_node, accelerators)
    tiers = []
    for tier in cluster.tiers:
        last = tier is cluster.tiers[-1] or tier.size >= accelerators
        tiers.append(replace(tier, size=accelerators if last else tier.size))
        if last:
            break
    name = cluster.name.rpartition("x")[0] or cluster.accelerator
    return replace(
        cluster,
        name=f"{name}x{accelerators}",
        nodes=accelerators // per_node,
        accelerators_per_node=per_node,
        tiers=tuple(tiers),
    )


def resized(question: Question, accelerators: int) -> Question:
    """The question for so many accelerators."""
    if accelerators == question.cluster.accelerators:
        return question
    return replace(question, cluster=resized_cluster(question.cluster, accelerators))


def sizes(cluster: ClusterSpec) -> list[int]:
    """Parts of the cluster worth a look: 1, 2, 3, 4, 6, 8, 12, … nodes and the whole, and parts of one node."""
    node = cluster.accelerators_per_node
    found = {cluster.accelerators}
    power = 1
    while power <= cluster.accelerators:
        found |= {size for size in (power, 3 * power) if size <= cluster.accelerators and _fits(size, node)}
        power *= 2
    return sorted(found)


def every_size(cluster: ClusterSpec) -> list[int]:
    """All parts of the cluster: any number of accelerators of one node, or any number of nodes."""
    node = cluster.accelerators_per_node
    return [*range(1, node), *range(node, cluster.accelerators + 1, node)]


def rounder_sizes(cluster: ClusterSpec, global_batch: int) -> list[int]:
    """Smaller parts of the cluster that might be faster, largest first: all of a small one; of others, as a rule, more
    than half of it, where ranks or the batch divide over that better."""
    whole, node = cluster.accelerators, cluster.accelerators_per_node
    if whole <= FEW_NODES * node:
        return every_size(cluster)[-2::-1]
    found, power = set(), node
    while power <= whole:
        found.add(whole // power * power)
        power *= 2
    for replica in (1, 2, 4, 8, 16, 32, 64, 128):
        most = next((dp for dp in range(min(global_batch, whole // replica), 0, -1) if global_batch % dp == 0), 0)
        found.add(most * replica)
    # What is round already loses by being smaller, unless the batch is too small for it.
    least = whole / 2 if global_batch >= whole / 8 else node
    return sorted((size for size in found if least < size < whole and size % node == 0), reverse=True)


def _fits(size: int, node: int) -> bool:
    return size % node == 0 if size > node else node % size == 0
