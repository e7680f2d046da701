"""What is fused in a compiled block: QKV and gate-up, RoPE behind QKV, and the residual add with RMSNorm.

Fused QKV and fused gate-up are one matmul in place of several of the same input, where their weights lie side by side
in a unit's flat buffer. One large matmul fills a GPU better, and no kernel adds the input gradients afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.compiler import operation
from cuboid.kernels.precision import wide
from cuboid.model.attention import Attention
from cuboid.model.feed_forward import FeedForward, swiglu
from cuboid.model.fp8 import Fp8Matmul, input_gradient_of, multiply, output_of
from cuboid.model.fp8_block import BLOCK as SQUARE
from cuboid.model.linear import Linear, Norm
from cuboid.model.rope import Positions, rotated
from cuboid.model.split_backward import Deferral, split_fused_matmul
from cuboid.parallel.tensor_region import Region, fused_columns
from cuboid.parallel.zero import Unit

BLOCK = 4096


@operation("cuboid::swiglu_backward")
def swiglu_backward(gradient: Tensor, fused: Tensor) -> Tensor:
    """`fused`: in each row all gates and then all ups. One operation, because the compiler would write gates and ups
    apart and put them together afterwards."""
    if not fused.is_cuda or wide(fused.dtype) != torch.float32:
        gate, up = fused.chunk(2, 1)
        exact = gate.to(wide(gate.dtype))
        sigmoid = exact.sigmoid()
        gate_gradient = (gradient * up).to(exact.dtype) * sigmoid * (1 + exact * (1 - sigmoid))
        return torch.cat((gate_gradient.to(gate.dtype), gradient * (exact * sigmoid).to(gate.dtype)), 1)
    from cuboid.kernels.triton_kernels import swiglu_backward_rows

    rows, width = gradient.shape
    result = torch.empty_like(fused)
    grid = (rows, -(-width // BLOCK))
    swiglu_backward_rows[grid](gradient.contiguous(), fused, result, width, BLOCK=BLOCK, num_warps=8)
    return result


@torch.library.register_fake("cuboid::swiglu_backward")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, fused: Tensor) -> Tensor:
    return torch.empty_like(fused)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, fused: Tensor) -> Tensor:
        context.save_for_backward(fused)
        gate, up = fused.chunk(2, 1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (fused,) = context.saved_tensors
        result: Tensor = swiglu_backward(gradient, fused)
        return result


class _FusedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, *held: Tensor) -> Tensor:
        """`held`: the stacked weight, then its parts; their gradients are rows of one tensor. One varargs, because
        under no_grad Dynamo guesses from the number of arguments whether forward takes a context."""
        fused, *weights = held
        context.save_for_backward(x, fused)
        context.rows = [weight.shape[0] for weight in weights]
        return x @ fused.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, fused = context.saved_tensors
        return gradient @ fused, None, *(gradient.t() @ x).split(context.rows)


class _FusedFp8Matmul(torch.autograd.Function):
    """`_FusedMatmul` in fp8 with scales of blocks."""

    @staticmethod
    def forward(context: Any, x: Tensor, *held: Tensor) -> Tensor:
        fused, *weights = held
        y, columns, scales = output_of(x, fused, "block")
        context.save_for_backward(columns, scales, fused)
        context.rows = [weight.shape[0] for weight in weights]
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scales, fused = context.saved_tensors
        input_gradient, *transposed = input_gradient_of(gradient, fused, "block")
        own = multiply(transposed[0], transposed[1], columns, scales, fused.dtype, fast=False)
        return input_gradient, None, *own.split(context.rows)


def fuse_matmuls(
    module: nn.Module, unit: Unit, rotates: bool, deferral: Deferral | None = None, region: Region | None = None
) -> None:
    """Fuse what can be fused of a block whose parameters are the unit's. `rotates`: positions are rotations.
    `deferral`: of a schedule that splits the backward pass. `region`: of tensor ranks."""
    for child in module.modules():
        # A norm would come between matmul and rotation.
        if isinstance(child, Attention) and rotates and child.query_norm is None:
            _fuse_attention(child, unit, deferral, region)
        if isinstance(child, FeedForward) and child.gate is not None and child.gating is swiglu:
            _fuse_feed_forward(child, child.gate, unit, deferral, region)


def _fuse_attention(attention: Attention, unit: Unit, deferral: Deferral | None, region: Region | None) -> None:
    linears = [attention.query, attention.key, attention.value]
    fused = _fused_matmul(linears, unit, deferral, region)
    if fused is None:
        return
    heads, kv_heads, _ = (linear.weight.shape[0] // attention.head_dim for linear in linears)

    def project(x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = FusedRope.apply(fused(x), *positions.rotation(attention.window > 0), heads, kv_heads)
        return query, key, value

    attention.fused = project


def _fuse_feed_forward(
    feed_forward: FeedForward, gate: Linear, unit: Unit, deferral: Deferral | None, region: Region | None
) -> None:
    fused = _fused_matmul([gate, feed_forward.up], unit, deferral, region)
    if fused is not None:
        feed_forward.fused = lambda x: _Swiglu.apply(fused(x))


def _fused_matmul(
    linears: Sequence[Linear], unit: Unit, deferral: Deferral | None, region: Region | None
) -> Callable[[Tensor], Tensor] | None:
    """The matmul with several linears."""
    weights = [linear.weight for linear in linears]
    kind = linears[0].matmul
    fp8 = kind.scaling if isinstance(kind, Fp8Matmul) else None
    # A square of a scale never reaches from one weight into the next: the numbers are those of each weight by itself.
    # What overlaps with collectives in fp8 is fused otherwise (`tensor_region`).
    apart = any(weight.shape[0] % SQUARE for weight in weights) or (region is not None and region.overlaps)
    plain = kind is functional.linear or (fp8 == "block" and not apart)
    plain = plain and all(linear.matmul == kind and linear.bias is None for linear in linears)
    # A view of the unit's buffer (sum of outs, in), not a copy: ZeRO 3 frees and gathers it with the rest.
    together = unit.side_by_side(weights) if plain else None
    if together is None:
        return None
    if region is not None and region.overlaps:
        return lambda x: fused_columns(region, x, together, weights)

    def matmul(x: Tensor) -> Tensor:
        y: Tensor = (_FusedMatmul if fp8 is None else _FusedFp8Matmul).apply(x, together, *weights)
        return y

    made = matmul if deferral is None else split_fused_matmul(weights, together, deferral, fp8)
    return made if region is None else lambda x: made(region.enter(x))


# RoPE on the output of a fused QKV matmul: queries and keys are rotated in place of it, values pass through.


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
    from cuboid.kernels.triton_kernels import rotate_back_rows

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


# RMSNorm whose backward pass also adds the gradient of the residual stream. One custom operation: Inductor would split
# it into slower kernels.


MEMBERS = 16384
"""How many numbers a program of the kernel takes at a time, at most four rows."""


@operation("cuboid::norm_backward")
def norm_backward(
    gradient: Tensor, stream: Tensor, x: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`stream`: the gradient that comes back beside the norm. `inverse`: what rows were multiplied by. Returns the
    gradient of `x`, and that of the weight in parts that are still to be summed."""
    if not x.is_cuda:
        exact, normed = gradient.to(inverse.dtype), x.to(inverse.dtype) * inverse
        scaled = exact * weight
        # d(x · r) / dx with r = rsqrt(mean x²): the part of the gradient along x itself is taken out.
        along = (scaled * normed).mean(1, keepdim=True)
        result = stream + (inverse * (scaled - normed * along)).to(x.dtype)
        return result, (exact * normed).sum(0, keepdim=True)
    from cuboid.kernels.triton_kernels import norm_backward_rows

    x = x.contiguous()
    rows, columns = x.shape
    width, tile, each = _division(x)
    result, sums = torch.empty_like(x), _empty_sums(x, inverse)
    norm_backward_rows[(sums.shape[0],)](
        gradient.contiguous(),
        stream.contiguous(),
        x,
        inverse,
        weight,
        result,
        sums,
        rows,
        columns,
        each,
        TILE=tile,
        WIDTH=width,
        num_warps=8 if width <= 2048 else 16,
    )
    return result, sums


@torch.library.register_fake("cuboid::norm_backward")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, stream: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _empty_sums(x, inverse)


def _division(x: Tensor) -> tuple[int, int, int]:
    """Columns, made even; rows that a program takes at a time; all rows that it takes."""
    rows, columns = x.shape
    width = 1 << (columns - 1).bit_length()
    tile = min(4, max(1, MEMBERS // width))
    return width, tile, -(-rows // (2 * _multiprocessors(x.device) * tile)) * tile


def _empty_sums(x: Tensor, inverse: Tensor) -> Tensor:
    rows, columns = x.shape
    programs = -(-rows // _division(x)[2]) if x.is_cuda else 1
    return inverse.new_empty(programs, columns)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _FusedAddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        # In three dimensions: a sum in two the compiler would put into the matmul that it comes of, which then copies
        # the stream first.
        stream = x.view_as(x) if added is None else (x.unsqueeze(0) + added.unsqueeze(0)).squeeze(0)
        exact = stream.float()
        inverse = torch.rsqrt(exact.pow(2).mean(1, keepdim=True) + epsilon)
        context.save_for_backward(stream, inverse, weight)
        context.fused = added is not None
        return stream, (exact * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(context: Any, stream: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, weight = context.saved_tensors
        # The gradient of the residual stream is added in the same pass over memory; both summands have one gradient.
        result, sums = norm_backward(gradient, stream, x, inverse, weight)
        return result, result if context.fused else None, sums.sum(0).to(weight.dtype), None


def fused_add_norm(norm: Norm, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `transformer.add_norm`, of an RMS norm in float32 or less."""
    stream, normed = _FusedAddRmsNorm.apply(x, added, norm.factor, norm.epsilon)
    return stream, normed
