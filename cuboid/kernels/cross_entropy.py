"""The kernel of `fused_cross_entropy` on a GPU: one program reads a row of logits twice and writes it once. It has few
operations for each number, because it waits for these as much as for memory.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

LOG2E = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two: a GPU has no others."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def loss_and_gradient(  # type: ignore[no-untyped-def]
    logits, labels, losses, columns, magnifier, IGNORED: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr
):
    """Logits of a row become the gradient of its loss, magnified. Sums are kept for each column of strips and joined at
    the end, because joining is what threads would wait for."""
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * columns
    offset = tl.arange(0, STRIPS)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    label = tl.load(labels + row)
    counted = label != IGNORED
    # Before the threads wait for one another, and so before any of them overwrites it.
    target = tl.load(place + tl.where(counted, label, 0)).to(tl.float32) * LOG2E
    peaks = tl.full((STRIP,), float("-inf"), tl.float32)
    sums = tl.zeros((STRIP,), tl.float32)
    for start in range(0, columns, STRIPS * STRIP):
        column = start + offset
        values = tl.load(place + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, tl.max(values, 0) * LOG2E)
        # Columns of strips that have met nothing yet have no peak to be beside.
        beside = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp2(peaks - beside) + tl.sum(tl.exp2(values * LOG2E - beside[None, :]), 0)
        peaks = higher
    peak = tl.max(peaks, 0)
    total = peak + tl.log2(tl.sum(sums * tl.exp2(peaks - peak), 0))
    tl.store(losses + row, tl.where(counted, (total - target) / LOG2E, 0.0))
    lowered = tl.where(counted, total - tl.log2(magnifier), float("inf"))
    last = tl.cdiv(columns, STRIPS * STRIP) - 1
    for step in range(last + 1):  # what was read last is nearest
        column = (last - step) * STRIPS * STRIP + offset
        inside = column < columns
        values = tl.load(place + column, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp2(values * LOG2E - lowered)
        tl.store(place + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the label's own is written twice
    gradient = tl.exp2(target - lowered) - magnifier
    tl.store(place + label, gradient.to(logits.dtype.element_ty), mask=counted)
