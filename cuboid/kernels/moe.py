"""Kernels around the experts' grouped matmuls on a GPU: combine, and SwiGLU between them.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def combine_rows(  # type: ignore[no-untyped-def]
    rows, home, weights, result, hidden, count, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """For each token the (weighted) sum of the rows of its experts. A row at `count` or behind was dropped."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(home + token * TOP_K + choice)
        row = tl.load(rows + place * hidden + column, mask=inside & (place < count), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * TOP_K + choice).to(tl.float32)
        total += row
    tl.store(result + token * hidden + column, total.to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def combine_gradients(  # type: ignore[no-untyped-def]
    gradient,
    rows,
    home,
    weights,
    row_gradient,
    weight_gradient,
    hidden,
    count,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each assignment of a token to an expert: the gradients of its row and of its weight. Both in one
    pass, because both read the token's gradient."""
    assignment = tl.program_id(0).to(tl.int64)
    token = assignment // TOP_K
    place = tl.load(home + assignment)
    kept = place < count
    weight = tl.load(weights + assignment).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        g = tl.load(gradient + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(rows + place * hidden + column, mask=inside & kept, other=0.0).to(tl.float32)
        total += g * row
        scaled = (g * weight).to(row_gradient.dtype.element_ty)
        tl.store(row_gradient + place * hidden + column, scaled, mask=inside & kept)
    tl.store(weight_gradient + assignment, tl.sum(total).to(weight_gradient.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu(gate, up, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + place, (g / (1.0 + tl.exp(-g)) * u).to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_gradients(gradient, gate, up, gate_gradient, up_gradient, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    d = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    kind = gate_gradient.dtype.element_ty
    tl.store(gate_gradient + place, (d * u * share * (1.0 + g * (1.0 - share))).to(kind), mask=inside)
    tl.store(up_gradient + place, (d * g * share).to(kind), mask=inside)
