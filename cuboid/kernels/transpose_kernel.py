"""The kernel of `transpose` on a GPU: square tiles through registers, so that both reading and writing go along rows.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def transpose_tiles(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))
