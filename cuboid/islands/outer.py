"""The outer weights and momentum of what a rank owns, in CPU memory: what the islands agree on.

A synchronisation of a fragment sends the weights to their owners, encodes how far they have come from the outer ones,
and steps with the mean over islands. All islands add the same bytes in the same order, so their outer weights are equal
to the bit, though other ranks keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuboid.checkpoint.shards import ShardedTensor, TensorSlice, slices_of_range
from cuboid.islands.wire import decode, encode
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.owner_route import Pair, Route
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.block_owners import Chunk, stage_chunks
from cuboid.spec.islands import BLOCK, fragments_of
from cuboid.spec.matrix_owners import stage_size
from cuboid.spec.sharding import TIED

WEIGHTS, MOMENTUM, ERROR = "outer", "outer_momentum", "outer_error"
"""As checkpoints call what is kept of each parameter."""
Weighted = Sequence[tuple[float, Tensor]]
"""Of each island in the mean, in one order everywhere: its weight, and what it sent."""


@dataclass
class Sent:
    """What an island contributes of a fragment, at one owner."""

    wire: Tensor
    """(blocks, bytes)."""
    error: Tensor | None
    """What rounding has lost, if it takes part."""


@dataclass
class OuterFragment:
    """Of one fragment what this rank owns."""

    route: Route
    chunks: list[Chunk]
    places: list[int]
    """Of the chunks' blocks in the tensors below."""
    weights: Tensor
    """(blocks, 256), in the precision of master weights; what fills up the last block of a tensor is zero."""
    momentum: Tensor
    error: Tensor | None
    tokens: int = 0
    """That the island has seen since it last contributed."""
    before: Tensor | None = field(default=None, repr=False)
    """The outer weights before the latest step, for an island whose work is not in it."""


class OuterState:
    """Every rank has one, and calls the same methods in the same order."""

    def __init__(self, engine: Engine) -> None:
        run = engine.run
        self.engine, self.spec = engine, run.islands
        self.dtype = engine.units[0].accumulate
        self._fragments = [self._make(fragment) for fragment in range(self.spec.fragments)]

    def _make(self, fragment: int) -> OuterFragment:
        run, groups = self.engine.run, self.engine.groups
        everywhere = stage_chunks(run, fragment, groups.coordinates.pp)
        route = Route(tuple(chunk.matrix for chunk in everywhere), groups.stage)
        here = groups.world.index % stage_size(run.layout)
        chunks = [chunk for chunk in everywhere if chunk.matrix.owner == here]
        places, total = [], 0
        for chunk in chunks:
            places.append(total)
            total += chunk.blocks[1] - chunk.blocks[0]
        zeros = [torch.zeros(total, BLOCK, dtype=self.dtype) for _ in range(3)]
        return OuterFragment(route, chunks, places, zeros[0], zeros[1], zeros[2] if self.spec.bits < 16 else None)

    def __getitem__(self, fragment: int) -> OuterFragment:
        return self._fragments[fragment]

    @property
    def host_bytes(self) -> int:
        kept = [each for one in self._fragments for each in (one.weights, one.momentum, one.error)]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def begin(self) -> None:
        """The outer weights are the weights as they are now."""
        for fragment, own in enumerate(self._fragments):
            own.weights.copy_(self.collect(fragment))
            for other in (own.momentum, own.error):
                if other is not None:
                    other.zero_()

    # Between ranks and owners.

    def _shards(self, fragment: int) -> dict[str, tuple[Unit, OptimizerShard]]:
        """What this rank keeps of a fragment."""
        names = {chunk.tensor.name for chunk in self._chunks_of_stage(fragment)}
        found: dict[str, tuple[Unit, OptimizerShard]] = {}
        for unit in self.engine.units:
            if not names.isdisjoint(unit.parameters):
                unit.settle_gather()  # it would write over what is set
                found |= {shard.part.name: (unit, shard) for shard in unit.optimizer_shards()}
        return {name: held for name, held in found.items() if name in names}

    def _chunks_of_stage(self, fragment: int) -> tuple[Chunk, ...]:
        return stage_chunks(self.engine.run, fragment, self.engine.groups.coordinates.pp)

    def collect(self, fragment: int) -> Tensor:
        """The weights as they are now of what this rank owns, (blocks, 256) in CPU memory."""
        own, shards = self._fragments[fragment], self._shards(fragment)
        masters = {name: shard.master for name, (_, shard) in shards.items()}
        packed = [_part(masters[pair[0].parameter], pair, shards[pair[0].parameter][1]) for pair in own.route.sent]
        like = torch.empty(0, dtype=self.dtype, device=self.engine.device)
        received = own.route.start([part.to(self.dtype) for part in packed], like, back=False).wait().cpu()
        parts = torch.split(received, [span.size for _, span in own.route.received])
        whole = {id(chunk.matrix): received.new_empty(chunk.elements[1] - chunk.elements[0]) for chunk in own.chunks}
        for (matrix, span), values in zip(own.route.received, parts, strict=True):
            whole[id(matrix)][span.place : span.place + span.size] = values
        blocks = torch.zeros_like(own.weights)
        for chunk, place in zip(own.chunks, own.places, strict=True):
            values, matrix = whole[id(chunk.matrix)], chunk.matrix
            if matrix.stripes > 1:  # as ranks hold them, stripe by stripe of columns
                values = values.view(matrix.stripes, matrix.rows, -1).transpose(0, 1).reshape(-1)
            blocks.view(-1)[place * BLOCK :][: len(values)] = values
        return blocks

    def spread(self, fragment: int, blocks: Tensor) -> dict[str, Tensor]:
        """Numbers that this rank owns, (blocks, 256) in CPU memory, to all ranks that keep the elements: flat, by
        parameter."""
        own, shards = self._fragments[fragment], self._shards(fragment)
        whole = {}
        for chunk, place in zip(own.chunks, own.places, strict=True):
            first, stop = chunk.elements
            values, matrix = blocks.view(-1)[place * BLOCK :][: stop - first], chunk.matrix
            if matrix.stripes > 1:
                width = matrix.columns // matrix.stripes
                values = values.view(matrix.rows, matrix.stripes, width).transpose(0, 1).reshape(-1)
            whole[id(matrix)] = values
        packed = [whole[id(matrix)][span.place : span.place + span.size] for matrix, span in own.route.returned]
        sent = torch.cat(packed).to(self.engine.device) if packed else torch.empty(0, device=self.engine.device)
        received = own.route.start([sent.to(self.dtype)], sent, back=True).wait()
        found = {
            name: torch.zeros(shard.stop - shard.start, dtype=self.dtype, device=self.engine.device)
            for name, (_, shard) in shards.items()
        }
        parts = torch.split(received, [span.size for _, span in own.route.kept])
        for pair, values in zip(own.route.kept, parts, strict=True):
            _part(found[pair[0].parameter], pair, shards[pair[0].parameter][1]).copy_(values)
        return found | self._tied(fragment, found)

    def _tied(self, fragment: int, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last stage has a copy of a tied embedding, split alike, and no owner of it."""
        group, fragments = self.engine.groups.embedding, self.spec.fragments
        if group is None or TIED not in _names(self.engine, fragment, fragments):
            return {}
        for unit in self.engine.units:
            for shard in unit.optimizer_shards():
                if shard.part.name == TIED:
                    zeros = torch.zeros(shard.stop - shard.start, dtype=self.dtype, device=self.engine.device)
                    return {TIED: all_reduce(found.get(TIED, zeros), group)}
        return {}

    # A round.

    def contribute(self, fragment: int) -> Sent:
        """How far the weights have come, as it is sent."""
        own = self._fragments[fragment]
        moved = own.weights - self.collect(fragment)
        if own.error is None:
            return Sent(encode(moved, self.spec.bits), None)
        moved += own.error
        wire = encode(moved, self.spec.bits)
        return Sent(wire, moved.sub_(decode(wire, self.spec.bits, self.dtype)))

    def step(self, round_: int, sent: Weighted, own: Sent | None) -> tuple[float, float]:
        """The outer optimizer's step with the mean; returns, of what this rank owns, the sum of squares of that, and
        the mean one of what islands are away from it. `own`: what this island has sent, where it is in the mean. In CPU
        memory; may run in a thread beside the training."""
        state, total = self._fragments[self.spec.fragment_of(round_)], sum(weight for weight, _ in sent)
        rate, momentum = self.spec.outer_optimizer(round_)
        mean = torch.zeros_like(state.weights)
        # Multiplied, then added: what one operation did of both could round otherwise on another processor.
        for weight, wire in sent:
            mean += decode(wire, self.spec.bits, self.dtype) * (weight / total)
        if own is None:
            state.before = state.weights.clone()
        elif own.error is not None:
            assert state.error is not None
            state.error.copy_(own.error)
        state.momentum.mul_(momentum).add_(mean)
        step = (state.momentum * momentum).add_(mean).mul_(rate)
        state.weights.sub_(step)
        away = [(decode(wire, self.spec.bits, self.dtype) - mean).double().square().sum() for _, wire in sent]
        return float(mean.double().square().sum()), float(sum(away)) / len(sent)

    def apply(self, fragment: int, takes_part: bool, at_once: bool) -> None:
        """Let the weights follow the outer ones. What an island has learned that is not in the mean stays its own, and
        only moves along: it counts in the next round."""
        state = self._fragments[fragment]
        if takes_part:
            arriving = self.spread(fragment, state.weights)
        else:
            assert state.before is not None
            arriving = self.spread(fragment, state.weights - state.before)
        state.before = None
        mix = 1.0 if at_once else self.spec.mix
        for unit in self.engine.units:
            changed = False
            for shard in unit.optimizer_shards():
                if shard.part.name not in arriving:
                    continue
                if not changed:
                    unit.settle_gather()
                values, changed = arriving[shard.part.name], True
                if not takes_part:
                    values = shard.master + values
                elif mix < 1:
                    values = torch.lerp(shard.master, values, mix)
                shard.set_master(values)
            if changed:
                unit.publish()

    # Checkpoints.

    def state(self) -> dict[str, ShardedTensor]:
        """What is owned by this rank, under the names of the parameters."""
        found: dict[str, ShardedTensor] = {}
        for own in self._fragments:
            kept = ((WEIGHTS, own.weights), (MOMENTUM, own.momentum), (ERROR, own.error))
            for kind, values in kept:
                if values is not None:
                    for chunk, place in zip(own.chunks, own.places, strict=True):
                        name, held = f"{kind}/{chunk.tensor.name}", _sharded(chunk, place, values)
                        before = found[name].slices if name in found else ()
                        found[name] = ShardedTensor(chunk.tensor.shape, values.dtype, (*before, *held))
        return found


def _names(engine: Engine, fragment: int, fragments: int) -> set[str]:
    return {tensor.name for tensor in fragments_of(engine.run.model, fragments)[fragment].tensors}


def _part(values: Tensor, pair: Pair, shard: OptimizerShard) -> Tensor:
    start = pair[1].start - shard.start
    return values[start : start + pair[1].size]


def _sharded(chunk: Chunk, place: int, values: Tensor) -> tuple[tuple[TensorSlice, Tensor], ...]:
    first, stop = chunk.elements
    flat = values.view(-1)[place * BLOCK :][: stop - first]
    return tuple(
        (each, flat[each.start - first : each.start - first + each.size].view(each.lengths))
        for each in slices_of_range(chunk.tensor.shape, first, stop)
    )
