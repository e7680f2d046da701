"""Which documents are held out: the last few of every stripe of the source, so that both sides see all of it.

The split depends on the source and the fraction alone, not on sequence, seed or layout: what is once held out stays so.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuboid.errors import UserError

STRIPES = 64


@dataclass(frozen=True)
class Split:
    """Documents as ranges [first, last)."""

    training: tuple[tuple[int, int], ...]
    held_out: tuple[tuple[int, int], ...]


def split_documents(documents: int, fraction: float, name: str) -> Split:
    held = int(documents * fraction)
    if not fraction:
        return Split(((0, documents),), ())
    if held < 1 or held >= documents:
        least = 1 / documents
        raise UserError(
            f"data.validation_fraction={fraction} of the {documents:,} documents of {name} leaves nothing on one side; "
            + (f"use {least:.2g} or more" if documents > 1 else "name another source in data.validation")
        )
    stripes = min(STRIPES, held)
    training, held_out = [], []
    for stripe in range(stripes):
        first, last = documents * stripe // stripes, documents * (stripe + 1) // stripes
        cut = last - (held * last // documents - held * first // documents)
        training.append((first, cut))
        held_out.append((cut, last))
    return Split(tuple(training), tuple(held_out))
