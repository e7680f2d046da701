"""One process that rounds its sums as NCCL does between tensor ranks.

NCCL adds the messages of a sum hop by hop, each time in the precision of the message: a sum of bf16 over n ranks is
rounded n - 1 times in a ring. Shared memory and gloo add in float32 and round once. The sums of 16 bits in a layout are
those of tensor parallelism: the result of a matmul whose input columns are split, and the input gradient of one whose
output rows are. Here one process computes both in as many parts as there are ranks, and adds these one after another in
16 bits. A ring rounds most often; a tree, or a switch that adds by itself, less.

Gradients of weights are summed in float32. Those of keys and values, which context parallelism sums in 16 bits on any
backend, are two of the dozen tensors that a block rounds in its backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.model.linear import Linear, Matmul
from cuboid.model.transformer import Transformer
from cuboid.spec.sharding import slice_of


def sum_hop_by_hop(model: Transformer, ranks: int) -> None:
    """Let the model compute in parts, as `ranks` tensor ranks do."""
    for name, child in model.named_modules():
        if isinstance(child, Linear):
            cut = slice_of(f"{name}.weight", tuple(child.weight.shape), model.model, ranks, 0, False)
            if cut.sharing != "tensor":  # of which every rank has the whole
                in_parts = _output_rows if cut.dimension == 0 else _input_columns
                child.matmul = in_parts(child.matmul, cut.length)


def _output_rows(matmul: Matmul, length: int) -> Matmul:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.view_as(x)  # where autograd adds the gradients of the parts, in their order and precision
        rows = weight.split(length)
        biases = bias.split(length) if bias is not None else [None] * len(rows)
        return torch.cat([matmul(x, *part) for part in zip(rows, biases, strict=True)], dim=-1)

    return multiply


def _input_columns(matmul: Matmul, length: int) -> Matmul:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(x.split(length, dim=-1), weight.split(length, dim=1), strict=True)
        first, *others = (matmul(part, columns, None) for part, columns in parts)
        for other in others:
            first = first + other
        return first if bias is None else first + bias

    return multiply
