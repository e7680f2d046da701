"""The owner of each block of a fragment: the one rank of a pipeline stage that keeps the block's outer weights.

The blocks that a stage holds of a fragment, in the order of the fragment, are divided into equal parts, one for each of
its ranks. So an owner has few runs of blocks, and the owners of a block on two islands, which may have different
layouts, find each other by arithmetic alone. Within the island elements are sent to their owners and back as Muon sends
matrices (`spec.matrix_owners`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from cuboid.spec.islands import BLOCK, Fragment, Tensor, fragments_of
from cuboid.spec.matrix_owners import Kept, Matrix, Span, kept_by, stage_size, with_owner
from cuboid.spec.partition import held_layers
from cuboid.spec.run import Run
from cuboid.spec.sharding import TIED, DeclaredUnit, units

Blocks = tuple[int, int]
"""A run of blocks of a fragment: the first, and the one behind the last."""


@dataclass(frozen=True)
class Chunk:
    """Blocks of one tensor that have one owner."""

    tensor: Tensor
    blocks: Blocks
    """In the fragment."""
    matrix: Matrix
    """Its elements, as they travel between ranks and their owner: a row, or where tensor ranks split columns, rows."""

    @property
    def elements(self) -> tuple[int, int]:
        """In the flattened tensor."""
        return elements_of(self.tensor, self.blocks)


def elements_of(tensor: Tensor, blocks: Blocks) -> tuple[int, int]:
    first, stop = (block - tensor.first for block in blocks)
    return first * BLOCK, min(stop * BLOCK, tensor.elements)


def _stage_units(run: Run, pipeline_rank: int) -> list[DeclaredUnit]:
    """What a pipeline rank answers for: a tied embedding belongs to the first stage alone."""
    layers = held_layers(run.model, run.layout, run.training.sequence)
    stages = run.layout.stages_of(pipeline_rank)
    held = [layer for stage in stages for layer in layers[stage]]
    first, last = 0 in stages, run.layout.stages - 1 in stages
    return [unit for unit in units(run.model, held, first, last) if first or unit.name != TIED]


@lru_cache(maxsize=64)
def _held(run: Run, pipeline_rank: int) -> tuple[frozenset[str], dict[str, int]]:
    """The parameters that a pipeline rank answers for; of those whose columns tensor ranks split, the columns."""
    names, columns = set(), {}
    for unit in _stage_units(run, pipeline_rank):
        for name, declared in unit.parameters.items():
            names.add(name)
            dimension = declared.split.dimension if declared.split.kind == "even" else 0
            if dimension and run.layout.tp > 1:
                columns[name] = prod(declared.shape[dimension:])
    return frozenset(names), columns


@lru_cache(maxsize=1024)
def owned_blocks(run: Run, fragment: int, pipeline_rank: int) -> tuple[tuple[tuple[Tensor, Blocks], ...], ...]:
    """For each rank of a stage the blocks of a fragment that the rank owns."""
    names, columns = _held(run, pipeline_rank)
    line = [tensor for tensor in _fragment(run, fragment).tensors if tensor.name in names]
    ranks, total = stage_size(run.layout), sum(tensor.blocks for tensor in line)
    found: list[list[tuple[Tensor, Blocks]]] = [[] for _ in range(ranks)]
    before = 0
    for tensor in line:
        # Rows stay whole where ranks hold columns, so that an owner can put them together.
        width = columns.get(tensor.name, 1)
        step = width // gcd(width, BLOCK)
        for rank in range(before * ranks // max(total, 1), ranks):
            low, high = (_boundary(place * total // ranks - before, step, tensor.blocks) for place in (rank, rank + 1))
            if low < high:
                found[rank].append((tensor, (tensor.first + low, tensor.first + high)))
            if high == tensor.blocks:
                break
        before += tensor.blocks
    return tuple(map(tuple, found))


def _fragment(run: Run, fragment: int) -> Fragment:
    return fragments_of(run.model, run.islands.fragments)[fragment]


def _boundary(place: int, step: int, blocks: int) -> int:
    """A place where a tensor may be cut: not behind the one asked for."""
    return blocks if place >= blocks else max(0, place // step * step)


def runs_of_blocks(run: Run, fragment: int, rank: int) -> tuple[Blocks, ...]:
    """What a rank owns, in order; neighbours are one run."""
    size = stage_size(run.layout)
    return _joined(owned_blocks(run, fragment, rank // size)[rank % size])


@lru_cache(maxsize=64)
def runs_of_ranks(run: Run, fragment: int) -> tuple[tuple[Blocks, ...], ...]:
    """The same of all ranks."""
    return tuple(_joined(own) for stage in range(run.layout.pp) for own in owned_blocks(run, fragment, stage))


def _joined(own: Sequence[tuple[Tensor, Blocks]]) -> tuple[Blocks, ...]:
    found: list[Blocks] = []
    for _, (first, stop) in own:
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, stop))
    return tuple(found)


def overlap(own: Sequence[Blocks], other: Sequence[Blocks]) -> list[Blocks]:
    """The blocks that are in both, in order."""
    found = []
    places = iter(other)
    there = next(places, None)
    for first, stop in own:
        while there is not None and there[1] <= first:
            there = next(places, None)
        while there is not None and there[0] < stop:
            found.append((max(first, there[0]), min(stop, there[1])))
            if there[1] > stop:
                break
            there = next(places, None)
    return found


# How the elements of a stage travel.


@lru_cache(maxsize=256)
def stage_chunks(run: Run, fragment: int, pipeline_rank: int) -> tuple[Chunk, ...]:
    """All chunks of a fragment on a stage, in order, with those that keep their elements."""
    kept: dict[str, list[Kept]] = {}
    wanted = {tensor.name for rank in owned_blocks(run, fragment, pipeline_rank) for tensor, _ in rank}
    for unit in _stage_units(run, pipeline_rank):
        if not wanted.isdisjoint(unit.parameters):
            kept |= kept_by(unit, run.layout)
    return tuple(
        _chunk(tensor, blocks, owner, kept[tensor.name])
        for owner, own in enumerate(owned_blocks(run, fragment, pipeline_rank))
        for tensor, blocks in own
    )


def _chunk(tensor: Tensor, blocks: Blocks, owner: int, kept: list[Kept]) -> Chunk:
    first, stop = elements_of(tensor, blocks)
    cut, shape = kept[0].part.slice, tensor.shape
    split = cut.dimension > 0 and cut.length < shape[cut.dimension]
    columns = prod(shape[cut.dimension :]) if split else stop - first
    stripes = shape[cut.dimension] // cut.length if split else 1
    spans = tuple(Span(*each, sender=-1) for each in _spans(shape, kept, first, stop))
    rows = (stop - first) // columns
    return Chunk(
        tensor, blocks, with_owner(Matrix(tensor.name, rows, columns, stripes, -1, spans, ()), tensor.name, owner)
    )


def _spans(
    shape: tuple[int, ...], kept: list[Kept], first: int, stop: int
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Start, place, size and ranks of what each keeps of the elements first:stop of a tensor."""
    for each in kept:
        cut = each.part.slice
        inner = prod(shape[cut.dimension + 1 :])
        if cut.dimension > 0 and cut.length < shape[cut.dimension]:
            columns, width = shape[cut.dimension] * inner, cut.length * inner
            low, high = first // columns * width, stop // columns * width  # in what the rank holds
            begin = cut.start // cut.length * (high - low) - low
            low, high = max(low, each.start), min(high, each.stop)
        else:
            begin = cut.start * inner - first if cut.dimension == 0 else -first
            real = (cut.stop - cut.start) * inner if cut.dimension == 0 else each.stop
            low, high = max(each.start, -begin), min(each.stop, real, stop - first - begin)
        if low < high:
            yield low, begin + low, high - low, each.ranks


# Bytes on the slow link, of what is not said again after a broken connection.


REQUEST, ANSWER, FRAME = 32, 24, 36
"""Bytes of what an owner asks another one, of the head of an answer, and of the length and tag of every message."""
PART = 1 << 20
"""Bytes of blocks in one message, at most."""


def wire_bytes(run: Run, fragment: int, rank: int, other: Run) -> tuple[int, int]:
    """What a rank sends to and receives from all ranks of another island for one round in which both take part."""
    size = run.islands.block_bytes(run.training.weights)
    sent = received = 0
    own = runs_of_blocks(run, fragment, rank)
    for there in range(other.layout.world_size):
        for first, stop in overlap(own, runs_of_blocks(other, fragment, there)):
            answered = ANSWER + FRAME + (stop - first) * size + FRAME * messages(stop - first, size)
            sent += answered + REQUEST + FRAME
            received += answered + REQUEST + FRAME
    return sent, received


def messages(blocks: int, size: int) -> int:
    """In which an answer of so many blocks of a size comes, its head not counted."""
    return -(-blocks // max(PART // size, 1))
