"""The backward pass of rotations by position on a GPU, from queries, keys and values to one row of all heads.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


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
