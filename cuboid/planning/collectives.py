"""Every collective of a step as the engine makes it: what the ranks of each dimension send one another, to the byte.

The engine counts the same while it trains (`cuboid train --count-communication`), and the tests hold the two equal.
Two things are not known beforehand: how routing spreads rows over the ranks of an expert group, which is why a rank's
rows count whole and where they are routed; and which of them find no room under a capacity factor, for which all count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import lcm, prod

from cuboid.spec.layout import V_SHAPED, Recompute
from cuboid.spec.matrix_owners import sent_elements, stage_size, wire_precision
from cuboid.spec.partition import held_layers
from cuboid.spec.plugin import PythonModelSpec, SegmentRun
from cuboid.spec.ranks import coordinates, shard_weights
from cuboid.spec.run import Run
from cuboid.spec.sharding import (
    EXPERTS,
    TIED,
    DeclaredUnit,
    Part,
    ShardingRank,
    embedding_is_shared,
    is_block_linear,
    kv_head_of_query,
    kv_part_count,
    lay_out,
    seen_places,
    shard_sizes,
    units,
)
from cuboid.telemetry.communication_ledger import Kind, Ledger, differences

# What one rank holds and sees in a step, as far as its collectives depend on it.


ELEMENT = {"bf16": 2, "fp16": 2, "float32": 4, "float64": 8}
"""Precision -> bytes of a parameter or an activation."""


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one step."""

    dimension: str
    kind: Kind
    ranks: int
    calls: int
    size: int
    """Bytes of each, as `telemetry.communication_ledger` counts them."""
    what: str
    """What they carry, with the formula of their size."""


@dataclass(frozen=True)
class HeldUnit:
    """A unit as one rank holds it."""

    name: str
    parts: list[Part]
    uses: int
    routed: bool
    """Whether it holds routed experts, which other ranks hold alike than the rest."""
    begin: int
    """The first element that this rank keeps of it under ZeRO."""
    shard: int
    """How many it keeps, padding included."""
    shards: int
    flat: int
    """Elements of all of them."""
    linears: list[Part]
    """Those of its parts that fp8 multiplies."""


class RankStep:
    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.layout, self.model = run, run.layout, run.model
        self.element = ELEMENT[run.training.weights]
        self.wide = max(self.element, 4)
        """Bytes of a logit or a loss: never less than float32."""
        self.gradient = 2 if run.training.gradient_sums == "bf16" else self.wide
        """Bytes of a gradient that is summed."""
        self.rank, self.place = rank, coordinates(rank, self.layout)
        self.micro_batches = run.micro_batches_of(self.place.dp)
        self.micro_batch = self.layout.micro_batch_of(self.place.dp)
        self.tokens = self.micro_batch * run.training.sequence // self.layout.cp
        """Of a micro-batch on this rank, those of its tensor-parallel neighbours included."""
        self.stages = self.layout.stages_of(self.place.pp)
        self.first, self.last = 0 in self.stages, self.layout.stages - 1 in self.stages
        layers = held_layers(self.model, self.layout, run.training.sequence)
        self.layers = [layer for stage in self.stages for layer in layers[stage]]
        self.recompute = {
            layer: self.layout.recompute_at(place) for stage in self.stages for place, layer in enumerate(layers[stage])
        }
        """What each of them computes again."""
        self.units = list(self._units())

    def _units(self) -> Iterator[HeldUnit]:
        """Of layers that are alike one is looked at, and stands for all."""
        own = isinstance(self.model, PythonModelSpec)  # whose layers may all differ
        apart = 0 if own else self.model.layers  # prediction layers are like no other
        kinds = [-layer if layer >= apart else self.model.has_experts(layer) for layer in self.layers]
        firsts = dict(zip(reversed(kinds), reversed(self.layers), strict=True))
        held = [self._held(unit) for unit in units(self.model, sorted(firsts.values()), self.first, self.last)]
        before = [*takewhile(lambda unit: not unit.name.startswith("layers."), held)]
        yield from before
        for kind in kinds:
            prefix = f"layers.{firsts[kind]}"
            yield from (unit for unit in held if unit.name == prefix or unit.name.startswith(f"{prefix}."))
        yield from (unit for unit in held[len(before) :] if not unit.name.startswith("layers."))

    def _held(self, unit: DeclaredUnit) -> HeldUnit:
        layout = self.layout
        place = ShardingRank(layout.tp, self.place.tp, layout.ep, self.rank % layout.ep, layout.sequence_parallel)
        parts = lay_out(unit.parameters, place)
        splits = layout.zero and unit.uses  # what no micro-batch uses is never split
        weights, index = shard_weights(self.rank, layout, unit.routed) if splits else ((1,), 0)
        sizes = shard_sizes(parts, weights)
        begin = sum(sizes[:index])
        linears = [part for part in parts if is_block_linear(unit.name, unit.parameters[part.name])]
        held = (begin, sizes[index], len(sizes), sum(sizes))
        return HeldUnit(unit.name, parts, unit.uses, unit.routed, *held, linears)

    def fp8_parts(self, unit: HeldUnit) -> list[Part]:
        """What of a unit ZeRO 3 gathers in fp8: the rest travels with their scales."""
        training = self.run.training
        if training.precision != "fp8" or training.fp8_scaling != "tensor" or self.layout.zero < 3:
            return []
        return unit.linears


# What the layers of a rank communicate while micro-batches pass through them.
#
# Recomputation runs a layer again up to its last matmul, so that every collective of its forward pass before that one
# is made once more.


INTEGER = 8
"""Bytes of a count or an index."""


class LayerCollectives:
    """Of all layers of one kind: with routed experts or without, of one recomputation and of one window."""

    def __init__(self, step: RankStep, routed: bool, recompute: Recompute, window: int = 0) -> None:
        self._step, self._routed, self._recompute, self._window = step, routed, recompute, window
        self._layout, self._model = step.layout, step.model
        self._again = int(recompute != "none")
        kinds = [
            (step.model.has_experts(layer), step.recompute[layer], step.model.window_of(layer)) for layer in step.layers
        ]
        self._times = step.micro_batches * kinds.count((routed, recompute, window))

    def all(self) -> Iterator[Collective]:
        yield from self._attention()
        yield from self._context()
        if self._routed:
            yield from self._routing()
            yield from self._mixture()
        else:
            yield from self._enter(self._model.hidden)
            # A norm behind the last sum needs it again.
            yield from self._leave(self._again if self._model.norms != "before" else 0)

    def _attention(self) -> Iterator[Collective]:
        latent = self._model.latent
        if latent is None:
            yield from self._enter(self._model.hidden)
        elif latent.q_rank:
            yield from self._enter(latent.q_rank + latent.kv_rank + latent.qk_rope_dim)
        else:
            yield from self._enter(self._model.hidden)
            yield from self._enter(latent.kv_rank + latent.qk_rope_dim)
        yield from self._leave(self._again)
        if self._model.qk_norm_whole:
            size, wide = self._step.tokens, self._step.wide
            what = f"means of squares of queries and keys: 2 × {wide} bytes × {size:,} tokens"
            yield self._collective("tp", "all-reduce", self._layout.tp, 2 + self._again, 2 * wide * size, what)

    def _context(self) -> Iterator[Collective]:
        """Heads for tokens inside, keys and values between. Selective recomputation keeps what came of them, full
        makes all of the forward pass again."""
        layout, model = self._layout, self._model
        inner, outer = layout.cp_inner, layout.cp // layout.cp_inner
        forward = 2 if self._recompute == "full" else 1
        heads = shared = model.heads // layout.tp
        key = value = model.head_dim
        if model.latent is not None:
            key, value = model.latent.qk_nope_dim + model.latent.qk_rope_dim, model.latent.v_dim
        elif kv_head_of_query(model, layout.tp, self._step.place.tp) is None:
            shared = model.kv_heads // kv_part_count(model, layout.tp)
        shared = lcm(shared, inner)  # repeated, so that every rank gets those of its query heads
        both = (key + value) * shared
        for width, what in ((key * heads + both, "query, key and value heads"), (value * heads, "output heads")):
            size, formula = self._tokens(width)
            yield self._collective("cp", "all-to-all", inner, forward + 1, size, f"{what}: {formula}")
        # After the collective of heads a rank has the tokens of its inner group and its part of the heads.
        size, formula = self._tokens(both)
        what = f"keys and values, and their gradients: {formula}"
        if layout.cp_method == "allgather":
            whole = f"{what} × {outer} ranks"
            yield self._collective("cp", "all-gather", outer, forward + 1, outer * size, whole)
            yield self._collective("cp", "reduce-scatter", outer, 1, outer * size, whole)
        elif self._window:
            yield from self._in_window(outer, both // inner, forward)
        else:
            yield self._collective("cp", "send", outer, (outer - 1) * (forward + 2), size, what)

    def _in_window(self, ranks: int, width: int, forward: int) -> Iterator[Collective]:
        """What a rank sends to others that see it in their window, and the gradients of what it sees of theirs.
        `width`: numbers of a token's keys and values after the collective of heads."""
        layout, element = self._layout, self._step.element
        index, length = self._step.place.cp // layout.cp_inner, self._step.run.training.sequence
        for other in range(ranks):
            if other == index:
                continue
            pairs = ((other, index, forward + 1, "keys and values"), (index, other, 1, "gradients of keys and values"))
            for asking, source, calls, name in pairs:
                tokens = self._step.micro_batch * sum(
                    map(len, seen_places(asking, source, ranks, length, self._window))
                )
                what = f"{name} in a window: {element} bytes × {tokens:,} tokens × {width:,}"
                yield self._collective("cp", "send", ranks, calls * (tokens > 0), element * tokens * width, what)

    def _mixture(self) -> Iterator[Collective]:
        """Each tensor rank routes its part of the tokens; shared experts are split like any feed-forward block."""
        mixture, layout = self._model.mixture, self._layout
        assert mixture is not None
        if mixture.shared_ffn:
            yield from self._enter(self._model.hidden)
            yield from self._leave(self._again)
        if not layout.sequence_parallel:  # parts gathered: results forward, gradients backward
            again = self._again if self._model.norms != "before" else 0
            yield self._tensor("all-gather", 2 + again, self._model.hidden)
        rows = self._step.tokens // layout.tp * mixture.top_k
        what = f"rows to experts and back: {self._step.element} bytes × {rows:,} rows × {self._model.hidden:,} hidden"
        size = self._step.element * rows * self._model.hidden
        yield self._collective("ep", "all-to-all", layout.ep, 4 + 2 * self._again, size, what)
        counts = INTEGER * mixture.experts
        what = f"rows of each expert: {INTEGER} bytes × {mixture.experts}"
        yield self._collective("ep", "all-to-all", layout.ep, 1, counts, what)

    def _routing(self) -> Iterator[Collective]:
        """What routers must know of whole sequences."""
        mixture, layout = self._model.mixture, self._layout
        assert mixture is not None
        ranks, calls = layout.cp * layout.tp, 1 + self._again
        if mixture.balance_coefficient and mixture.balance_over == "sequence":
            size = self._step.wide * self._step.micro_batch * mixture.experts
            what = f"load of experts: {self._step.wide} bytes × {self._step.micro_batch} sequences × {mixture.experts}"
            yield self._collective("sequence", "all-reduce", ranks, calls, size, what)
        if mixture.capacity_factor:
            tokens, width = self._step.tokens * layout.cp, 1 + mixture.top_k
            what = f"choices of tokens: {INTEGER} bytes × {tokens:,} tokens × {width}"
            yield self._collective("sequence", "all-gather", ranks, calls, INTEGER * tokens * width, what)

    def _enter(self, width: int) -> Iterator[Collective]:
        """Into a region of split matrices: tokens gathered, or their gradient summed."""
        if self._layout.sequence_parallel:
            yield self._tensor("all-gather", 1 + self._again, width)
            yield self._tensor("reduce-scatter", 1, width)
        else:
            yield self._tensor("all-reduce", 1, width)

    def _leave(self, again: int) -> Iterator[Collective]:
        """Out of it: partial matmuls summed; the gradient gathered where tokens are split."""
        width = self._model.hidden
        if self._layout.sequence_parallel:
            yield self._tensor("reduce-scatter", 1 + again, width)
            yield self._tensor("all-gather", 1, width)
        else:
            yield self._tensor("all-reduce", 1 + again, width)

    def _tensor(self, kind: Kind, calls: int, width: int) -> Collective:
        size, formula = self._tokens(width)
        return self._collective("tp", kind, self._layout.tp, calls, size, f"layer activations: {formula}")

    def _tokens(self, width: int) -> tuple[int, str]:
        """Bytes of so many elements for each token, and their formula."""
        element, tokens = self._step.element, self._step.tokens
        return element * tokens * width, f"{element} bytes × {tokens:,} tokens × {width:,}"

    def _collective(self, dimension: str, kind: Kind, ranks: int, calls: int, size: int, what: str) -> Collective:
        return Collective(dimension, kind, ranks, self._times * calls, size, what)


ROUTER_SUMS = 3
"""Numbers that a layer's router statistics hold beside the load of each expert."""


def predicted_ledger(run: Run, rank: int) -> Ledger:
    """What a rank communicates in a step, as the engine's own ledger will say."""
    ledger = Ledger()
    for collective in step_collectives(run, rank):
        ledger.add(collective.dimension, collective.kind, collective.ranks, collective.size, collective.calls)
    return ledger


def unforeseen(run: Run, rank: int, counted: Ledger) -> list[str]:
    """Where what a rank communicated is not what was predicted, one sentence each."""
    predicted = predicted_ledger(run, rank)
    if run.model.mixture is not None and run.model.mixture.capacity_factor:
        seen, most = (ledger.entries.get(("ep", "all-to-all")) for ledger in (counted, predicted))
        if seen and most and seen.calls == most.calls and seen.bytes <= most.bytes:
            predicted.entries["ep", "all-to-all"] = seen
    return differences(counted, predicted)


def step_collectives(run: Run, rank: int) -> list[Collective]:
    """All of a step; those that do not happen are omitted."""
    step = RankStep(run, rank)
    made = (
        *(_own(step, run.model) if isinstance(run.model, PythonModelSpec) else _passes(step)),
        *_data(step),
        *_partial_gradients(step),
        *_pipeline(step),
        *_control(step),
        *_matrices(step),
    )
    return [collective for collective in made if collective.ranks > 1 and collective.calls]


def _passes(step: RankStep) -> Iterator[Collective]:
    """Of all micro-batches."""
    for routed in (False, True) if step.model.mixture is not None else (False,):
        for recompute in dict.fromkeys(step.recompute.values()):
            for window in dict.fromkeys(map(step.model.window_of, step.layers)):
                yield from LayerCollectives(step, routed, recompute, window).all()
    yield from _ends(step)


def _own(step: RankStep, model: PythonModelSpec) -> Iterator[Collective]:
    """As the modules of a model of one's own do it, run on tensors without contents."""
    layout = step.layout
    if layout.tp == layout.ep == 1:
        return
    ranks = {"tp": layout.tp, "sequence": layout.tp, "ep": layout.ep}
    recomputed: dict[str, Recompute] = {f"layers.{layer}": step.recompute[layer] for layer in step.layers}
    recomputed |= {name: "none" for name, held in (("embedding", step.first), ("head", step.last)) if held}
    for prefix, recompute in recomputed.items():
        segment = SegmentRun(
            layout.tp,
            step.micro_batch,
            step.run.training.sequence,
            step.run.training.weights,
            recompute,
            expert=layout.ep,
        )
        costs = model.built.costs(prefix, segment)
        for dimension, kind, size in (*costs.forward_collectives, *costs.backward_collectives):
            what = f"{_words(prefix)}: {size:,} bytes"
            yield Collective(dimension, kind, ranks[dimension], step.micro_batches, size, what)


def _data(step: RankStep) -> Iterator[Collective]:
    """Gradients summed over replicas, and parameters gathered from their shards."""
    layout = step.layout
    for unit in step.units:
        copies, prefix = layout.dp * layout.cp, ""
        if unit.routed:
            copies, prefix = copies * layout.tp // layout.ep, "expert_"
        every = unit.uses * step.micro_batches
        name = _words(unit.name)
        gradient = f"gradients of {name}: {step.gradient} bytes × {unit.flat:,}"
        if layout.zero == 0:
            calls = min(every, 1)
            yield Collective(f"{prefix}data", "all-reduce", copies, calls, step.gradient * unit.flat, gradient)
            continue
        parameter = f"parameters of {name}: {step.element} bytes × {unit.flat:,}"
        summed = f"shards of {name}: {step.gradient} bytes × {unit.shard:,}"
        once = min(every, 1)
        scatters = every if layout.zero >= 2 else once
        gathers = 2 * every if layout.zero == 3 else once
        shard, wide, element = f"{prefix}shard", step.gradient, step.element
        fp8 = step.fp8_parts(unit)
        if fp8:
            element, parameter = 1, f"parameters of {name}: 1 bytes × {unit.flat:,}"
            told = len(fp8) + sum(part.size for part in unit.parts) - sum(part.size for part in fp8)
            scales = f"scales and 16-bit parameters of {name}: 4 bytes × {told:,}"
            yield Collective(shard, "all-reduce", unit.shards, once, 4 * told, scales)
        yield Collective(shard, "reduce-scatter", unit.shards, scatters, wide * unit.flat, gradient)
        yield Collective(shard, "all-gather", unit.shards, gathers, element * unit.flat, parameter)
        yield Collective(f"{prefix}replicate", "all-reduce", copies // unit.shards, once, wide * unit.shard, summed)


def _words(unit: str) -> str:
    """Layers are alike."""
    if unit.startswith("layers."):
        return "a layer's experts" if unit.endswith(EXPERTS) else "a layer"
    return "the token embedding" if unit == TIED else f"the {unit}"


def _ends(step: RankStep) -> Iterator[Collective]:
    """The embedding and the head, whose vocabulary is split over tensor ranks, and the loss over it."""
    layout, model = step.layout, step.model
    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter") if layout.sequence_parallel else ("all-reduce",)
    size = step.element * step.tokens * model.hidden
    activation = f"{step.element} bytes × {step.tokens:,} tokens × {model.hidden:,} hidden"
    predicted = step.last * model.prediction_layers  # each looks tokens up, and the head reads it
    heads = step.last + predicted
    for kind in kinds:
        for name, times in (("embedding", step.first + predicted), ("head", heads)):
            yield Collective("tp", kind, layout.tp, step.micro_batches * times, size, f"{name}: {activation}")
    for numbers, what in ((1, "largest logit"), (2, "sum and logit of the label")):
        calls, size = step.micro_batches * heads, numbers * step.wide * step.tokens
        formula = f"{what}: {numbers} × {step.wide} bytes × {step.tokens:,} tokens"
        yield Collective("tp", "all-reduce", layout.tp, calls, size, formula)


def _partial_gradients(step: RankStep) -> Iterator[Collective]:
    """Parameters held by several ranks that each see a part of what they do, and a tied embedding's two holders."""
    tp = step.layout.tp
    for sharing, dimension, ranks in (("tensor", "tp", tp), ("kv", "kv", tp // kv_part_count(step.model, tp))):
        held = 0
        for unit in step.units:
            for part in unit.parts:
                if part.slice.sharing == sharing and part.slice.partial_gradient:
                    stop = min(part.offset + part.size, unit.begin + unit.shard)
                    held += max(stop - max(part.offset, unit.begin), 0)
        what = f"gradients of what tensor ranks hold alike: {step.gradient} bytes × {held:,}"
        yield Collective(dimension, "all-reduce", ranks, int(held > 0), step.gradient * held, what)
    if embedding_is_shared(step.model) and step.first != step.last:
        for unit in step.units:
            if unit.name == TIED:
                what = f"gradient of the token embedding of two stages: {step.gradient} bytes × {unit.shard:,}"
                yield Collective("embedding", "all-reduce", 2, 1, step.gradient * unit.shard, what)


def _matrices(step: RankStep) -> Iterator[Collective]:
    """Muon's, on their way to where they are orthogonalised and back."""
    if not step.run.optimizer.is_muon:
        return
    element = ELEMENT[wire_precision(step.run)]
    for sent in sent_elements(step.run, step.rank):
        for elements, way in zip(sent, ("to their owners", "back from them"), strict=True):
            what = f"matrices {way}: {element} bytes × {elements:,}"
            yield Collective("stage", "all-to-all", stage_size(step.layout), 1, element * elements, what)
    model = step.model
    if step.run.optimizer.qk_clip:
        numbers = model.all_layers * (model.heads + (model.heads if model.latent is not None else model.kv_heads))
        what = f"largest norms of queries and keys: {step.wide} bytes × {numbers:,}"
        yield Collective("world", "all-reduce", step.layout.world_size, 1, step.wide * numbers, what)


def _pipeline(step: RankStep) -> Iterator[Collective]:
    """An activation to the next stage and a gradient to the one before, where these are on other ranks."""
    layout = step.layout

    def holder(stage: int) -> int:
        return min(stage, 2 * layout.pp - 1 - stage) if layout.schedule in V_SHAPED else stage % layout.pp

    neighbours = [stage + side for stage in step.stages for side in (1, -1) if 0 <= stage + side < layout.stages]
    away = sum(holder(stage) != step.place.pp for stage in neighbours)
    tokens = step.tokens // (layout.tp if layout.sequence_parallel else 1)
    numbers, what = tokens * step.model.hidden, f"{tokens:,} tokens × {step.model.hidden:,} hidden"
    if isinstance(step.model, PythonModelSpec):
        shapes = step.model.built.flow_shapes(step.micro_batch, step.run.training.sequence)
        numbers, what = sum(map(prod, shapes)), " + ".join(" × ".join(map(str, shape)) for shape in shapes)
    what = f"activations and gradients: {step.element} bytes × {what}"
    yield Collective("pp", "send", layout.pp, step.micro_batches * away, step.element * numbers, what)


def _control(step: RankStep) -> Iterator[Collective]:
    """What every rank must know: tokens with labels, loss, gradient norm, whether to stop, the size of activations, the
    z-loss, and the load of experts."""
    layout, mixture = step.layout, step.model.mixture
    depths = step.model.prediction_layers
    size = 8 * (1 + depths)
    yield Collective("data", "all-reduce", layout.dp * layout.cp, 1, size, f"tokens with labels: {size} bytes")
    numbers, apart = (5, ", z-loss") if step.run.training.z_loss else (4, "")
    numbers, apart = numbers + depths, apart + ", losses of prediction layers" * (depths > 0)
    what = f"loss{apart}, norm, whether to stop and size of activations: {numbers} × {step.wide} bytes"
    yield Collective("world", "all-reduce", layout.world_size, 1, numbers * step.wide, what)
    if mixture is not None:
        rows, columns = step.model.routed_layers, mixture.experts + ROUTER_SUMS
        what = f"statistics of routers: 8 bytes × {rows} layers × {columns}"
        yield Collective("world", "all-reduce", layout.world_size, 1, 8 * rows * columns, what)
