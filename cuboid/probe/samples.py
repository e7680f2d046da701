"""Measurements as data: what was timed, on which size, by whom, with which spread. No torch."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

KERNELS = ("matmul", "attention_forward", "attention_backward", "memory", "gradients", "update")
"""What a rank does by itself."""


@dataclass(frozen=True)
class Sample:
    """One thing timed. Every rank that took part has its own windows, and `merged` puts them together."""

    kind: str
    """matmul, attention_forward, attention_backward, memory, to_device, to_host, gradients, update, a collective; or
    core_fraction: how much of a core a rank had, for which size says nothing and windows are no seconds."""
    size: tuple[int, ...]
    """Rows, inner, columns of a matmul; tokens, heads, head size of attention; bytes; number of a step's case."""
    windows: tuple[float, ...]
    """Seconds of one, as the mean over each of several stretches of time."""
    precision: str = ""
    ranks: int = 1
    """Ranks of a group that communicate."""
    nodes: int = 1
    """Nodes they are on."""
    way: str = "together"
    """together: all ranks at once; alone: one rank, or one of each node, while the others wait."""

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.windows)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for what several ranks timed of the same."""
        return (self.kind, self.size, self.precision, self.ranks, self.nodes, self.way)

    def row(self) -> dict[str, object]:
        """For the profile and for JSON."""
        shown = {key: value for key, value in asdict(self).items() if key != "windows" and value != ""}
        spread = {"seconds": self.seconds, "low": min(self.windows), "high": max(self.windows)}
        return {**shown, **{name: float(f"{value:.4g}") for name, value in spread.items()}}


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """The same thing timed by several ranks as one sample."""
    found: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.key, []).append(sample)
    return [
        Sample(first.kind, first.size, windows, first.precision, first.ranks, first.nodes, first.way)
        for first, windows in (
            (same[0], tuple(window for sample in same for window in sample.windows)) for same in found.values()
        )
    ]


def spread(samples: Sequence[Sample]) -> list[Sample]:
    """Seconds that kernels kept a core as seconds by the clock, at the fraction of a core that ranks had on average."""
    fractions = {sample.way: statistics.fmean(sample.windows) for sample in samples if sample.kind == "core_fraction"}
    return [
        replace(sample, windows=tuple(window / fractions.get(sample.way, 1.0) for window in sample.windows))
        if sample.kind in KERNELS
        else sample
        for sample in samples
    ]
