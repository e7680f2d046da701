"""SwiGLU's backward pass on a GPU, where gate and up lie in one row.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


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
    share = 1.0 / (1.0 + tl.exp(-gate))
    kind = result.dtype.element_ty
    opened = (gate * share).to(kind).to(tl.float32)
    through = (g * up).to(kind).to(tl.float32)
    tl.store(result + place, (through * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
    tl.store(result + width + place, (g * opened).to(kind), mask=inside)
