"""The backward pass of an RMS norm on a GPU, added to what comes back beside the norm.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def norm_backward_rows(  # type: ignore[no-untyped-def]
    gradient,
    stream,
    source,
    inverse,
    weight,
    result,
    sums,
    rows,
    columns,
    each,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program takes `each` rows, TILE at a time, and sums the weight's gradient over them in its registers."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for step in range(0, each, TILE):
        row = program * each + step + tl.arange(0, TILE)
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        held = (row < rows)[:, None] & inside[None, :]
        x = tl.load(source + place, mask=held, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, mask=held, other=0.0).to(tl.float32)
        other = tl.load(stream + place, mask=held, other=0.0).to(tl.float32)
        factor = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normed = x * factor
        total += tl.sum(g * normed, 0)
        scaled = g * scale[None, :]
        along = tl.sum(scaled * normed, 1)[:, None] / columns
        tl.store(result + place, (other + factor * (scaled - normed * along)).to(result.dtype.element_ty), mask=held)
    tl.store(sums + program.to(tl.int64) * columns + column, total, mask=inside)
