"""Wrong attention masks, and wrong orders of keys and values: each was a bug of context parallelism or of a kernel. A
hypothesis computes attention with one of them, from right queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cuboid.spec.run import Run
from cuboid.spec.sharding import places_of

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Of one sequence, (length, heads, head_dim) each; then its documents and the sinks, where there are some."""


@dataclass(frozen=True)
class Masked:
    mask: Tensor
    """(query, key): which keys are seen, within documents."""
    documents: bool = True
    sinks: bool = True
    shuffle: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    """Of keys and values."""
    cap: float = 0.0
    """Of scores; 0: none."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None, sinks: Tensor | None) -> Tensor:
        mask = self.mask.to(query.device)
        if self.documents and ids is not None:
            mask = mask & (ids.unsqueeze(1) == ids)
        return _attend(query, self.shuffle(key), self.shuffle(value), mask, sinks if self.sinks else None, self.cap)


def wrong_masks(run: Run, layer: int, cp: int, has_sinks: bool) -> Iterator[tuple[str, Attend]]:
    """The cause in words, and attention with that mask. `cp`: the context rank whose tokens are compared."""
    model, layout, length = run.model, run.layout, run.training.sequence
    window = model.window_of(layer)
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    causal = distance >= 0
    inside = causal & (distance < window) if window else causal
    masked = partial(Masked, cap=model.attention_softcap)
    if model.attention_softcap:
        yield "softcap ignored: scores are not capped", Masked(inside)
    if run.data.attention_within_documents:
        yield "documents ignored: tokens see those of documents before their own", masked(inside, documents=False)
    if window:
        yield "window ignored: every token before is seen", masked(causal)
        for off in (1, -1):
            cause = f"the window is {window + off} tokens in place of {window}"
            yield cause, masked(causal & (distance < window + off))
        yield "window and documents ignored", masked(causal, documents=False)
    if has_sinks:
        yield "sinks ignored", masked(inside, sinks=False)
    yield "mask ignored: tokens after are seen", masked(torch.ones_like(causal))
    yield "tokens do not see themselves: the mask is off by one", masked(inside & (distance > 0))
    yield "tokens see the one after them: the mask is off by one", masked(inside | (distance == -1))
    for count in range(2, model.heads // model.kv_heads + 1):
        if model.heads // model.kv_heads % count == 0:
            cause = "query heads read other key-value heads: these are repeated in another order"
            yield cause, masked(inside, shuffle=lambda x, count=count: x.repeat(1, count, 1))  # type: ignore[misc]
    if layout.cp > 1:
        yield from _of_chunks(layout.cp, cp, length, inside, masked)


def _of_chunks(
    size: int, cp: int, length: int, inside: Tensor, masked: Callable[..., Masked]
) -> Iterator[tuple[str, Attend]]:
    held = [[torch.tensor(part) for part in places_of(each, size, length)] for each in range(size)]
    holder = torch.zeros(length, dtype=torch.int64)
    for index, chunks in enumerate(held):
        holder[torch.cat(chunks)] = index
    by_half = torch.cat([chunks[half] for half in range(2) for chunks in held])
    for order in (by_half, torch.cat([torch.cat(chunks) for chunks in held])):
        cause = "keys and values of chunks of the sequence in the wrong order"
        yield cause, masked(inside, shuffle=lambda x, order=order: x[order.to(x.device)])
    cause = "only keys of the rank's own chunks are seen: those of other cp ranks are missing"
    yield cause, masked(inside & (holder == cp))
    for other in range(size):
        if other != cp:
            yield f"keys of cp rank {other} are missing", masked(inside & (holder != other))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, cap: float) -> Tensor:
    """Fewer key-value heads serve several query heads."""
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[2])
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        extra = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(), value)
