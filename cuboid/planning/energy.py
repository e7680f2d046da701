"""Energy of a training at board power: the watts of every accelerator for as long as the training has it, which is the
most that it draws. Hosts, networks and cooling are not counted."""

from __future__ import annotations

from collections.abc import Iterable

from cuboid.errors import UserError
from cuboid.spec.cluster import ClusterSpec

Part = tuple[ClusterSpec, int]
"""So many accelerators of a cluster."""


def kilowatts(parts: Iterable[Part]) -> float | None:
    """Of all parts together; None: of one of them it is not known."""
    members = list(parts)
    if not all(cluster.watts for cluster, _ in members):
        return None
    return sum(cluster.watts * count for cluster, count in members) / 1e3


def kilowatt_hours(parts: Iterable[Part], days: float) -> float | None:
    power = kilowatts(parts)
    return None if power is None else power * 24 * days


def no_watts(name: str) -> UserError:
    return UserError(
        f"objective=energy needs the board power of accelerators and {name} has none; add it to a cluster file, as in "
        "watts = 700"
    )


def written(energy: float) -> str:
    return f"{energy:,.0f}" if energy >= 100 else f"{energy:.3g}"


def sentence(energy: float | None) -> str:
    """What a plan says beside its days."""
    if energy is None:
        return "energy is not known without watts in the cluster file"
    return f"at most {written(energy)} kWh, at board power"
