"""A micro-batch: what a model is trained on at once, and the documents packed into its sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that does not count in the loss."""


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences, as they are loaded."""

    tokens: Tensor
    """(sequences, length)"""
    labels: Tensor
    documents: Tensor | None = None
    """Which document each token belongs to, where that matters; always in host memory."""
    cut: int = 0
    """Tokens after which sequences are cut, as if they were shorter; 0: nowhere. Needs `documents`."""
    fields: Mapping[str, Tensor] | None = None
    """All that a data set of one's own gives."""


class Further(NamedTuple):
    """What a prediction layer reads beside hidden states, and what it predicts."""

    tokens: Tensor
    """(sequences, length): of each place the token that is so many places further; nothing in particular behind the
    end."""
    labels: Tensor
    """… the label of that token."""


def further(batch: MicroBatch, depth: int) -> Further:
    """`depth`: places that tokens are further. What is predicted lies in the same sequence and, where documents are
    known, in the same document."""
    tokens, labels = (x.roll(-depth, 1) for x in (batch.tokens, batch.labels))
    length = labels.shape[1]
    places = torch.arange(length)
    beyond = (places + depth >= length).expand(labels.shape)
    if batch.documents is not None:
        # Of the label of the last place it is not known where it belongs.
        target = (places + depth + 1).clamp(max=length - 1)
        beyond = beyond | (batch.documents[:, target] != batch.documents)
    if batch.cut:
        beyond = beyond | ((places + depth) // batch.cut != places // batch.cut)
    return Further(tokens, labels.masked_fill(beyond.to(labels.device), IGNORED))


# Documents packed into sequences, where attention stays inside each of them.


class Documents:
    """Which document each token belongs to. Kept on the host: kernels are told lengths, not asked for them."""

    def __init__(self, ids: Tensor) -> None:
        """`ids`: (sequences, length) on the CPU; along a sequence they never fall."""
        self.ids = ids
        self.kept: dict[Hashable, Any] = {}
        """What was derived from these documents, so that the next layer finds it."""

    def cut(self, every: int) -> Documents:
        """Each ends also where a sequence would, were it `every` tokens long."""
        length = self.ids.shape[1]
        return Documents(self.ids * length + torch.arange(length) // every)

    def take(self, places: Tensor) -> Documents:
        """The documents of some of the places, which must be in order."""
        return Documents(self.ids[:, places])

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, sequence after sequence; a document ends with its sequence."""
        changes = self.ids.diff(dim=1) != 0
        starts = torch.cat((torch.ones(len(self.ids), 1, dtype=torch.bool), changes), dim=1).flatten()
        edges = [*starts.nonzero().flatten().tolist(), starts.numel()]
        return [stop - start for start, stop in pairwise(edges)]

    @cached_property
    def index(self) -> Tensor:
        """The place of each token in its own document."""
        return torch.cat([torch.arange(length) for length in self.lengths]).view(self.ids.shape)

    def edges(self, device: torch.device) -> Tensor:
        """Where documents begin and end when all sequences follow one another."""
        if device not in self.kept:
            sums = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.kept[device] = sums.to(device)
        found: Tensor = self.kept[device]
        return found

    def mask(self, device: torch.device) -> Tensor:
        """(sequences, 1, length, length): whom each token sees, the 1 for heads."""
        key = ("mask", device)
        if key not in self.kept:
            ids = self.ids.to(device)
            self.kept[key] = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)
        found: Tensor = self.kept[key]
        return found
