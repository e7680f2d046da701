"""Attention of a block of queries to a block of keys, with what is needed to put blocks together: the logarithm of the
sum of each query's exponentials, and a backward pass that takes this sum over all blocks.

Tensors are (sequences, length, heads, head_dim), sums (sequences, heads, length). Runs of query heads share a key-value
head. Fused kernels compute them where there are any, plain Matmuls elsewhere (on CUDA in float32 or 64)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import uncompiled
from cuboid.kernels.precision import wide
from cuboid.model.documents import Documents
from cuboid.model.fused_attention import (
    Attended,
    Gradients,
    cpu_backward,
    cpu_forward,
    cuda_backward,
    cuda_forward,
    has_flash,
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """(what each query sees, log of its sum of exponentials). Without `causal` every query sees every key; with it
    there are as many keys as queries, and `documents` may divide them."""
    if has_flash(query):
        return cuda_forward(query, key, value, causal, documents)
    if not query.is_cuda:
        return cpu_forward(query, key, value, causal, documents)
    return plain_forward(query, key, value, causal, documents)


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, documents)
    sums = scores.logsumexp(-1)
    seen = torch.einsum("bgrqk,bkgd->bqgrd", (scores - sums.unsqueeze(-1)).exp(), _wide(value))
    return seen.flatten(2, 3), sums.flatten(1, 2)


def attend_backward(
    gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None = None
) -> Gradients:
    """What this block adds to the gradients of its queries, keys and values."""
    if has_flash(attended.query):
        return cuda_backward(gradient, attended, causal, documents)
    if not attended.query.is_cuda:
        return cpu_backward(gradient, attended, causal, documents)
    return plain_backward(gradient, attended, causal, documents)


def plain_backward(gradient: Tensor, attended: Attended, causal: bool, documents: Documents | None) -> Gradients:
    query, key, value, seen, sums = attended
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
        return *attend_backward(gradient, Attended(*context.saved_tensors), True, context.documents), None


@uncompiled
def documents_mix(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside each document."""
    seen: Tensor = _Documents.apply(query, key, value, documents)
    return seen


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


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
