"""RoPE on the output of a fused QKV matmul: queries and keys are rotated in place of it, values pass through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.compiler import operation
from cuboid.kernels.precision import wide
from cuboid.model.rope import rotated


@operation("cuboid::rotate_back")
def rotate_back(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """From gradients of the three to that of what they came out of. One operation, because the compiler would ask for
    every number in which of the three it lies."""
    fused = _empty(query, key)
    if not fused.is_cuda or wide(fused.dtype) != torch.float32:
        back = []
        for gradient in (query, key):
            first, second = (gradient * sine).chunk(2, -1)
            back.append(gradient * cosine + torch.cat((second, -first), -1))
        return torch.cat([each.reshape(fused.shape[0], -1) for each in (*back, value)], 1)
    from cuboid.kernels.rope import rotate_back_rows

    heads, kv_heads, size = query.shape[2], key.shape[2], query.shape[3]
    rotate_back_rows[(fused.shape[0],)](
        *(each.contiguous() for each in (query, key, value, cosine, sine)),
        fused,
        cosine.numel() // size,
        heads,
        kv_heads,
        size // 2,
        HEADS=_padded(heads),
        KV_HEADS=_padded(kv_heads),
        HALF=_padded(size // 2),
        WIDTH=_padded(kv_heads * size),
        num_warps=4,
    )
    return fused


@torch.library.register_fake("cuboid::rotate_back")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return _empty(query, key)


def _empty(query: Tensor, key: Tensor) -> Tensor:
    sequences, length, heads, size = query.shape
    return query.new_empty(sequences * length, (heads + 2 * key.shape[2]) * size)


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


class FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, fused: Tensor, cosine: Tensor, sine: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`fused`: a row a token. The three are (sequences, length, heads, head_dim)."""
        context.save_for_backward(cosine, sine)
        _, length, _, size = cosine.shape
        parts = fused.split([heads * size, kv_heads * size, kv_heads * size], 1)
        query, key, value = (part.view(-1, length, part.shape[1] // size, size) for part in parts)
        # Values too in memory of their own: attention keeps them, and would keep all of the matmul with them.
        return rotated(query, cosine, sine), rotated(key, cosine, sine), value.contiguous()

    @staticmethod
    def backward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = context.saved_tensors
        return rotate_back(query, key, value, cosine, sine), None, None, None, None
