"""Why the output of a block or embedding is wrong: it is replayed with one known bug after another, and the bug whose
replay comes nearest to the ranks' output is the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cuboid.model.batch import MicroBatch
from cuboid.model.rope import Positions
from cuboid.parallel.parallelize import Alone, Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Segment
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.sharding import places_of
from cuboid.training.checks.masks import Attend, wrong_masks

LARGEST = 2**28
"""Scores of attention that are written out."""
ROWS = ("attention.output.weight", "feed_forward.down.weight")
"""Whose results tensor ranks add up."""


@dataclass(frozen=True)
class Variant:
    """A replay with one bug."""

    cause: str
    weights: dict[str, Tensor]
    change: Callable[[Alone], None] = lambda _: None
    batch: Callable[[RankBatch], RankBatch] = lambda batch: batch


def variants(engine: Engine, segment: Segment, batch: MicroBatch, weights: dict[str, Tensor]) -> Iterator[Variant]:
    """`weights`: whole ones, by name."""
    run, here, name = engine.run, engine.groups.coordinates, segment.name
    if isinstance(run.model, PythonModelSpec) or name == "head":
        return
    parts = {part.name: part for unit in segment.units for part in unit.parts}
    for path in ROWS:
        part, whole = parts.get(f"{name}.{path}"), weights.get(f"{name}.{path}")
        if part is None or whole is None or whole.ndim < 2:
            continue
        held = slice(part.slice.start, part.slice.stop)
        if held.stop - held.start < whole.shape[1]:
            own = torch.zeros_like(whole)
            own[:, held] = whole[:, held]
            cause = f"sum missing over tp: only the part of tp rank {here.tp} is in it"
            yield Variant(cause, weights | {part.name: own})
    attention = getattr(segment.module, "attention", None)
    scores = len(batch.tokens) * run.training.sequence**2 * run.model.heads
    if name.startswith("layers.") and hasattr(attention, "mix") and scores <= LARGEST:
        ids, sinks = batch.documents, f"{name}.attention.sinks" in weights
        for cause, attend in wrong_masks(run, int(name.rpartition(".")[2]), here.cp, sinks):
            mix = _Mix(attend, ids if run.data.attention_within_documents else None)
            yield Variant(cause, weights, partial(_put, mix))
    if run.training.dropout:
        yield Variant("nothing is dropped", weights, batch=partial(_dropping, None))
        for rank in range(run.layout.tp if run.layout.sequence_parallel and run.layout.tp > 1 else 0):
            cause = f"dropout drops what is dropped of the tokens of tp rank {rank}"
            yield Variant(cause, weights, batch=partial(_dropping, (rank, run.layout.tp)))
    if run.layout.cp > 1:
        length, size = run.training.sequence, run.layout.cp
        held_by = [torch.cat([torch.tensor(part) for part in places_of(each, size, length)]) for each in range(size)]
        for taken in (held_by[0], torch.arange(len(held_by[0]))):
            place = torch.empty(length, dtype=torch.int64)
            for own in held_by:
                place[own] = taken
            cause = "positions of other tokens, such as another chunk of the sequence"
            yield Variant(cause, weights, batch=partial(_moved, place))


class _Mix:
    """In place of a layer's attention operation."""

    def __init__(self, attend: Attend, documents: Tensor | None) -> None:
        self._attend, self._documents = attend, documents

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions, sinks: Tensor | None = None
    ) -> Tensor:
        ids = [None if self._documents is None else each.to(query.device) for each in self._of(query)]
        sequences = zip(query, key, value, ids, strict=True)
        return torch.stack([self._attend(*each, sinks) for each in sequences])

    def _of(self, query: Tensor) -> Tensor:
        return query.new_zeros(len(query), 1) if self._documents is None else self._documents


def _put(mix: _Mix, alone: Alone) -> None:
    attention = getattr(alone.segment.module, "attention", None)
    assert attention is not None
    attention.mix = mix


def _dropping(part: tuple[int, int] | None, batch: RankBatch) -> RankBatch:
    """`part`: (index, count): all tokens have the dropout keys of one of so many parts; None: no dropout."""
    keys = batch.positions.dropout
    if part is not None and keys is not None:
        keys = torch.cat([keys.chunk(part[1])[part[0]]] * part[1])
    return replace(batch, positions=replace(batch.positions, dropout=None if part is None else keys))


def _moved(place: Tensor, batch: RankBatch) -> RankBatch:
    """Every token at the position of another one."""
    positions = batch.positions
    place = place.to(positions.index.device)

    def at(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, place]

    both = positions.windowed
    windowed = None if both is None else (both[0][:, place], both[1][:, place])
    cosine, sine = at(positions.cosine), at(positions.sine)
    moved = replace(positions, index=positions.index[:, place], cosine=cosine, sine=sine, windowed=windowed)
    return replace(batch, positions=moved)
