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
    """Steps of a round, over which the checks are spread; 0 checks none. 50 is a good number."""
    share: float = 0.01
    """Of the time: where a round would take more, the next ones have more steps."""
    first: int = 2
    """So many steps after each start are looked at by all checks: what comes from a checkpoint, or with another layout,
    is new then."""
    only: str = ""
    """Checks that are made, commas between them: data, passes, replay, sums, updates, matrices or copies;
    default: all."""
    wrong: Literal["warn", "stop"] = "warn"
    """What is done when something is wrong: say so once and train on, or stop the run."""

    def __post_init__(self) -> None:
        check_types(self, "checks")
        require_in_range(self, "checks", ("every", "first"), low=0)
        if not 0 < self.share <= 1:
            raise UserError(f"checks.share={self.share} is no part of the time; use share=0.01 for one in a hundred")
        for name in self.names:
            if name not in CHECKS:
                raise UserError(f"checks.only={name} is unknown; use {either(nearest_names(name, CHECKS))}")
        if self.only and not self.every:
            raise UserError(f"checks.only={self.only} checks no step with checks.every=0; use every=50")

    @property
    def names(self) -> tuple[str, ...]:
        """Those of `only`, or all."""
        return tuple(dict.fromkeys(name.strip() for name in self.only.split(",") if name.strip())) or CHECKS
