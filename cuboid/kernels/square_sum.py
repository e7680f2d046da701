"""The sum of squares of a tensor on a GPU, at the speed of its memory.

Imported where there is a GPU only: elsewhere triton need not be installed."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

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
