"""How long matmuls, attention, memory and copies of one rank take while all ranks do the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional

from cuboid.kernels.cpu_16bit import fast_matmuls
from cuboid.model.load_balancing import Tokens
from cuboid.model.moe import MoE
from cuboid.parallel.parallelize import DTYPES
from cuboid.spec.model import load_model

WINDOWS = 4


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Seconds of one action, as the mean over each of a few windows."""

    windows: tuple[float, ...]
    """By the device's clock; on a CPU those for which the process had a core."""
    core_fractions: tuple[float, ...]
    """On a CPU how much of a core it had, else 1."""


def timed(action: Callable[[], object], seconds: float, device: torch.device) -> Timing:
    """Windows that together take about `seconds`.

    Ranks share cores with one another, and a busy machine gives them to strangers too: how long an action keeps a core
    hardly varies, how long it waits for one varies wildly and is the same for all actions. So they are told apart."""
    for _ in range(2):  # the first call may pay for libraries and for memory, and says nothing
        start = _now(device)
        action()
        synchronize(device)
        clock, busy = (now - then for now, then in zip(_now(device), start, strict=True))
    if clock > seconds:
        return _timing([(clock, busy, 1)])
    window = seconds / WINDOWS
    # The clock is read twenty times a window; a device works through a whole batch without a word from the host.
    batch = max(1, int(window / 20 / max(clock, 1e-7)))
    found = []
    for _ in range(WINDOWS):
        start, count = _now(device), 0
        while not count or time.perf_counter() - start[0] < window:
            for _ in range(batch):
                action()
            synchronize(device)
            count += batch
        clock, busy = (now - then for now, then in zip(_now(device), start, strict=True))
        found.append((clock, busy, count))
    return _timing(found)


def _now(device: torch.device) -> tuple[float, float]:
    clock = time.perf_counter()
    return clock, clock if device.type == "cuda" else time.process_time()


def _timing(found: list[tuple[float, float, int]]) -> Timing:
    windows = tuple(max(busy, 1e-9) / count for _, busy, count in found)
    return Timing(windows, tuple(min(busy / clock, 1.0) for clock, busy, _ in found))


Shape = tuple[int, int, int]

CPU_MATMULS: tuple[Shape, ...] = (
    (32, 32, 32),
    (128, 128, 128),
    (512, 64, 512),
    (64, 512, 512),
    (512, 512, 64),
    (512, 256, 768),
    (256, 1024, 1024),
    (512, 512, 2048),
)
GPU_MATMULS: tuple[Shape, ...] = (
    (64, 64, 64),
    (4096, 4096, 128),
    (512, 4096, 4096),
    (4096, 1024, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
)
LARGEST = -1
"""Of the matmuls: the one that says how fast a rank is alone, and in precisions that few train in."""
CPU_ATTENTION: tuple[Shape, ...] = ((256, 4, 64), (1024, 4, 64))
GPU_ATTENTION: tuple[Shape, ...] = ((2048, 32, 128), (8192, 32, 128))
CPU_BYTES, GPU_BYTES = 32 << 20, 1 << 30
ROUTED = 64
"""Tokens of the layer with experts, few enough for the host to take longer than the device."""


@dataclass(frozen=True)
class Kernel:
    """Something to time, made ready when it is its turn."""

    kind: str
    size: tuple[int, ...]
    precision: str
    prepare: Callable[[], Callable[[], object]]


def kernels(device: torch.device) -> Iterator[Kernel]:
    """All of a device, the precision its trainings use first."""
    gpu = device.type == "cuda"
    shapes = GPU_MATMULS if gpu else CPU_MATMULS
    for precision in ("bf16", "float32", "float64") if gpu else ("float32", "bf16", "float64"):
        # Of the others the largest says enough, and no CPU takes long for it: what it has no instructions for is
        # computed in float32 (`kernels.cpu_16bit`). Of a small one, the conversion is half the time.
        for shape in shapes if precision == trained(device) else shapes[LARGEST:]:
            yield Kernel("matmul", shape, precision, _matmul(shape, precision, device))
    for shape in GPU_ATTENTION if gpu else CPU_ATTENTION:
        for backward in (False, True):
            kind = "attention_backward" if backward else "attention_forward"
            yield Kernel(kind, shape, trained(device), _attention(shape, backward, device))
    size = GPU_BYTES if gpu else CPU_BYTES
    yield Kernel("memory", (size,), "", _memory(size, device))
    if gpu:
        for kind, there in (("to_device", True), ("to_host", False)):
            yield Kernel(kind, (size,), "", _copy(size, device, there))
        yield Kernel("routing", (ROUTED,), trained(device), partial(routing, device))


def trained(device: torch.device) -> str:
    """The precision in which trainings on a device compute."""
    return "bf16" if device.type == "cuda" else "float32"


def _matmul(shape: Shape, precision: str, device: torch.device) -> Callable[[], Callable[[], object]]:
    """The three matmuls of a linear layer, forward and backward: libraries differ in how well they do each."""

    def prepare() -> Callable[[], object]:
        rows, inner, columns = shape
        dtype = DTYPES[precision]
        x, weight, gradient = (
            torch.randn(size, device=device).to(dtype) for size in ((rows, inner), (columns, inner), (rows, columns))
        )

        def multiply() -> object:
            with fast_matmuls(device, precision):  # as ranks do
                return x @ weight.T, gradient @ weight, gradient.T @ x

        return multiply

    return prepare


def _attention(shape: Shape, backward: bool, device: torch.device) -> Callable[[], Callable[[], object]]:
    """Causal attention of one sequence; backward holds the forward pass that it needs."""

    def prepare() -> Callable[[], object]:
        tokens, heads, width = shape
        query, key, value = parts = [
            torch.randn(1, heads, tokens, width, device=device).to(DTYPES[trained(device)]).requires_grad_(backward)
            for _ in range(3)
        ]

        def run() -> object:
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(seen.sum(), parts) if backward else seen

        return run

    return prepare


def _memory(size: int, device: torch.device) -> Callable[[], Callable[[], object]]:
    """Read one tensor, write another: `size` bytes each way."""

    def prepare() -> Callable[[], object]:
        source = torch.zeros(size // 4, device=device)
        target = torch.empty_like(source)
        return lambda: torch.add(source, 1.0, out=target)

    return prepare


def routing(device: torch.device) -> Callable[[], object]:
    """A small layer with experts, forward and backward: how long the host takes to launch it."""
    mixture = MoE(load_model("tiny-qwen3-moe")).to(device, DTYPES[trained(device)])
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(ROUTED, mixture.router.weight.shape[1], device=device, dtype=DTYPES[trained(device)])
    x.requires_grad_()
    inputs = [x, *mixture.parameters()]
    return lambda: torch.autograd.grad(mixture.routed(x, Tokens(ROUTED)).sum(), inputs)


def _copy(size: int, device: torch.device, there: bool) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        host, held = torch.zeros(size // 4, pin_memory=True), torch.zeros(size // 4, device=device)
        source, target = (host, held) if there else (held, host)
        return lambda: target.copy_(source, non_blocking=True)

    return prepare
