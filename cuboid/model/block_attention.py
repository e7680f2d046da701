"""Attention of a block of queries to a block of keys, with what is needed to put blocks together: the logarithm of the
sum of each query's exponentials, and a backward pass that takes this sum over all blocks.

Tensors are (sequences, length, heads, head_dim), sums (sequences, heads, length). Runs of query heads share a key-value
head. On CUDA in half precision this is the flash kernel; elsewhere plain matrix products, exact in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.documents import Documents


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """(what each query sees, log of its sum of exponentials). Without `causal` every query sees every key; with it
    there are as many keys as queries, and `documents` may divide them."""
    if has_flash(query):
        return _flash(query, key, value, causal, documents)
    scores = _scores(query, key, causal, documents)
    sums = scores.logsumexp(-1)
    seen = torch.einsum("bgrqk,bkgd->bqgrd", (scores - sums.unsqueeze(-1)).exp(), _wide(value))
    return seen.flatten(2, 3), sums.flatten(1, 2)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    sums: Tensor,
    causal: bool,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to the gradients of its queries, keys and values; `seen` and `sums` are over all blocks."""
    if has_flash(query):
        return _flash_backward(gradient, query, key, value, seen, sums, causal, documents)
    heads = key.shape[2]
    scores = _scores(query, key, causal, documents)
    weights = (scores - sums.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()
    gradient, seen = _grouped(gradient, heads), _grouped(seen, heads)
    value_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, gradient)
    whole = (gradient * seen).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    weights *= torch.einsum("bqgrd,bkgd->bgrqk", gradient, _wide(value)) - whole
    weights /= math.sqrt(query.shape[3])
    query_gradient = torch.einsum("bgrqk,bkgd->bqgrd", weights, _wide(key)).flatten(2, 3)
    key_gradient = torch.einsum("bgrqk,bqgrd->bkgd", weights, _grouped(query, heads))
    return query_gradient, key_gradient, value_gradient


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        seen, sums = attend(query, key, value, True, documents)
        context.save_for_backward(query, key, value, seen, sums)
        context.documents = documents
        return seen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, sums = context.saved_tensors
        return *attend_backward(gradient, query, key, value, seen, sums, True, context.documents), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def documents_mix(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside each document."""
    seen: Tensor = _Documents.apply(query, key, value, documents)
    return seen


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Query heads by the key-value head they read."""
    return _wide(x).unflatten(2, (heads, -1))


def _scores(query: Tensor, key: Tensor, causal: bool, documents: Documents | None) -> Tensor:
    """(sequences, key-value heads, query heads of each, queries, keys)."""
    scores = torch.einsum("bqgrd,bkgd->bgrqk", _grouped(query, key.shape[2]), _wide(key)) / math.sqrt(query.shape[3])
    if documents is not None:
        return scores.masked_fill_(~documents.mask(query.device).unsqueeze(1), -math.inf)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores


def has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    width = value.shape[3]
    packed, edges, longest = _packed(documents, query, key, functional.pad(value, (0, query.shape[3] - width)))
    lengths = (longest, longest) if edges is not None else (query.shape[1], key.shape[1])
    # The operation below `varlen_attn` and `scaled_dot_product_attention`: neither has a backward for outside sums.
    seen, sums, *_ = torch.ops.aten._flash_attention_forward(*packed, edges, edges, *lengths, 0.0, causal, False)
    if edges is not None:
        seen, sums = seen.view(query.shape), sums.unflatten(1, query.shape[:2]).transpose(0, 1)
    return seen[..., :width], sums


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    sums: Tensor,
    causal: bool,
    documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width, missing = value.shape[3], query.shape[3] - value.shape[3]
    wide = [functional.pad(x, (0, missing)) for x in (value, seen.to(query.dtype))]
    packed, edges, longest = _packed(documents, functional.pad(gradient, (0, missing)), query, key, *wide)
    lengths = (longest, longest) if edges is not None else (query.shape[1], key.shape[1])
    sums = sums.contiguous() if edges is None else sums.transpose(0, 1).flatten(1).contiguous()
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none
    gradients = torch.ops.aten._flash_attention_backward(
        *packed, sums, edges, edges, *lengths, 0.0, causal, random, torch.empty(0, device=query.device)
    )
    query_gradient, key_gradient, value_gradient = (
        part.view(like.shape[:3] + part.shape[-1:]) for part, like in zip(gradients, (query, key, value), strict=True)
    )
    return query_gradient, key_gradient, value_gradient[..., :width]


def _packed(documents: Documents | None, *tensors: Tensor) -> tuple[list[Tensor], Tensor | None, int]:
    """With documents, all sequences in one row with the edges of documents in it, and the longest document."""
    if documents is None:
        return [x.contiguous() for x in tensors], None, 0
    edges = documents.edges(tensors[0].device)
    return [x.flatten(0, 1).contiguous() for x in tensors], edges, max(documents.lengths)
