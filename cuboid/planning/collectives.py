"""Every collective of a step as the engine makes it: what the ranks of each dimension send one another, to the byte.

The engine counts the same while it trains (`cuboid train --count-communication`), and the tests hold the two equal.
Two things are not known beforehand: how routing spreads rows over the ranks of an expert group, which is why a rank's
rows count whole and where they are routed; and which of them find no room under a capacity factor, for which all count.
"""

from __future__ import annotations

from collections.abc import Iterator

from cuboid.planning.layer_collectives import LayerExchanges
from cuboid.planning.rank_step import Collective, RankStep
from cuboid.spec.layout import V_SHAPED
from cuboid.spec.run import Run
from cuboid.spec.sharding import EXPERTS, TIED, kv_part_count
from cuboid.telemetry.communication_ledger import Kind, Ledger, differences

ROUTER_SUMS = 3
"""Numbers that a layer's router statistics hold beside the load of each expert."""


def predicted_ledger(run: Run, rank: int) -> Ledger:
    """What a rank communicates in a step, as the engine's own ledger will say."""
    ledger = Ledger()
    for exchange in exchanges(run, rank):
        ledger.add(exchange.dimension, exchange.kind, exchange.ranks, exchange.size, exchange.calls)
    return ledger


def unforeseen(run: Run, rank: int, counted: Ledger) -> list[str]:
    """Where what a rank exchanged is not what was predicted, one sentence each."""
    predicted = predicted_ledger(run, rank)
    if run.model.mixture is not None and run.model.mixture.capacity_factor:
        seen, most = (ledger.entries.get(("ep", "all-to-all")) for ledger in (counted, predicted))
        if seen and most and seen.calls == most.calls and seen.bytes <= most.bytes:
            predicted.entries["ep", "all-to-all"] = seen
    return differences(counted, predicted)


def exchanges(run: Run, rank: int) -> list[Collective]:
    """All of a step; those that do not happen are omitted."""
    step = RankStep(run, rank)
    made = (
        *(
            exchange
            for routed in ((False, True) if run.model.mixture is not None else (False,))
            for recompute in dict.fromkeys(step.recompute.values())
            for exchange in LayerExchanges(step, routed, recompute).all()
        ),
        *_ends(step),
        *_data(step),
        *_partial_gradients(step),
        *_pipeline(step),
        *_control(step),
    )
    return [exchange for exchange in made if exchange.ranks > 1 and exchange.calls]


def _data(step: RankStep) -> Iterator[Collective]:
    """Gradients summed over replicas, and parameters gathered from their shards."""
    layout = step.layout
    for unit in step.units:
        copies, prefix = layout.dp * layout.cp, ""
        if unit.routed:
            copies, prefix = copies * layout.tp // layout.ep, "expert_"
        every = unit.uses * step.micro_batches
        name = _words(unit.name)
        gradient = f"gradients of {name}: {step.wide} bytes × {unit.flat:,}"
        if layout.zero == 0:
            calls = min(every, 1)
            yield Collective(f"{prefix}data", "all-reduce", copies, calls, step.wide * unit.flat, gradient)
            continue
        parameter = f"parameters of {name}: {step.element} bytes × {unit.flat:,}"
        summed = f"shards of {name}: {step.wide} bytes × {unit.shard:,}"
        once = min(every, 1)
        scatters = every if layout.zero >= 2 else once
        gathers = 2 * every if layout.zero == 3 else once
        shard, wide, element = f"{prefix}shard", step.wide, step.element
        narrow = step.narrow_parts(unit)
        if narrow:
            element, parameter = 1, f"parameters of {name}: 1 bytes × {unit.flat:,}"
            told = len(narrow) + sum(part.size for part in unit.parts) - sum(part.size for part in narrow)
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
    for kind in kinds:
        for name, held in (("embedding", step.first), ("head", step.last)):
            yield Collective("tp", kind, layout.tp, step.micro_batches * held, size, f"{name}: {activation}")
    for numbers, what in ((1, "largest logit"), (2, "sum and logit of the label")):
        calls, size = step.micro_batches * step.last, numbers * step.wide * step.tokens
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
        what = f"gradients of what tensor ranks hold alike: {step.wide} bytes × {held:,}"
        yield Collective(dimension, "all-reduce", ranks, int(held > 0), step.wide * held, what)
    if step.model.tie_embeddings and step.first != step.last:
        for unit in step.units:
            if unit.name == TIED:
                what = f"gradient of the tied embedding: {step.wide} bytes × {unit.shard:,}"
                yield Collective("embedding", "all-reduce", 2, 1, step.wide * unit.shard, what)


def _pipeline(step: RankStep) -> Iterator[Collective]:
    """An activation to the next stage and a gradient to the one before, where these are on other ranks."""
    layout = step.layout

    def holder(stage: int) -> int:
        return min(stage, 2 * layout.pp - 1 - stage) if layout.schedule in V_SHAPED else stage % layout.pp

    neighbours = [stage + side for stage in step.stages for side in (1, -1) if 0 <= stage + side < layout.stages]
    away = sum(holder(stage) != step.place.pp for stage in neighbours)
    tokens = step.tokens // (layout.tp if layout.sequence_parallel else 1)
    what = f"activations and gradients: {step.element} bytes × {tokens:,} tokens × {step.model.hidden:,} hidden"
    calls, size = step.micro_batches * away, step.element * tokens * step.model.hidden
    yield Collective("pp", "send", layout.pp, calls, size, what)


def _control(step: RankStep) -> Iterator[Collective]:
    """What every rank must know: labelled tokens, loss, gradient norm, whether to stop, the size of activations, and
    the load of experts."""
    layout, mixture = step.layout, step.model.mixture
    yield Collective("data", "all-reduce", layout.dp * layout.cp, 1, 8, "labelled tokens: 8 bytes")
    what = f"loss, norm, whether to stop and size of activations: 4 × {step.wide} bytes"
    yield Collective("world", "all-reduce", layout.world_size, 1, 4 * step.wide, what)
    if mixture is not None:
        rows, columns = step.model.layers - mixture.first_dense_layers, mixture.experts + ROUTER_SUMS
        what = f"statistics of routers: 8 bytes × {rows} layers × {columns}"
        yield Collective("world", "all-reduce", layout.world_size, 1, 8 * rows * columns, what)
