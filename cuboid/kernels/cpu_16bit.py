"""Matmuls of 16-bit numbers on a CPU that has no instructions for them. There torch takes hundreds of times as long as
for float32; so they are computed in float32 and rounded once, which is what such instructions do."""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.kernels.precision import wide

aten = torch.ops.aten
MATMULS = {
    aten.mm.default: 1,
    aten.bmm.default: 1,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 1,  # sums of exponentials stay as they are
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}
"""And how many of their results are rounded."""
SLOW = 8
"""Times as long as float32."""

# Where matmuls stay in 16 bits torch says, with a screen of its own frames, that it takes another way to the result.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")


class Float32Matmuls(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function not in MATMULS or wide(arguments[0].dtype) == arguments[0].dtype:
            return function(*arguments, **options)
        dtype = arguments[0].dtype
        found = function(*map(_widened, arguments), **{name: _widened(value) for name, value in options.items()})
        if isinstance(found, Tensor):
            return found.to(dtype)
        rounded = MATMULS[function]
        return tuple(value.to(dtype) if place < rounded else value for place, value in enumerate(found))


def _widened(value: Any) -> Any:
    return value.to(wide(value.dtype)) if isinstance(value, Tensor) else value


def fast_matmuls(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Inside, matmuls in that precision take no longer than they must. Of fp8 few are in 16 bits, and all its other
    operations would take longer."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return Float32Matmuls() if device.type == "cpu" and kind is not None and _is_slow(kind) else nullcontext()


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    numbers = torch.ones(128, 128)
    return _seconds(numbers.to(dtype)) > SLOW * _seconds(numbers)


def _seconds(numbers: Tensor) -> float:
    """Of this thread's own time, and the least of many: whatever else the machine does, ranks must judge alike."""
    found: list[float] = []
    while len(found) < 3 or sum(found) < 0.03:
        start = time.thread_time()
        _ = numbers @ numbers
        found.append(time.thread_time() - start)
    return min(found)
