"""How far predictions were off on published runs of the same kind: what a number that nobody measured is worth.

`benchmarks/planner.py --errors` writes `data/errors.toml` from held-out rows."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

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
    found = [Seen(**entry) for entry in tomllib.loads(text)["seen"]]
    return {(entry.engine, entry.chip, entry.kind, entry.scale): entry for entry in found}


def seen(engine: str, chip: str, mixture: bool, accelerators: int) -> Seen | None:
    """The errors on runs like this: of its scale where there are some, else of any; None where nobody published one."""
    key = (*family(engine, chip), "moe" if mixture else "dense")
    return _table().get((*key, scale_of(accelerators))) or _table().get((*key, 0))
