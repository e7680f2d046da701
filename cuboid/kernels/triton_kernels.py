"""The Triton kernels: what Inductor does not fuse, or fuses into slower ones.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from triton.language.extra import libdevice  # type: ignore[import-not-found,unused-ignore]

# Fused cross-entropy (`parallel.cross_entropy`): one program reads a row of logits twice and writes it once. It
# has few operations for each number, because it waits for these as much as for memory.

LOG2E = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two: a GPU has no others."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def loss_and_gradient(  # type: ignore[no-untyped-def]
    logits,
    labels,
    losses,
    squares,
    columns,
    magnifier,
    coefficient,
    IGNORED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    STRIPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Logits of a row become the gradient of its loss and z-loss, magnified. Sums are kept for each column of strips
    and added at the end, because joining is what threads would wait for."""
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
    growth = 1.0
    if Z_LOSS:
        logarithm = total / LOG2E
        tl.store(squares + row, tl.where(counted, logarithm * logarithm, 0.0))
        growth = 1.0 + 2.0 * coefficient * logarithm
    last = tl.cdiv(columns, STRIPS * STRIP) - 1
    for step in range(last + 1):  # what was read last is nearest
        column = (last - step) * STRIPS * STRIP + offset
        inside = column < columns
        values = tl.load(place + column, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp2(values * LOG2E - lowered)
        if Z_LOSS:
            gradient = gradient * growth
        tl.store(place + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the label's own is written twice
    gradient = tl.exp2(target - lowered) * growth - magnifier
    tl.store(place + label, gradient.to(logits.dtype.element_ty), mask=counted)


# Kernels of MoE on a GPU: noise of routers, and around the experts' grouped matmuls combine and SwiGLU.

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
"""Those of `model.initialize.hashed`."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def gumbel(  # type: ignore[no-untyped-def]
    places, offset, result, count, key, scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """As `model.load_balancing.Balance.noise`. With the exact logarithm: that of the hardware is wrong near 1."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(places + index // EXPERTS, mask=inside, other=0) * EXPERTS + index % EXPERTS
    bits = (place + (tl.load(offset) << 34)).to(tl.uint64) * GOLDEN + key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * FIRST
    bits = (bits ^ (bits >> 27)) * SECOND
    bits = (bits ^ (bits >> 31)) >> 41
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23
    tl.store(result + index, -scale * libdevice.log(-libdevice.log(uniform)), mask=inside)


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
def swiglu(gate, up, result, count, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of `gate` and `up` are WIDTH long and begin STRIDE apart."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    apart = place // WIDTH * STRIDE + place % WIDTH
    g = tl.load(gate + apart, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + apart, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + place, (g / (1.0 + tl.exp(-g)) * u).to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_gradients(  # type: ignore[no-untyped-def]
    gradient,
    gate,
    up,
    gate_gradient,
    up_gradient,
    count,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `swiglu`; so are the gradients."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    apart = place // WIDTH * STRIDE + place % WIDTH
    d = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + apart, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + apart, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    kind = gate_gradient.dtype.element_ty
    tl.store(gate_gradient + apart, (d * u * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(kind), mask=inside)
    tl.store(up_gradient + apart, (d * g * sigmoid).to(kind), mask=inside)


# Where rows stand in the order of their experts. A stable sort would give the same in a dozen launches, which the host
# takes longer to start than the device to run.

TILE = 16384
"""Comparisons of a program at once."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def count_by_block(chosen, counts, total, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """counts: (EXPERTS, blocks), how many of a block's assignments each expert has."""
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    wanted = tl.load(chosen + place, mask=place < total, other=-1)
    found = tl.sum((wanted[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert * blocks + block, found)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def place_by_expert(  # type: ignore[no-untyped-def]
    chosen,
    ends,
    order,
    home,
    counts,
    total,
    blocks,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ends: the running sum of what `count_by_block` found, expert by expert."""
    block = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    place = block * BLOCK + index
    inside = place < total
    wanted = tl.load(chosen + place, mask=inside, other=-1)
    before = wanted * blocks + block - 1
    first = tl.load(ends + before, mask=inside & (before >= 0), other=0)
    same = (wanted[:, None] == wanted[None, :]) & (index[None, :] < index[:, None])
    row = first + tl.sum(same.to(tl.int32), 1)
    tl.store(home + place, row.to(tl.int64), mask=inside)
    tl.store(order + row, place.to(tl.int64), mask=inside)
    if block == 0:
        expert = tl.arange(0, EXPERTS)
        held = expert < experts
        end = tl.load(ends + (expert + 1) * blocks - 1, mask=held, other=0)
        start = tl.load(ends + expert * blocks - 1, mask=held & (expert > 0), other=0)
        tl.store(counts + expert, (end - start).to(tl.int64), mask=held)


def order_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stable order of assignments by expert, its inverse, and how many each of the experts has. Numbers beyond
    `experts` by one stand for none and come last."""
    total, width = chosen.numel(), triton.next_power_of_2(experts + 1)
    block = min(128, TILE // width)
    blocks = triton.cdiv(total, block)
    found = chosen.new_empty(width * blocks, dtype=torch.int32)
    count_by_block[(blocks,)](chosen, found, total, blocks, EXPERTS=width, BLOCK=block)
    order, home, counts = torch.empty_like(chosen), torch.empty_like(chosen), chosen.new_empty(experts)
    ends = found.cumsum(0, dtype=torch.int32)
    place_by_expert[(blocks,)](chosen, ends, order, home, counts, total, blocks, experts, EXPERTS=width, BLOCK=block)
    return order, home, counts


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def place_arrivals(  # type: ignore[no-untyped-def]
    arriving, order, inverse, segments, experts, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for the rows of one rank for one expert."""
    segment = tl.program_id(0)
    rank, expert = segment // experts, segment % experts
    other = tl.arange(0, SEGMENTS)
    counts = tl.load(arriving + other, mask=other < segments, other=0)
    source = tl.sum(tl.where(other < segment, counts, 0), 0)
    earlier = (other % experts < expert) | ((other % experts == expert) & (other // experts < rank))
    target = tl.sum(tl.where(earlier, counts, 0), 0)
    many = tl.sum(tl.where(other == segment, counts, 0), 0)
    start = 0
    while start < many:
        row = start + tl.arange(0, BLOCK)
        inside = row < many
        tl.store(order + target + row, source + row, mask=inside)
        tl.store(inverse + source + row, target + row, mask=inside)
        start += BLOCK


def order_arrivals(arriving: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """From the order of (ranks, experts) to that of (experts, ranks), and its inverse, of as many rows."""
    order, inverse = arriving.new_empty(rows), arriving.new_empty(rows)
    segments = arriving.numel()
    place_arrivals[(segments,)](
        arriving.contiguous(),
        order,
        inverse,
        segments,
        arriving.shape[1],
        SEGMENTS=triton.next_power_of_2(segments),
        BLOCK=1024,
    )
    return order, inverse


# The backward pass of an RMS norm on a GPU, added to what comes back beside the norm.


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


# The backward pass of rotations by position on a GPU, from queries, keys and values to one row of all heads.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate_back(  # type: ignore[no-untyped-def]
    source, target, cosine, sine, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """One token's heads. Numbers half a head apart are a pair."""
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    held = pair < half
    inside = (head < heads) & held
    place = head * 2 * half + pair
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + place + half, mask=inside, other=0.0).to(tl.float32)
    early_cosine = tl.load(cosine + pair, mask=held, other=0.0).to(tl.float32)
    late_cosine = tl.load(cosine + half + pair, mask=held, other=0.0).to(tl.float32)
    early_sine = tl.load(sine + pair, mask=held, other=0.0).to(tl.float32)
    late_sine = tl.load(sine + half + pair, mask=held, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + place, (first * early_cosine + second * late_sine).to(kind), mask=inside)
    tl.store(target + place + half, (second * late_cosine - first * early_sine).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def rotate_back_rows(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cosine,
    sine,
    fused,
    places,
    heads,
    kv_heads,
    half,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a token. `places`: how many the tables have; tokens beyond begin anew."""
    row = tl.program_id(0).to(tl.int64)
    table = row % places * 2 * half
    width, kv_width = heads * 2 * half, kv_heads * 2 * half
    fused += row * (width + 2 * kv_width)
    _rotate_back(query + row * width, fused, cosine + table, sine + table, heads, half, HEADS, HALF)
    fused += width
    _rotate_back(key + row * kv_width, fused, cosine + table, sine + table, kv_heads, half, KV_HEADS, HALF)
    place = tl.arange(0, WIDTH)
    carried = tl.load(value + row * kv_width + place, mask=place < kv_width)
    tl.store(fused + kv_width + place, carried, mask=place < kv_width)


# The sum of squares of a tensor on a GPU, at the speed of its memory.


PROGRAMS = 2048
BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_squares(source, sums, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, elements, step):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(source + place, mask=place < elements, other=0.0).to(tl.float32)
        total += values * values
    tl.store(sums + program, tl.sum(total, 0))


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """The sum over all of them, in float32; each is dense. The order of adding depends on lengths alone."""
    programs = [min(PROGRAMS, -(-tensor.numel() // BLOCK)) for tensor in tensors]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=tensors[0].device)
    for tensor, count, part in zip(tensors, programs, sums.split(programs), strict=True):
        _sum_squares[(count,)](tensor, part, tensor.numel(), BLOCK=BLOCK, num_warps=8)
    return sums.sum()


# SwiGLU's backward pass on a GPU, where gate and up lie in one row.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def swiglu_backward_rows(gradient, fused, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`fused` and `result`: rows of gates and then ups, `width` each. Each multiplication rounds as torch's own
    does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = row * 2 * width + column
    g = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(fused + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + width + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    kind = result.dtype.element_ty
    opened = (gate * sigmoid).to(kind).to(tl.float32)
    through = (g * up).to(kind).to(tl.float32)
    tl.store(result + place, (through * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(kind), mask=inside)
    tl.store(result + width + place, (g * opened).to(kind), mask=inside)


# The kernel of `transpose` on a GPU: square tiles through registers, so that both reading and writing go along rows.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def transpose_tiles(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))
