"""How elements that ranks of a stage keep travel to the owner of their matrix (`spec.matrix_owners`) and what came of
them back: two all-to-alls serve every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cuboid.parallel.collectives import Pending, start_all_to_all
from cuboid.parallel.groups import Group
from cuboid.spec.matrix_owners import Bucket, Matrix, Span

Pair = tuple[Matrix, Span]


class Route:
    """What one rank sends and receives for a bucket. Both ways the elements for each rank, or from it, stand in the
    order of matrices and their spans, which all ranks know."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        self._group, here = group, group.index
        spans = [(matrix, span) for matrix in bucket for span in matrix.spans]
        owned = [pair for pair in spans if pair[0].owner == here]
        self.own = [matrix for matrix in bucket if matrix.owner == here]
        """The matrices that are orthogonalised here."""
        # Sorting keeps the order of what has one rank.
        self.sent = sorted((pair for pair in spans if pair[1].sender == here), key=_owner)
        """This rank's elements on their way to their owners."""
        self.received = sorted(owned, key=_sender)
        """… as an owner receives them."""
        returned = sorted(((rank, pair) for pair in owned for rank in pair[1].ranks), key=_first)
        self.returned = [pair for _, pair in returned]
        """What came of them, as an owner sends it."""
        self.kept = sorted((pair for pair in spans if here in pair[1].ranks), key=_owner)
        """… and as this rank receives it."""
        self._there = self._counts(map(_owner, self.sent), self.sent), self._counts(map(_sender, owned), owned)
        self._back = self._counts(map(_first, returned), self.returned), self._counts(map(_owner, self.kept), self.kept)

    def _counts(self, ranks: Iterable[int], pairs: list[Pair]) -> list[int]:
        """Elements by rank."""
        counts = [0] * self._group.size
        for rank, (_, span) in zip(ranks, pairs, strict=True):
            counts[rank] += span.size
        return counts

    def start(self, packed: list[Tensor], like: Tensor, back: bool) -> Pending:
        """Send what was packed in the order of `sent`, or `returned`."""
        whole = torch.cat(packed) if packed else like.new_empty(0)
        self._group.count("all-to-all", whole.nbytes)
        return start_all_to_all(whole, *(self._back if back else self._there), self._group)


def _owner(pair: Pair) -> int:
    return pair[0].owner


def _sender(pair: Pair) -> int:
    return pair[1].sender


def _first(pair: tuple[int, Pair]) -> int:
    return pair[0]
