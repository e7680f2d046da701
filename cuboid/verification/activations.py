"""The first activation, or gradient of one, that is wrong in the recorded step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cuboid.spec.sharding import places_of
from cuboid.training.checks.words import UNKNOWN, Hypothesis, Located
from cuboid.verification.causes import activation_cause, first_cause
from cuboid.verification.evidence import Error, Evidence, Seen
from cuboid.verification.record import PARTS
from cuboid.verification.sums import wrong_weight_gradient


def first_activation(evidence: Evidence) -> Located | None:
    for name in evidence.names:
        found = _first_of(evidence, "forward", name)
        if found is None:
            continue
        rank, micro_batch, seen, error = found
        cause = _attention_cause(evidence, name, rank, micro_batch, seen) if name.endswith(".mixed") else ""
        cause = cause or activation_cause(evidence, "forward", name, rank, micro_batch, seen)
        if name in ("embedding", "embedding.positions"):
            cause = _position_cause(evidence, rank, micro_batch, seen) or cause
        if cause.startswith(UNKNOWN):
            cause = _deduced(evidence, name) or cause
        module = _inside(name)
        return Located(
            name, module, "forward", evidence.step + 1, micro_batch + 1, rank, error.error, error.allowed, cause
        )
    return None


def first_gradient(evidence: Evidence) -> Located | None:
    """A gradient is made by what comes after: that module is named."""
    order = [name for name in evidence.names if name != "head"]
    groups = _beside(order)
    for index in reversed(range(len(groups))):
        worst = None
        for name in groups[index]:
            found = _first_of(evidence, "gradient", name)
            if found is not None and (worst is None or found[3].error > worst[1][3].error):
                worst = name, found
        if worst is None:
            continue
        name, (rank, micro_batch, seen, error) = worst
        cause = activation_cause(evidence, "gradient", name, rank, micro_batch, seen)
        if cause.startswith(UNKNOWN) and name.endswith("feed_forward_norm"):
            cause = _only_through_router(evidence, name) or cause
        if cause.startswith(UNKNOWN) and name == "head.output":
            cause = "logits are right and the gradient of their loss is not: labels of other tokens, or a mask of them"
        consumer = groups[index + 1][0] if index + 1 < len(groups) else "head"
        if name.rpartition(".")[2] in PARTS[:3] and cause.startswith(UNKNOWN):
            cause = _backward_of_attention(evidence, name, rank, micro_batch, seen) or cause
        where = _inside(consumer) if name.rpartition(".")[2] != "mixed" else _inside(name)
        if consumer.rpartition(".")[2] in PARTS[:3]:
            where = _inside(consumer)
        told = error.error, error.allowed, cause
        return Located(f"gradient of {name}", where, "input gradient", evidence.step + 1, micro_batch + 1, rank, *told)
    return None


def _beside(order: list[str]) -> list[list[str]]:
    """Names in order; queries, keys and values come from one input side by side."""
    groups: list[list[str]] = []
    for name in order:
        last = groups[-1][0] if groups else ""
        if name.rpartition(".")[2] in PARTS[1:3] and last.rpartition(".")[2] == PARTS[0]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _inside(name: str) -> str:
    """The module: attention, of what enters or leaves its inner part."""
    path, _, last = name.rpartition(".")
    return path if last in PARTS and path.endswith("attention") else name


def _first_of(evidence: Evidence, kind: str, name: str) -> tuple[int, int, Seen, Error] | None:
    """The first micro-batch and rank where it is wrong; of one micro-batch, the rank where it is most wrong."""
    found: dict[int, tuple[int, int, Seen, Error]] = {}
    for rank, micro_batch, seen in evidence.all_seen(kind, name):
        error = evidence.error(seen, kind, name)
        if error.is_wrong and (micro_batch not in found or error.error > 1.001 * found[micro_batch][3].error):
            found[micro_batch] = rank, micro_batch, seen, error
    return found[min(found)] if found else None


def _deduced(evidence: Evidence, name: str) -> str:
    """From what is right before it."""
    if name.endswith("feed_forward") and f"{name}.router" in evidence.names:
        return "the router's weights are right: what experts made comes back to other rows (dispatch), or from others"
    if name.endswith("feed_forward.router"):
        told = "other experts are chosen, or weighted otherwise, for the same input"
        mixture = evidence.run.model.mixture
        return f"{told}: the router's noise has another seed" if mixture and mixture.router_noise else told
    return ""


def _only_through_router(evidence: Evidence, name: str) -> str:
    """What enters a mixture gets its gradient from experts and from the router, whose weights alone are then wrong."""
    prefix = name.removesuffix("feed_forward_norm") + "feed_forward"
    names = [each for each in evidence.traces[0].gradients[evidence.step] if each.startswith(f"{prefix}.experts.")]
    if not names or any(wrong_weight_gradient(evidence, each) is not None for each in names):
        return ""
    return "only what comes back through the router is wrong: auxiliary losses, their factor or their statistics"


# What attention saw, computed again from right queries, keys and values under other masks.


def _attention_cause(evidence: Evidence, name: str, rank: int, micro_batch: int, seen: Seen) -> str:
    return first_cause(_masks(evidence, name, rank, micro_batch), seen, evidence, "forward")


def _masks(evidence: Evidence, name: str, rank: int, micro_batch: int) -> Iterator[Hypothesis]:
    prefix = name.removesuffix(".mixed")
    run, place, length = evidence.run, evidence.place(rank), evidence.run.training.sequence
    layer = int(prefix.split(".")[1])
    window = run.model.window_of(layer)
    samples = list(evidence.sample_places(place.dp, micro_batch))
    notes = evidence.samples[0].notes.forward
    source = evidence.source
    own = torch.cat([torch.arange(part.start, part.stop) for part in places_of(place.cp, run.layout.cp, length)])
    is_own = torch.zeros(length, dtype=torch.bool)
    is_own[own] = True
    holder = torch.zeros(length, dtype=torch.int64)
    for index in range(run.layout.cp):
        for part in places_of(index, run.layout.cp, length):
            holder[part.start : part.stop] = index
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    causal = distance >= 0
    sinks = evidence.before(evidence.traces[0], evidence.step).get(f"{prefix}.sinks")

    def seen_with(
        documents: bool, mask: Tensor, with_sinks: bool = True, shuffle: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        made = []
        for sample in samples:
            allowed = mask
            if documents and run.data.attention_within_documents:
                ids = source.documents_at(sample)
                allowed = mask & (ids.unsqueeze(1) == ids)
            parts = [notes[f"{prefix}.{part}", sample][0].double() for part in PARTS[:3]]
            if shuffle is not None:
                parts = [parts[0], shuffle(parts[1]), shuffle(parts[2])]
            drawn = sinks.double() if sinks is not None and with_sinks else None
            made.append(_attend(parts[0], parts[1], parts[2], allowed, drawn)[own])
        mixed = torch.cat(made)
        heads = mixed.shape[1]
        return mixed.chunk(run.layout.tp, 1)[place.tp] if run.layout.tp > 1 and heads > 1 else mixed

    inside = causal & (distance < window) if window else causal

    def shuffled(shuffle: Callable[[Tensor], Tensor]) -> Tensor:
        """With keys and values in another order."""
        return seen_with(True, inside, shuffle=shuffle)

    if run.data.attention_within_documents:
        yield "documents ignored: tokens see those of documents before their own", lambda: seen_with(False, inside)
    if window:
        yield "window ignored: every token before is seen", lambda: seen_with(True, causal)
        for off in (1, -1):
            yield (
                f"the window is {window + off} tokens in place of {window}",
                lambda off=off: seen_with(True, causal & (distance < window + off)),  # type: ignore[misc]
            )
        yield "window and documents ignored", lambda: seen_with(False, causal)
    if sinks is not None:
        yield "sinks ignored", lambda: seen_with(True, inside, with_sinks=False)
    yield "mask ignored: tokens after are seen", lambda: seen_with(True, torch.ones_like(causal))
    yield "tokens do not see themselves: the mask is off by one", lambda: seen_with(True, inside & (distance > 0))
    heads, kv_heads = (notes[f"{prefix}.{part}", samples[0]].shape[2] for part in PARTS[:2])
    if kv_heads < heads:
        copies = heads // kv_heads
        told = "query heads read other key-value heads: these are repeated in another order"
        for count in range(2, copies + 1):
            if copies % count == 0:
                yield told, lambda count=count: shuffled(lambda x: x.repeat(1, count, 1))  # type: ignore[misc]
    if run.layout.cp > 1:
        size = run.layout.cp
        held = [[torch.tensor(part) for part in places_of(each, size, length)] for each in range(size)]
        by_half = torch.cat([chunks[half] for half in range(2) for chunks in held])
        for order in (by_half, torch.cat([torch.cat(chunks) for chunks in held])):
            told = "keys and values of chunks of the sequence in the wrong order"
            yield told, lambda order=order: shuffled(lambda x: x[order])  # type: ignore[misc]
        yield (
            "only keys of the rank's own chunks are seen: those of other cp ranks are missing",
            lambda: seen_with(True, inside & is_own),
        )
        for other in range(run.layout.cp):
            if other != place.cp:
                yield (
                    f"keys of cp rank {other} are missing",
                    lambda other=other: seen_with(True, inside & (holder != other)),  # type: ignore[misc]
                )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """(length, heads, head_dim) each; fewer key-value heads serve several query heads."""
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[2])
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        extra = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(), value)


def _backward_of_attention(evidence: Evidence, name: str, rank: int, micro_batch: int, seen: Seen) -> str:
    """The forward pass and the gradient that came are right, and what attention made of that is not."""
    part = name.rpartition(".")[2]
    if evidence.run.layout.cp > 1 and part in ("key", "value"):
        return f"the parts that other cp ranks computed of the gradient of each {part} do not add up to it"
    return f"attention's own backward pass: its {part} gradients differ though what came in is right"


def _position_cause(evidence: Evidence, rank: int, micro_batch: int, seen: Seen) -> str:
    """Rows of learned positions that belong to other places."""
    table = evidence.before(evidence.traces[0], evidence.step).get("embedding.positions.weight")
    if table is None or seen.observed.ndim != 2:
        return ""
    place, layout, length = evidence.place(rank), evidence.run.layout, evidence.run.training.sequence
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in places_of(place.cp, layout.cp, length)])
    difference = seen.observed - seen.right
    rows = table[:length].double()
    # What was added in place of what should have been: the row nearest to it, whichever place the token has.
    apart = difference.unsqueeze(1) - (rows.unsqueeze(0) - rows.unsqueeze(1)).flatten(0, 1).unsqueeze(0)
    nearest = apart.square().sum(-1).amin(1)
    explained = float(nearest.sum()) <= (1e-8 if not evidence.is_rounded else 0.1) * float(difference.square().sum())
    return "positions of other tokens, such as another chunk of the sequence" if explained and len(tokens) else ""
