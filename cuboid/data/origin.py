"""Where a sample comes from, for people who look for it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from cuboid.data.indexed import IndexedTokens


@dataclass(frozen=True)
class Origin:
    source: str
    sample: int
    """Its number in that source."""
    documents: tuple[int, int] | None = None
    """First and last document of which it holds tokens; None where there are no documents."""


def document_of(tokens: IndexedTokens, place: int) -> int:
    """The document in which a token lies."""
    return bisect_right(range(tokens.documents), place, key=tokens.document_start) - 1
