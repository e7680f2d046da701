"""The table `[checks]` of a run: when a training looks at itself, and at what."""

from dataclasses import dataclass
from typing import Literal

from cuboid.errors import UserError, either, nearest_names
from cuboid.spec.coding import check_types, require_in_range

CHECKS = ("data", "passes", "replay", "sums", "updates", "matrices", "copies")
"""Names in `checks.only`."""


@dataclass(frozen=True, kw_only=True)
class ChecksSpec:
    """Steps of a training that are looked at as `cuboid verify` looks at a layout."""

    every: int = 0
    """Steps between checked ones; 0 checks none. 500 is a good number."""
    first: int = 2
    """So many steps after each start are checked too: what comes from a checkpoint, or with another layout, is new
    then."""
    only: str = ""
    """Checks that are made, commas between them: data, passes, replay, sums, updates, matrices or copies;
    default: all."""
    wrong: Literal["warn", "stop"] = "warn"
    """What is done when something is wrong: say so once and train on, or stop the run."""

    def __post_init__(self) -> None:
        check_types(self, "checks")
        require_in_range(self, "checks", ("every", "first"), low=0)
        for name in self.names:
            if name not in CHECKS:
                raise UserError(f"checks.only={name} is unknown; use {either(nearest_names(name, CHECKS))}")
        if self.only and not self.every:
            raise UserError(f"checks.only={self.only} checks no step with checks.every=0; use every=500")

    @property
    def names(self) -> tuple[str, ...]:
        """Those of `only`, or all."""
        return tuple(dict.fromkeys(name.strip() for name in self.only.split(",") if name.strip())) or CHECKS
