"""What of a training is traced."""

from dataclasses import dataclass

from cuboid.errors import UserError, up_to
from cuboid.spec.coding import check_types, require_in_range

WARM_UP = 3
"""Steps before those traced by default: two in which kernels are compiled and memory is taken, one in which the
profiler itself warms up."""
USUAL = 3
"""Steps that `cuboid train --profile` traces."""


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Traces of some steps for Perfetto, and what memory holds."""

    steps: int = 0
    """How many steps are traced; 0 is none. `--profile` traces three."""
    first: int = 0
    """The first of them, counted from one as in metrics.jsonl; 0: the fourth after the start, or earlier where the run
    would end before."""
    ranks: str = ""
    """Ranks that are traced, e.g. 0,4,5; default: all."""
    memory: bool = True
    """On a GPU: also record what is allocated and where, from the start to the last traced step, as a snapshot for
    pytorch.org/memory_viz."""

    def __post_init__(self) -> None:
        check_types(self, "profile")
        require_in_range(self, "profile", ("steps", "first"), low=0)
        if not all(part.strip().isdecimal() for part in self.ranks.split(",")) and self.ranks:
            raise UserError(f"profile.ranks={self.ranks} is no list of ranks; write it like 0,4,5")

    def check(self, world_size: int, steps: int) -> None:
        """Against the run it belongs to."""
        for rank in self.chosen_ranks:
            if rank >= world_size:
                raise UserError(f"profile.ranks={rank} is outside the layout; use {up_to(world_size - 1)}")
        if self.steps and self.first > steps:
            raise UserError(f"profile.first={self.first} is after training.steps={steps}; use profile.first={steps}")

    @property
    def chosen_ranks(self) -> tuple[int, ...]:
        """Those of `ranks`; none of them means all."""
        return tuple(int(part) for part in self.ranks.split(",")) if self.ranks else ()

    def traces(self, rank: int) -> bool:
        """Whether this rank is traced."""
        return self.steps > 0 and (not self.ranks or rank in self.chosen_ranks)

    def window(self, done: int, steps: int, most: int) -> range:
        """The traced ones of steps `done + 1` to `steps`, at most so many; empty where they lie behind."""
        count = min(self.steps, most, steps - done)
        first = self.first or max(done + 1, min(done + 1 + WARM_UP, steps - count + 1))
        return range(max(first, done + 1), min(first + count, steps + 1))
