"""Triton kernels that round to fp8 with a scale for each block of 128 numbers.

Imported where there is a GPU only, as `triton_kernels`."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def power_of_two(peak, LARGEST: tl.constexpr = 0x600000, RANGE: tl.constexpr = 8):  # type: ignore[no-untyped-def]
    """The scale of an amax and its inverse, from the bits of the float: `fp8_block.exponents_of`."""
    bits = tl.maximum(peak, 1e-30).to(tl.int32, bitcast=True)
    exponent = ((bits + (0x7FFFFF - LARGEST)) >> 23) - 127 - RANGE
    return (
        ((exponent + 127) << 23).to(tl.float32, bitcast=True),
        ((127 - exponent) << 23).to(tl.float32, bitcast=True),
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def quantise_tiles(  # type: ignore[no-untyped-def]
    source,
    values,
    scales,
    transposed,
    transposed_scales,
    rows,
    columns,
    width,
    height,
    across,
    down,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a tile of TILE × TILE: read once, written as it is (`values`, rows of `width`), as its transpose
    (`transposed`, rows of `height`), or both. Its scales: one (SQUARE; `across` and `down` scales lie in a row of
    `scales` and of `transposed_scales`), or one for each of its rows and one for each of its columns."""
    block_row, block_column = tl.program_id(1), tl.program_id(0)
    row = block_row.to(tl.int64) * TILE + tl.arange(0, TILE)
    column = block_column.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(tile)
    kind = tl.float8e4nv
    if SQUARE:
        scale, inverse = power_of_two(tl.max(tl.max(size, 1), 0))
        rounded = (tile * inverse).to(kind)
        if ROWS:
            tl.store(values + row[:, None] * width + column[None, :], rounded, mask=(row < rows)[:, None])
            tl.store(scales + block_row * across + block_column, scale)
        if COLUMNS:
            place = transposed + column[:, None] * height + row[None, :]
            tl.store(place, tl.trans(rounded), mask=(column < columns)[:, None])
            tl.store(transposed_scales + block_column * down + block_row, scale)
    else:
        if ROWS:
            scale, inverse = power_of_two(tl.max(size, 1))
            rounded = (tile * inverse[:, None]).to(kind)
            tl.store(values + row[:, None] * width + column[None, :], rounded, mask=(row < rows)[:, None])
            tl.store(scales + block_column.to(tl.int64) * rows + row, scale, mask=row < rows)
        if COLUMNS:
            scale, inverse = power_of_two(tl.max(size, 0))
            rounded = (tile * inverse[None, :]).to(kind)
            place = transposed + column[:, None] * height + row[None, :]
            tl.store(place, tl.trans(rounded), mask=(column < columns)[:, None])
            tl.store(transposed_scales + block_row.to(tl.int64) * columns + column, scale, mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def quantise_long_rows(  # type: ignore[no-untyped-def]
    source, values, scales, columns, high, spread, first, BLOCK: tl.constexpr
):
    """One program a row, which has one scale; BLOCK holds all of it. Of matrices of `high` rows each, row `first` of
    one is written `spread` rows behind row `first` of the one before."""
    row = tl.program_id(0).to(tl.int64)
    place = row // high * spread + first + row % high
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(source + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = power_of_two(tl.max(tl.abs(x), 0))
    tl.store(values + place * columns + column, (x * inverse).to(tl.float8e4nv), mask=inside)
    tl.store(scales + place, scale)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def quantise_transposes(  # type: ignore[no-untyped-def]
    source, transposed, largest, rows, columns, length, first, TALL: tl.constexpr, WIDE: tl.constexpr
):
    """Of matrices one behind the other, each with one scale (`largest`): the transpose of each. Its rows begin at
    column `first` of rows of `length`."""
    matrix = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    read = source + matrix * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    tile = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    rounded = (tile * (1.0 / tl.load(largest + matrix))).to(tl.float8e4nv)
    place = transposed + matrix * columns * length + column.to(tl.int64)[:, None] * length + first + row[None, :]
    tl.store(place, tl.trans(rounded), mask=(column < columns)[:, None] & (row < rows)[None, :])


# Of experts: what makes rows in 16 bits makes them in fp8 too. A row has one scale, and BLOCK holds all of it.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def permute_rounded(  # type: ignore[no-untyped-def]
    source, home, rows, values, scales, columns, count, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token, whose row goes to each of its places. One at `count` or behind was dropped."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(source + token * columns + column, mask=inside, other=0.0)
    scale, inverse = power_of_two(tl.max(tl.abs(x.to(tl.float32)), 0))
    rounded = (x.to(tl.float32) * inverse).to(tl.float8e4nv)
    for choice in tl.static_range(TOP_K):
        place = tl.load(home + token * TOP_K + choice)
        kept = place < count
        tl.store(rows + place * columns + column, x, mask=inside & kept)
        tl.store(values + place * columns + column, rounded, mask=inside & kept)
        tl.store(scales + place, scale, mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def combine_gradients_rounded(  # type: ignore[no-untyped-def]
    gradient,
    rows,
    home,
    weights,
    row_gradient,
    weight_gradient,
    values,
    scales,
    columns,
    count,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `triton_kernels.combine_gradients`; one program a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gradient + token * columns + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(g), 0)
    kind = row_gradient.dtype.element_ty
    for choice in tl.static_range(TOP_K):
        place = tl.load(home + token * TOP_K + choice)
        kept = place < count
        weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
        row = tl.load(rows + place * columns + column, mask=inside & kept, other=0.0).to(tl.float32)
        found = tl.sum(g * row, 0)
        tl.store(weight_gradient + token * TOP_K + choice, found.to(weight_gradient.dtype.element_ty))
        scaled = (g * weight).to(kind)
        # Rounding keeps order, so the largest is still the largest.
        scale, inverse = power_of_two((peak * tl.abs(weight)).to(kind).to(tl.float32))
        tl.store(row_gradient + place * columns + column, scaled, mask=inside & kept)
        rounded = (scaled.to(tl.float32) * inverse).to(tl.float8e4nv)
        tl.store(values + place * columns + column, rounded, mask=inside & kept)
        tl.store(scales + place, scale, mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_rounded(  # type: ignore[no-untyped-def]
    fused, result, values, scales, rows, width, TALL: tl.constexpr, BLOCK: tl.constexpr
):
    """`fused`: rows of gates and then ups, `width` each. One program TALL rows."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    read = fused + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
    g = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(read + width, mask=inside, other=0.0).to(tl.float32)
    y = (g / (1.0 + tl.exp(-g)) * u).to(result.dtype.element_ty)
    scale, inverse = power_of_two(tl.max(tl.abs(y.to(tl.float32)), 1))
    tl.store(result + place, y, mask=inside)
    tl.store(values + place, (y.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_gradients_rounded(  # type: ignore[no-untyped-def]
    gradient, fused, result, values, scales, rows, width, TALL: tl.constexpr, BLOCK: tl.constexpr
):
    """`fused`, `result` and `values` as in `swiglu_rounded`: a row has one scale for both halves."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
    d = tl.load(gradient + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(fused + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(fused + place + width, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    kind = result.dtype.element_ty
    left = (d * u * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(kind)
    right = (d * g * sigmoid).to(kind)
    largest = tl.maximum(tl.abs(left.to(tl.float32)), tl.abs(right.to(tl.float32)))
    scale, inverse = power_of_two(tl.max(largest, 1))
    tl.store(result + place, left, mask=inside)
    tl.store(result + place + width, right, mask=inside)
    tl.store(values + place, (left.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(values + place + width, (right.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)
