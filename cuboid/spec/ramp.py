"""A number that grows as a training proceeds, in steps: the size of batches, the length of sequences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from cuboid.errors import UserError

STAGE = re.compile(r"\s*([1-9][0-9]{0,8})\s*x\s*([1-9][0-9]{0,8})\s*")
MOST_STAGES = 1000


@dataclass(frozen=True)
class Ramp:
    stages: tuple[tuple[int, int], ...]
    """(number, of how many batches), in order."""
    last: int
    """Of all later batches."""

    def at(self, batch: int) -> int:
        """Of a batch, counted from 0."""
        for number, batches in self.stages:
            if batch < batches:
                return number
            batch -= batches
        return self.last

    @property
    def divisor(self) -> int:
        """The largest number that all of them divide by."""
        return gcd(self.last, *(number for number, _ in self.stages))

    def sum_before(self, batch: int) -> int:
        """Over all batches before this one."""
        before = 0
        for number, batches in self.stages:
            before += number * min(batch, batches)
            batch = max(0, batch - batches)
        return before + batch * self.last


@lru_cache(maxsize=64)
def parse_ramp(field: str, text: str, last: int) -> Ramp:
    """`last`: what `field` grows to, and no stage is above.

    >>> parse_ramp("batch", "8x100,16x50", 32).sum_before(151)
    1632
    """
    parts = text.split(",") if text.strip() else []
    found = [STAGE.fullmatch(part) for part in parts[:MOST_STAGES]]
    stages = tuple((int(match[1]), int(match[2])) for match in found if match)
    if len(stages) < len(parts):
        raise UserError(f"training.{field}={text[:100]} is no list of size x steps; use {field}=8x100,16x50")
    if above := [number for number, _ in stages if number > last]:
        raise UserError(f"training.{field}={text[:100]} grows to {last} and has {above[0]} before; use at most {last}")
    return Ramp(stages, last)
