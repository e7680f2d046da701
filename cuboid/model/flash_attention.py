"""Blocks of attention by fused kernels of PyTorch, which never hold the matrix of scores: flash attention on CUDA in
half precision, its counterpart on the CPU in any.

These are the operations below `scaled_dot_product_attention` and `varlen_attn`, because neither of those has a backward
pass for sums over other blocks too. Shapes and arguments are those of `attend` below."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.model.batch import Edges

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
    query: Tensor, key: Tensor, value: Tensor, causal: bool, edges: Edges | None, since: int | None
) -> tuple[Tensor, Tensor]:
    width, scale = value.shape[3], query.shape[3] ** -0.5
    packed, bounds, lengths = _packed(edges, *_padded(query, key, value))
    seen, sums, *_ = torch.ops.aten._flash_attention_forward(
        *packed, bounds, bounds, *lengths, 0.0, causal, False, scale=scale, **_window(query, key, causal, since)
    )
    if edges is not None:
        seen, sums = seen.unflatten(0, query.shape[:2]), sums.unflatten(1, query.shape[:2]).transpose(0, 1)
    return seen[..., :width], sums


def cuda_backward(
    gradient: Tensor, attended: Attended, causal: bool, edges: Edges | None, since: int | None
) -> Gradients:
    query, key, value, seen, sums = attended
    scale = query.shape[3] ** -0.5
    padded = _padded(gradient, query, key, value, seen.to(query.dtype))
    packed, bounds, lengths = _packed(edges, *padded)
    sums = sums.contiguous() if edges is None else sums.transpose(0, 1).flatten(1).contiguous()
    gradients = torch.ops.aten._flash_attention_backward(
        *packed,
        sums,
        bounds,
        bounds,
        *lengths,
        0.0,
        causal,
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # of dropout, which there is none
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
    return [_widened(x, width) for x in tensors]


def _widened(x: Tensor, width: int) -> Tensor:
    # Padding by nothing would copy.
    return x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))


def _packed(edges: Edges | None, *tensors: Tensor) -> tuple[list[Tensor], Tensor | None, tuple[int, int]]:
    """The tensors, the edges of documents in them, and the longest run of queries and of keys. With documents all
    sequences are one row. `tensors`: keys are the last but one."""
    if edges is None:
        return [x.contiguous() for x in tensors], None, (tensors[-3].shape[1], tensors[-2].shape[1])
    documents, longest = edges.sizes.tolist()
    # The kernel is started for the documents that there are and for the longest, not for those there might be.
    return [x.flatten(0, 1).contiguous() for x in tensors], edges.places[: documents + 1], (longest, longest)


def cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, edges: Edges | None, since: int | None
) -> tuple[Tensor, Tensor]:
    if edges is None:
        mask = None if since is None else _added(_band(query, key, causal, since), query)
        return _cpu_forward(query, key, value, causal, mask)
    rows = [x.flatten(0, 1).unsqueeze(0) for x in (query, key, value)]
    seen = query.new_empty(*query.shape[:3], value.shape[3])
    sums = query.new_empty(query.shape[2], *query.shape[:2], dtype=wide(query.dtype))
    for here, mask in _runs(edges, since, query):
        queries, keys, values = (x[:, here] for x in rows)
        part, part_sums = _cpu_forward(queries, keys, values, True, mask)
        seen.flatten(0, 1)[here] = part[0]
        sums.flatten(1)[:, here] = part_sums[0]
    return seen, sums.transpose(0, 1)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    seen, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_by_head(query, key, value), 0.0, causal and mask is None, attn_mask=mask
    )
    return seen.transpose(1, 2)[..., : value.shape[3]], sums


def cpu_backward(
    gradient: Tensor, attended: Attended, causal: bool, edges: Edges | None, since: int | None
) -> Gradients:
    query, key, value, seen, sums = attended
    if edges is None:
        mask = None if since is None else _added(_band(query, key, causal, since), query)
        return _cpu_backward(gradient, attended, causal, mask)
    rows = [x.flatten(0, 1).unsqueeze(0) for x in (gradient, query, key, value, seen)]
    row_sums = sums.transpose(0, 1).flatten(1).unsqueeze(0)
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for here, mask in _runs(edges, since, query):
        outer, queries, keys, values, there = (x[:, here] for x in rows)
        found = _cpu_backward(outer, Attended(queries, keys, values, there, row_sums[:, :, here]), True, mask)
        for whole, part in zip(gradients, found, strict=True):
            whole.flatten(0, 1)[here] = part[0]
    return gradients


def _cpu_backward(gradient: Tensor, attended: Attended, causal: bool, mask: Tensor | None) -> Gradients:
    query, key, value, seen, sums = attended
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
    value = _widened(value, query.shape[3])
    shared = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (key, value))
    return [x.transpose(1, 2) for x in (query, *shared)]


TOGETHER = 128
"""Tokens of short documents that are computed at once, under a mask: a call takes as long as these do."""


def _runs(edges: Edges, since: int | None, query: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
    """Of all sequences in one row: a document, or several short ones, and what is added to its scores where the kernel
    does not know by itself whom a query sees."""
    documents, _ = edges.sizes.tolist()
    places = edges.places[: documents + 1].tolist()
    first = 0
    while first < documents:
        last = first + 1
        while last < documents and places[last + 1] - places[first] <= TOGETHER:
            last += 1
        here = slice(places[first], places[last])
        mask = None
        if last - first > 1 or since is not None:
            lengths = torch.tensor(places[first : last + 1]).diff()
            ids = torch.arange(last - first).repeat_interleave(lengths).unsqueeze(0)
            mask = _added(_within(ids, since), query)
        yield here, mask
        first = last


def _within(ids: Tensor, since: int | None) -> Tensor:
    """(sequences, 1, length, length): which keys each query sees in its own document, and in a window."""
    seen = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()
    return (seen if since is None else seen.triu(since)).unsqueeze(1)


def _band(query: Tensor, key: Tensor, causal: bool, since: int) -> Tensor:
    """(1, 1, queries, keys): which keys a window lets each query see."""
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(since)
    return (seen.tril() if causal else seen)[None, None]


def _added(seen: Tensor, query: Tensor) -> Tensor:
    """The same as what is added to scores."""
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
    edges: Edges | None = None,
    since: int | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(what each query sees, log of its sum of exponentials). Without `causal` every query sees every key; with it
    there are as many keys as queries, and documents may divide them, whose `edges` these are. `since`: of a window,
    query i sees no key before key i + since; each query sees at least one. `cap`: scores become
    cap · tanh(scores / cap), which no fused kernel of PyTorch computes; 0: they do not."""
    if cap:
        return plain_forward(query, key, value, causal, edges, since, cap)
    if has_flash(query):
        return cuda_forward(query, key, value, causal, edges, since)
    if not query.is_cuda:
        return cpu_forward(query, key, value, causal, edges, since)
    return plain_forward(query, key, value, causal, edges, since)


def plain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    edges: Edges | None,
    since: int | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, edges, since, cap)
    sums = scores.logsumexp(-1)
    seen = torch.einsum("bgrqk,bkgd->bqgrd", (scores - sums.unsqueeze(-1)).exp(), _wide(value))
    return seen.flatten(2, 3), sums.flatten(1, 2)


def attend_backward(
    gradient: Tensor,
    attended: Attended,
    causal: bool,
    edges: Edges | None = None,
    since: int | None = None,
    cap: float = 0.0,
) -> Gradients:
    """What this block adds to the gradients of its queries, keys and values."""
    if cap:
        return plain_backward(gradient, attended, causal, edges, since, cap)
    if has_flash(attended.query):
        return cuda_backward(gradient, attended, causal, edges, since)
    if not attended.query.is_cuda:
        return cpu_backward(gradient, attended, causal, edges, since)
    return plain_backward(gradient, attended, causal, edges, since)


def plain_backward(
    gradient: Tensor,
    attended: Attended,
    causal: bool,
    edges: Edges | None,
    since: int | None = None,
    cap: float = 0.0,
) -> Gradients:
    query, key, value, seen, sums = attended
    heads = key.shape[2]
    scores = _scores(query, key, causal, edges, since, cap)
    weights = (scores - sums.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()
    gradient, seen = _grouped(gradient, heads), _grouped(seen, heads)
    value_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, gradient)
    whole = (gradient * seen).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    weights *= torch.einsum("bqgrd,bkgd->bgrqk", gradient, _wide(value)) - whole
    if cap:  # the slope of tanh; of hidden keys, whose scores are infinite, the weight is zero already
        weights *= 1 - (scores / cap).clamp_(-1, 1).square_()
    weights /= math.sqrt(query.shape[3])
    query_gradient = torch.einsum("bgrqk,bkgd->bqgrd", weights, _wide(key)).flatten(2, 3)
    key_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, _grouped(query, heads))
    return query_gradient, key_gradient, value_gradient


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Query heads by the key-value head they read."""
    return _wide(x).unflatten(2, (heads, -1))


def _scores(query: Tensor, key: Tensor, causal: bool, edges: Edges | None, since: int | None, cap: float) -> Tensor:
    """(sequences, key-value heads, query heads of each, queries, keys)."""
    scores = torch.einsum("bqgrd,bkgd->bgrqk", _grouped(query, key.shape[2]), _wide(key)) / math.sqrt(query.shape[3])
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if edges is not None:
        hidden = ~_within(_ids(edges, query), since).unsqueeze(1)
    elif since is not None:
        hidden = ~_band(query, key, causal, since)
    elif causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    else:
        return scores
    return scores.masked_fill_(hidden, -math.inf)


def _ids(edges: Edges, query: Tensor) -> Tensor:
    """(sequences, length): which document each token belongs to."""
    tokens = torch.arange(query.shape[0] * query.shape[1], dtype=torch.int32, device=query.device)
    return torch.bucketize(tokens, edges.places[1:], right=True).view(query.shape[:2])
