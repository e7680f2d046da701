"""A micro-batch: what a model is trained on at once, and the documents packed into its sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuboid.kernels.pinned_memory import to_device

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
    numbers: Sequence[int] | None = None
    """Of its sequences in the order of the data: what dropout draws from. None drops nothing."""


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
    return Further(tokens, labels.masked_fill(to_device(beyond, labels.device), IGNORED))


# Documents packed into sequences, where attention stays inside each of them.


class Edges(NamedTuple):
    """Documents as kernels read them. Shapes depend on the micro-batch alone, so that a block is compiled once."""

    places: Tensor
    """(tokens + 1), int32, on the device: where documents begin when all sequences follow one another, and then the
    number of tokens, as often as there is room."""
    sizes: Tensor
    """(2), on the host: how many documents there are, and the tokens of the longest. What a kernel is launched with is
    read here, so that nobody asks the device."""


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
    def starts(self) -> Tensor:
        """Where documents begin when all sequences follow one another, and the number of tokens; a document ends with
        its sequence."""
        changes = torch.ones(self.ids.shape, dtype=torch.bool)
        torch.ne(self.ids[:, 1:], self.ids[:, :-1], out=changes[:, 1:])
        return torch.cat((changes.flatten().nonzero().flatten(), torch.tensor([changes.numel()])))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document, sequence after sequence."""
        return self.starts.diff()

    @cached_property
    def index(self) -> Tensor:
        """The place of each token in its own document."""
        begins = self.starts[:-1].repeat_interleave(self.lengths)
        return (torch.arange(self.ids.numel()) - begins).view(self.ids.shape)

    def edges(self, device: torch.device) -> Edges:
        if device not in self.kept:
            tokens = self.ids.numel()
            places = torch.full((tokens + 1,), tokens, dtype=torch.int32)
            places[: len(self.starts)] = self.starts
            sizes = torch.stack((torch.tensor(len(self.lengths)), self.lengths.max()))
            self.kept[device] = Edges(to_device(places, device), sizes)
        found: Edges = self.kept[device]
        return found
