"""`ClusterSpec`: accelerators in nodes, and the tiers of links between them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cuboid.errors import UserError, either, up_to
from cuboid.spec.coding import check_types


@dataclass(frozen=True, kw_only=True)
class LinkTier:
    """One kind of link; neighbours in rank share the fast ones."""

    name: str
    size: int
    """How many accelerators one domain of this tier spans."""
    bandwidth: float
    """GB/s per accelerator in one direction."""
    latency: float
    """Microseconds per hop."""

    def __post_init__(self) -> None:
        check_types(self, "tier")
        if self.size < 1:
            raise UserError(f"tier.size={self.size} of {self.name} is too small; use size=1 or more")
        for name in ("bandwidth", "latency"):
            if getattr(self, name) <= 0:
                raise UserError(
                    f"tier.{name}={getattr(self, name)} of {self.name} is not positive; use a number above 0"
                )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster whose ranks fill node after node, and domain after domain of each tier."""

    name: str
    accelerator: str
    """Its name in the catalog."""
    nodes: int
    accelerators_per_node: int
    tiers: tuple[LinkTier, ...]
    """From the fastest to the slowest; the last one spans the cluster."""
    peak_tflops: dict[str, float] = field(hash=False)
    """Precision (bf16, fp16, fp8, fp4, tf32, float32, float64) -> dense peak of one accelerator."""
    memory_gib: float
    """What one process can see of its accelerator's memory."""
    memory_bandwidth: float
    """GB/s."""
    host_memory_gib: float = 0.0
    """Memory of a node's own, for what is offloaded; 0: not known."""
    measured: dict[str, dict[str, object]] = field(default_factory=dict, hash=False)
    """What `cuboid probe` found, in place of the planner's calibration: chip, fabric, engine -> constant -> value."""

    def __post_init__(self) -> None:
        check_types(self, "cluster")
        for name in ("nodes", "accelerators_per_node", "memory_gib", "memory_bandwidth"):
            if getattr(self, name) <= 0:
                raise UserError(f"cluster.{name}={getattr(self, name)} is not positive; use {name}=1 or more")
        if self.host_memory_gib < 0:
            raise UserError(f"cluster.host_memory_gib={self.host_memory_gib} is negative; use 0 where it is not known")
        for precision, peak in self.peak_tflops.items():
            if peak <= 0:
                raise UserError(f"cluster.peak_tflops.{precision}={peak} is not positive; use a number above 0")
        sizes = [tier.size for tier in self.tiers]
        if not sizes or sizes != sorted(set(sizes)) or sizes[-1] != self.accelerators:
            shown = either(f"{tier.name}={tier.size}" for tier in self.tiers) or "none"
            raise UserError(
                f"cluster.tiers sizes {shown} do not grow to the cluster; end with size={self.accelerators}"
            )

    @property
    def accelerators(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.accelerators_per_node

    def node_of(self, rank: int) -> int:
        """The node a rank sits on."""
        return rank // self.accelerators_per_node

    def tier_of(self, ranks: Iterable[int]) -> LinkTier:
        """The slowest tier that traffic between these ranks crosses; the fastest one for a single rank."""
        members = list(ranks)
        for tier in self.tiers:
            if len({rank // tier.size for rank in members}) <= 1:
                return tier
        raise UserError(f"rank={max(members)} is outside {self.name}; use {up_to(self.accelerators - 1, 'rank=')}")


def load_cluster(text: str) -> ClusterSpec:
    """A cluster from a name such as `h100x1024`, or from a TOML file."""
    from cuboid.spec.accelerators import cluster_from_text  # here, because loading builds on this file

    return cluster_from_text(text)
