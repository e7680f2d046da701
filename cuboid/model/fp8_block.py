"""Matmuls in fp8 with scales of blocks: one for every 128 numbers of an input or a gradient along the dimension that
is summed over, one for every 128 × 128 of a weight. All are in e4m3.

What a matmul takes is a pair: `values` (rows, inner), row after row, `inner` filled up with zeros to whole blocks, and
`scales` as cuBLAS reads them: (inner / 128, rows) of 1 × 128, or (rows / 128, inner / 128, filled up to a multiple of
4) of 128 × 128. On a GPU a kernel reads each tensor once and writes what both of its matmuls need. Every operation is
one to the compiler. A CPU multiplies the same rounded numbers in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.kernels.compiler import operation
from cuboid.kernels.recompute import SAVED

BLOCK = 128
VALUES = torch.float8_e4m3fn
WARPS = 8
"""Of a kernel's program, which takes 128 × 128 numbers."""
_SMALLEST = 1e-30  # a block of zeros has a scale too
_MANTISSA, _LARGEST = 0x7FFFFF, 0x600000
"""Of a float's bits: all of the mantissa, and that of 448 = 1.75 × 2^8, the largest number of e4m3."""
_RANGE = 8


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def _whole(size: int) -> int:
    return blocks(size) * BLOCK


def _square_scales(rows: int, inner: int) -> tuple[int, int]:
    """The shape of the scales of 128 × 128: cuBLAS reads rows of whole 16 bytes."""
    return blocks(rows), -(-blocks(inner) // 4) * 4


def exponents_of(peak: Tensor) -> Tensor:
    """Exponents of the smallest powers of two that fit amaxes into e4m3, from the bits of the floats: no logarithm, so
    that every device finds the same."""
    bits = peak.float().clamp(min=_SMALLEST).view(torch.int32)
    return ((bits + (_MANTISSA - _LARGEST)) >> 23) - 127 - _RANGE


def _filled(x: Tensor, rows: bool = False) -> Tensor:
    """With zeros up to whole blocks of columns, and of rows too."""
    return functional.pad(x, (0, _whole(x.shape[1]) - x.shape[1], 0, _whole(x.shape[0]) - x.shape[0] if rows else 0))


def _rounded(x: Tensor, exponents: Tensor) -> Tensor:
    return (x.float() * torch.exp2(-exponents.float())).to(VALUES)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """In plain operations, 1 × 128."""
    tiles = _filled(x).unflatten(1, (-1, BLOCK))
    exponents = exponents_of(tiles.abs().amax(2))
    return _rounded(tiles, exponents.unsqueeze(2)).flatten(1).contiguous(), torch.exp2(
        exponents.t().float()
    ).contiguous()


def _squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """In plain operations, 128 × 128."""
    rows, inner = x.shape
    tiles = _filled(x, rows=True).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    exponents = exponents_of(tiles.abs().amax((1, 3)))
    values = _rounded(tiles, exponents[:, None, :, None]).flatten(2).flatten(0, 1)[:rows]
    scales = torch.zeros(_square_scales(rows, inner), device=x.device)
    scales[:, : blocks(inner)] = torch.exp2(exponents.float())
    return values.contiguous(), scales


def _launch(x: Tensor, rows: tuple[Tensor, Tensor] | None, columns: tuple[Tensor, Tensor] | None, square: bool) -> None:
    from cuboid.kernels.triton_fp8 import quantise_tiles

    x = x.contiguous()
    height, width = x.shape
    values, scales = rows or (x, x)
    transposed, transposed_scales = columns or (x, x)
    if x.numel():
        quantise_tiles[(blocks(width), blocks(height))](
            x,
            values,
            scales,
            transposed,
            transposed_scales,
            height,
            width,
            _whole(width),
            _whole(height),
            scales.shape[1],
            transposed_scales.shape[1],
            SQUARE=square,
            ROWS=rows is not None,
            COLUMNS=columns is not None,
            TILE=BLOCK,
            num_warps=WARPS,
        )


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = x.shape
    scales = x.new_empty(blocks(inner), rows, dtype=torch.float32)
    return x.new_empty(rows, _whole(inner), dtype=VALUES), scales


def _empty_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = x.shape
    shape = _square_scales(rows, inner)
    empty = x.new_empty if shape[1] == blocks(inner) else x.new_zeros  # what nothing writes to is read all the same
    return x.new_empty(rows, _whole(inner), dtype=VALUES), empty(shape, dtype=torch.float32)


@operation("cuboid::quantise_both")
def quantise_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of an input or a gradient: values and scales along its rows, and those of its transpose along tokens, which the
    weight gradient sums over."""
    if not x.is_cuda:
        return *_rows(x), *_rows(x.t())
    rows, columns = _empty_rows(x), _empty_rows(x.t())
    _launch(x, rows, columns, square=False)
    return *rows, *columns


@torch.library.register_fake("cuboid::quantise_both")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty_rows(x), *_empty_rows(x.t())


@operation("cuboid::quantise_weight")
def quantise_weight(weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Of a weight, or of its transpose: the same numbers, because blocks are square."""
    if not weight.is_cuda:
        return _squares(weight.t() if transposed else weight)
    made = _empty_squares(weight.t() if transposed else weight)
    _launch(weight, None if transposed else made, made if transposed else None, square=True)
    return made


@torch.library.register_fake("cuboid::quantise_weight")  # type: ignore[untyped-decorator]
def _(weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    return _empty_squares(weight.t() if transposed else weight)


def is_of_blocks(scales: Tensor) -> bool:
    """Not one for a tensor, nor a column of one for each row."""
    return scales.dim() == 2 and scales.shape[1] != 1


def _is_square(values: Tensor, scales: Tensor) -> bool:
    return scales.shape[1] != values.shape[0]


@operation("cuboid::block_matmul")
def block_matmul(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T. The scales of `a` are 1 × 128, those of `b` that or 128 × 128."""
    if not a.is_cuda:
        return (widened(a, a_scales) @ widened(b, b_scales).t()).to(dtype)
    kinds, columns = functional.ScalingType, b.shape[0]
    square = _is_square(b, b_scales)
    if square and columns % BLOCK:
        b = _filled_rows(b)
    y = functional.scaled_mm(
        a,
        b.t(),
        a_scales.t(),
        kinds.BlockWise1x128,
        b_scales.t(),
        kinds.BlockWise128x128 if square else kinds.BlockWise1x128,
        output_dtype=dtype,
    )
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


@torch.library.register_fake("cuboid::block_matmul")  # type: ignore[untyped-decorator]
def _(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


SAVED.add(block_matmul)


def _filled_rows(values: Tensor) -> Tensor:
    """cuBLAS multiplies whole squares only."""
    whole = values.new_zeros(_whole(values.shape[0]), values.shape[1])
    whole[: values.shape[0]] = values
    return whole


def widened(values: Tensor, scales: Tensor) -> Tensor:
    """In float32, exactly."""
    rows, inner = values.shape
    each = scales.t()
    if _is_square(values, scales):
        each = scales[:, : inner // BLOCK].repeat_interleave(BLOCK, 0)[:rows]
    return (values.float().unflatten(1, (-1, BLOCK)) * each.unsqueeze(2)).flatten(1)
