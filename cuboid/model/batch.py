"""What a model is trained on at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences, as they are loaded."""

    tokens: Tensor
    """(sequences, length)"""
    labels: Tensor
    documents: Tensor | None = None
    """Which document each token belongs to, where that matters; always in host memory."""
    fields: Mapping[str, Tensor] | None = None
    """All that a data set of one's own gives."""
