"""Fused QKV and fused gate-up: one matmul in place of several of the same input, where their weights lie side by side
in a unit's flat buffer. One large matmul fills a GPU better, and no kernel adds the input gradients afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.compiler import operation
from cuboid.kernels.precision import wide
from cuboid.model.attention import Attention
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import Linear
from cuboid.model.rope import Positions
from cuboid.parallel.columns import joined_columns
from cuboid.parallel.compiled_split_backward import split_fused_matmul
from cuboid.parallel.fused_rope import FusedRope
from cuboid.parallel.split_backward import Deferral
from cuboid.parallel.tensor_region import Region
from cuboid.parallel.zero import Unit

BLOCK = 4096


@operation("cuboid::swiglu_backward")
def swiglu_backward(gradient: Tensor, fused: Tensor) -> Tensor:
    """`fused`: in each row all gates and then all ups. One operation, because the compiler would write gates and ups
    apart and put them together afterwards."""
    if not fused.is_cuda or wide(fused.dtype) != torch.float32:
        gate, up = fused.chunk(2, 1)
        exact = gate.to(wide(gate.dtype))
        share = exact.sigmoid()
        gate_gradient = (gradient * up).to(exact.dtype) * share * (1 + exact * (1 - share))
        return torch.cat((gate_gradient.to(gate.dtype), gradient * (exact * share).to(gate.dtype)), 1)
    from cuboid.kernels.swiglu import swiglu_backward_rows

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


def fuse_matmuls(
    module: nn.Module, unit: Unit, rotates: bool, deferral: Deferral | None = None, region: Region | None = None
) -> None:
    """Join what can be of a block whose parameters are the unit's. `rotates`: positions are rotations. `deferral`: of a
    schedule that splits the backward pass. `region`: of tensor ranks."""
    for child in module.modules():
        # A norm would come between matmul and rotation.
        if isinstance(child, Attention) and rotates and child.query_norm is None:
            _join_attention(child, unit, deferral, region)
        if isinstance(child, FeedForward) and child.gate is not None:
            _join_feed_forward(child, child.gate, unit, deferral, region)


def _join_attention(attention: Attention, unit: Unit, deferral: Deferral | None, region: Region | None) -> None:
    linears = [attention.query, attention.key, attention.value]
    fused = _joined(linears, unit, deferral, region)
    if fused is None:
        return
    heads, kv_heads, _ = (linear.weight.shape[0] // attention.head_dim for linear in linears)

    def project(x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = FusedRope.apply(fused(x), positions.cosine, positions.sine, heads, kv_heads)
        return query, key, value

    attention.fused = project


def _join_feed_forward(
    feed_forward: FeedForward, gate: Linear, unit: Unit, deferral: Deferral | None, region: Region | None
) -> None:
    fused = _joined([gate, feed_forward.up], unit, deferral, region)
    if fused is not None:
        feed_forward.fused = lambda x: _Swiglu.apply(fused(x))


def _joined(
    linears: list[Linear], unit: Unit, deferral: Deferral | None, region: Region | None
) -> Callable[[Tensor], Tensor] | None:
    """The matmul with several linears."""
    weights = [linear.weight for linear in linears]
    plain = all(linear.matmul is functional.linear and linear.bias is None for linear in linears)
    together = unit.side_by_side(weights) if plain else None
    if together is None:
        return None
    if region is not None and region.overlaps:
        return lambda x: joined_columns(region, x, together, weights)

    def matmul(x: Tensor) -> Tensor:
        y: Tensor = _FusedMatmul.apply(x, together, *weights)
        return y

    made = matmul if deferral is None else split_fused_matmul(weights, together, deferral)
    return made if region is None else lambda x: made(region.enter(x))
