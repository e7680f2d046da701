"""Constants that `cuboid probe` measured on a cluster, in place of the calibrated ones."""

from dataclasses import replace
from typing import TypeVar

from cuboid.cost.constants import Chip, Fabric
from cuboid.cost.engine import Engine
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.coding import convert, field_types, require_known

Constants = TypeVar("Constants", Chip, Fabric, Engine)
KINDS = {"chip": Chip, "fabric": Fabric, "engine": Engine}


def profiled(constants: Constants, cluster: ClusterSpec, kind: str) -> Constants:
    """The constants of one of the `KINDS`, those replaced that the cluster's profile has."""
    for key in cluster.measured:
        require_known(key, KINDS, "cluster.measured")
    types, where = field_types(KINDS[kind]), f"cluster.measured.{kind}"
    values = {}
    for key, value in cluster.measured.get(kind, {}).items():
        require_known(key, types, where)
        values[key] = convert(value, types[key], f"{where}.{key}")
    return replace(constants, **values)
