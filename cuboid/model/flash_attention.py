"""Blocks of attention by fused kernels of PyTorch, which never hold the matrix of scores: flash attention on CUDA in
half precision, its counterpart on the CPU in any.

These are the operations below `scaled_dot_product_attention` and `varlen_attn`, because neither of those has a backward
pass for sums over other blocks too. Shapes and arguments are those of `attend` below."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.compiler import uncompiled
from cuboid.kernels.precision import wide
from cuboid.model.batch import Documents

Gradients = tuple[Tensor, Tensor, Tensor]


class Attended(NamedTuple):
    """What a backward pass needs of the forward one."""

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    """What the queries saw in all blocks, this one and others."""
    sums: Tensor
    """The logarithms of their sums of exponentials, over all blocks too."""


def has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None, since: int | None
) -> tuple[Tensor, Tensor]:
    width, scale = value.shape[3], query.shape[3] ** -0.5
    packed, edges, longest = _packed(documents, *_padded(query, key, value))
    lengths = (longest, longest) if edges is not None else (query.shape[1], key.shape[1])
    seen, sums, *_ = torch.ops.aten._flash_attention_forward(
        *packed, edges, edges, *lengths, 0.0, causal, False, scale=scale, **_window(query, key, causal, since)
    )
    if edges is not None:
        seen, sums = seen.unflatten(0, query.shape[:2]), sums.unflatten(1, query.shape[:2]).transpose(0, 1)
    return seen[..., :width], sums


def cuda_backward(
    gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None, since: int | None
) -> Gradients:
    query, key, value, seen, sums = attended
    scale = query.shape[3] ** -0.5
    padded = _padded(gradient, query, key, value, seen.to(query.dtype))
    packed, edges, longest = _packed(documents, *padded)
    lengths = (longest, longest) if edges is not None else (query.shape[1], key.shape[1])
    sums = sums.contiguous() if edges is None else sums.transpose(0, 1).flatten(1).contiguous()
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none
    gradients = torch.ops.aten._flash_attention_backward(
        *packed,
        sums,
        edges,
        edges,
        *lengths,
        0.0,
        causal,
        random,
        torch.empty(0, device=query.device),
        scale=scale,
        **_window(query, key, causal, since),
    )
    query_gradient, key_gradient, value_gradient = (
        part.view(like.shape[:3] + part.shape[-1:])[..., : like.shape[3]]
        for part, like in zip(gradients, (query, key, value), strict=True)
    )
    return query_gradient, key_gradient, value_gradient


def _window(query: Tensor, key: Tensor, causal: bool, since: int | None) -> dict[str, int]:
    """The kernels align the last query with the last key, and count how far a query looks back from there."""
    if since is None:
        return {}
    back = key.shape[1] - query.shape[1] - since
    assert back >= 0, "a negative number would mean that there is no window"
    return {"window_size_left": back, "window_size_right": 0 if causal else -1}


def _padded(*tensors: Tensor) -> list[Tensor]:
    """All heads as wide as the widest, in steps of 8, as the kernels want them. Zeros change no score; what they add
    to outputs and gradients is cut off again."""
    width = -(-max(x.shape[3] for x in tensors) // 8) * 8
    return [functional.pad(x, (0, width - x.shape[3])) for x in tensors]


def _packed(documents: Documents | None, *tensors: Tensor) -> tuple[list[Tensor], Tensor | None, int]:
    """With documents, all sequences in one row with the edges of documents in it, and the longest document."""
    if documents is None:
        return [x.contiguous() for x in tensors], None, 0
    edges = documents.edges(tensors[0].device)
    return [x.flatten(0, 1).contiguous() for x in tensors], edges, max(documents.lengths)


def cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None, since: int | None
) -> tuple[Tensor, Tensor]:
    mask = _added(documents, query) if since is None else _added_band(query, key, causal, documents, since)
    seen, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_by_head(query, key, value), 0.0, causal and mask is None, attn_mask=mask
    )
    return seen.transpose(1, 2)[..., : value.shape[3]], sums


def cpu_backward(
    gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None, since: int | None
) -> Gradients:
    query, key, value, seen, sums = attended
    mask = _added(documents, query) if since is None else _added_band(query, key, causal, documents, since)
    missing, copies = query.shape[3] - value.shape[3], query.shape[2] // key.shape[2]
    outer = [functional.pad(x, (0, missing)).transpose(1, 2) for x in (gradient, seen.to(query.dtype))]
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        outer[0],
        *_by_head(query, key, value),
        outer[1],
        sums,
        0.0,
        causal and mask is None,
        attn_mask=mask,
    )
    query_gradient, *shared = (part.transpose(1, 2) for part in parts)
    if copies > 1:
        shared = [part.unflatten(2, (-1, copies)).sum(3) for part in shared]
    return query_gradient, shared[0], shared[1][..., : value.shape[3]]


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """As the kernel wants them: heads before tokens, as many and as wide for all three."""
    copies = query.shape[2] // key.shape[2]
    value = functional.pad(value, (0, query.shape[3] - value.shape[3]))
    shared = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (key, value))
    return [x.transpose(1, 2) for x in (query, *shared)]


def _added(documents: Documents | None, query: Tensor) -> Tensor | None:
    """The mask of documents as what is added to scores."""
    if documents is None:
        return None
    key = ("added", query.dtype)
    if key not in documents.kept:
        mask = documents.mask(query.device)
        documents.kept[key] = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    found: Tensor = documents.kept[key]
    return found


def _band(query: Tensor, key: Tensor, causal: bool, documents: Documents | None, since: int) -> Tensor:
    """(1 or sequences, 1, queries, keys): which keys a window, and documents, let each query see."""
    queries, keys = (torch.arange(x.shape[1], device=query.device) for x in (query, key))
    distance = keys - queries.unsqueeze(1)
    seen = distance >= since
    if causal:
        seen &= distance <= 0
    return seen[None, None] if documents is None else seen & documents.mask(query.device)


def _added_band(query: Tensor, key: Tensor, causal: bool, documents: Documents | None, since: int) -> Tensor:
    """The same as what is added to scores."""
    seen = _band(query, key, causal, documents, since)
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -math.inf)


# Attention of a block of queries to a block of keys, with what is needed to combine blocks: the logarithm of the
# sum of each query's exponentials, and a backward pass that takes this sum over all blocks.
#
# Tensors are (sequences, length, heads, head_dim), sums (sequences, heads, length). Runs of query heads read one
# key-value head. Fused kernels compute them where there are any, plain matmuls elsewhere (on CUDA in float32 or 64).


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    documents: Documents | None = None,
    since: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(what each query sees, log of its sum of exponentials). Without `causal` every query sees every key; with it
    there are as many keys as queries, and `documents` may divide them. `since`: of a window, query i sees no key before
    key i + since; each query sees at least one."""
    if has_flash(query):
        return cuda_forward(query, key, value, causal, documents, since)
    if not query.is_cuda:
        return cpu_forward(query, key, value, causal, documents, since)
    return plain_forward(query, key, value, causal, documents, since)


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None, since: int | None = None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, documents, since)
    sums = scores.logsumexp(-1)
    seen = torch.einsum("bgrqk,bkgd->bqgrd", (scores - sums.unsqueeze(-1)).exp(), _wide(value))
    return seen.flatten(2, 3), sums.flatten(1, 2)


def attend_backward(
    gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None = None, since: int | None = None
) -> Gradients:
    """What this block adds to the gradients of its queries, keys and values."""
    if has_flash(attended.query):
        return cuda_backward(gradient, attended, causal, documents, since)
    if not attended.query.is_cuda:
        return cpu_backward(gradient, attended, causal, documents, since)
    return plain_backward(gradient, attended, causal, documents, since)


def plain_backward(
    gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None, since: int | None = None
) -> Gradients:
    query, key, value, seen, sums = attended
    heads = key.shape[2]
    scores = _scores(query, key, causal, documents, since)
    weights = (scores - sums.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()
    gradient, seen = _grouped(gradient, heads), _grouped(seen, heads)
    value_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, gradient)
    whole = (gradient * seen).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    weights *= torch.einsum("bqgrd,bkgd->bgrqk", gradient, _wide(value)) - whole
    weights /= math.sqrt(query.shape[3])
    query_gradient = torch.einsum("bgrqk,bkgd->bqgrd", weights, _wide(key)).flatten(2, 3)
    key_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, _grouped(query, heads))
    return query_gradient, key_gradient, value_gradient


# Sinks: one more logit for each head, whose value is zero. A query sees less of everything else, by the part that the
# sink has of its sum of exponentials. With that sum and what is then seen, the backward pass of blocks is the same.


def add_sinks(seen: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`sinks`: (heads)."""
    total = torch.logaddexp(sums, _wide(sinks).unsqueeze(1).to(sums.dtype))
    kept = (sums - total).exp().transpose(1, 2).unsqueeze(3)
    return (seen * kept).to(seen.dtype), total


def sinks_gradient(gradient: Tensor, attended: Attended, sinks: Tensor) -> Tensor:
    """`attended`: with sinks."""
    whole = (_wide(gradient) * _wide(attended.seen)).sum(-1).transpose(1, 2)
    part = (_wide(sinks).unsqueeze(1).to(attended.sums.dtype) - attended.sums).exp()
    return -(part * whole).sum((0, 2)).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Documents | None,
        since: int | None,
    ) -> Tensor:
        seen, sums = attend(query, key, value, True, documents, since)
        if sinks is not None:
            seen, sums = add_sinks(seen, sums, sinks)
        context.save_for_backward(query, key, value, seen, sums, sinks)
        context.documents, context.since = documents, since
        return seen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = context.saved_tensors
        attended = Attended(*saved)
        parts = attend_backward(gradient, attended, True, context.documents, context.since)
        added = None if sinks is None else sinks_gradient(gradient, attended, sinks)
        return *parts, added, None, None


@uncompiled
def attention_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention, inside each document, in a window (0: in none), with sinks."""
    since = 1 - window if 0 < window < query.shape[1] else None
    seen: Tensor = _Attention.apply(query, key, value, sinks, documents, since)
    return seen


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Query heads by the key-value head they read."""
    return _wide(x).unflatten(2, (heads, -1))


def _scores(query: Tensor, key: Tensor, causal: bool, documents: Documents | None, since: int | None) -> Tensor:
    """(sequences, key-value heads, query heads of each, queries, keys)."""
    scores = torch.einsum("bqgrd,bkgd->bgrqk", _grouped(query, key.shape[2]), _wide(key)) / math.sqrt(query.shape[3])
    if since is not None:
        return scores.masked_fill_(~_band(query, key, causal, documents, since).unsqueeze(1), -math.inf)
    if documents is not None:
        return scores.masked_fill_(~documents.mask(query.device).unsqueeze(1), -math.inf)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores
