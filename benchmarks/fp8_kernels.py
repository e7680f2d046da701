"""Matmuls and kernels of fp8 on one GPU: are they right, and how fast?

    python benchmarks/fp8_kernels.py                   # shapes of Llama 3 8B and of experts of Qwen3 30B-A3B
    python benchmarks/fp8_kernels.py --small           # also on a CPU: only whether they are right
    python benchmarks/fp8_kernels.py --experts         # only of experts

Right: beside float64 matmuls of the same rounded numbers, and kernels beside plain operations, with dimensions too that
128 does not divide. Fast: TFLOP/s of each of the three matmuls of a linear in bf16 and in fp8 with a scale for each
tensor, each row, each block; GB/s of the kernels that round; milliseconds of a linear forward and backward with
everything in it. Prints a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model import fp8_block, fp8_experts, router
from cuboid.model.fp8 import Fp8Matmul, multiply, quantise
from cuboid.model.fp8_block import block_matmul, quantise_both, quantise_weight, widened
from cuboid.model.moe import Experts, MoE, grouped_matmul, grouped_outer, swiglu
from cuboid.model.rope import Positions
from cuboid.model.router import Routing, permutation_of
from cuboid.model.split_backward import Deferral
from cuboid.spec.run import build_run

LINEARS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""Inputs and outputs: queries, keys and values; attention's output; gate and up; down."""
ODD = ((4096, 1024, 576), (272, 336, 208), (80, 48, 16), (128, 128, 128), (160, 4096, 1536))
"""Tokens, inputs, outputs."""
EXPERTS, HIDDEN, WIDTH = 128, 2048, 768
TIMES = 10


def show(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def tried(name: str, check: Callable[[], Any]) -> None:
    """One that fails does not hide the others."""
    try:
        check()
    except Exception as failure:
        show(check=name, failed=f"{type(failure).__name__}: {str(failure)[:600]}")


def seconds(work: Callable[[], Any], times: int = TIMES) -> float:
    """Of one call on the device; the median of three rounds."""
    for _ in range(3):
        work()
    found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / times)
    return statistics.median(found)


def numbers(rows: int, columns: int, device: torch.device, seed: int = 0) -> Tensor:
    """Rows, and columns, of different sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device)
    x *= torch.exp2(4 * torch.rand(rows, 1, generator=generator, device=device))
    return (x * torch.exp2(4 * torch.rand(1, columns, generator=generator, device=device))).bfloat16()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def differs(found: Tensor, expected: Tensor) -> float:
    """The fraction of numbers that are not the same."""
    return float((found.cpu().float() != expected.cpu().float()).float().mean())


def check_rounding(device: torch.device, shapes: list[tuple[int, int]]) -> None:
    """Kernels beside plain operations: values and scales are the same bits."""
    for rows, columns in shapes:
        x = numbers(rows, columns, device)
        kernels = [*quantise_both(x), *quantise_weight(x, False), *quantise_weight(x, True)]
        plain = [*fp8_block._rows(x), *fp8_block._rows(x.t()), *fp8_block._squares(x), *fp8_block._squares(x.t())]
        w = numbers(2 * rows, columns, device).view(2, rows, columns)
        for tensor in (x, w):
            kernels += fp8_experts.quantise_long(tensor)
            exponents = fp8_block.exponents_of(tensor.abs().amax(-1))
            plain += [fp8_block._rounded(tensor, exponents.unsqueeze(-1)), torch.exp2(exponents.float())]
        kernels += fp8_experts.quantise_pair(w, w / 3)
        plain += fp8_experts.quantise_long(torch.cat((w, w / 3), 1))
        for weights in ((w,), (w, w / 3)):
            kernels += fp8_experts.quantise_transposes(weights)
            plain += fp8_experts.quantise_transposes(tuple(each.cpu() for each in weights))
        different = [differs(*pair) for pair in zip(kernels, plain, strict=True)]
        show(check="rounding", shape=[rows, columns], different=different, right=not any(different))


def check_matmul(device: torch.device, tokens: int, inputs: int, outputs: int) -> None:
    """The three matmuls beside float64 ones of the same rounded numbers, and beside the CPU."""
    x, weight, gradient = (
        numbers(*size, device, seed)
        for seed, size in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    )
    of_x, of_gradient = quantise_both(x), quantise_both(gradient)
    pairs = {
        "output": (*of_x[:2], *quantise_weight(weight, False)),
        "input gradient": (*of_gradient[:2], *quantise_weight(weight, True)),
        "weight gradient": (*of_gradient[2:], *of_x[2:]),
    }
    errors = {}
    for name, (a, a_scales, b, b_scales) in pairs.items():
        found = block_matmul(a, a_scales, b, b_scales, torch.bfloat16)
        exact = widened(a, a_scales).double() @ widened(b, b_scales).double().t()
        errors[name] = error(found, exact)
    show(check="matmul", shape=[tokens, inputs, outputs], errors=errors, right=max(errors.values()) < 4e-3)


def check_experts(device: torch.device, count: int, hidden: int, width: int, rows: int) -> None:
    """Whole experts: what they give, and the gradients of their input and of their weights, beside bf16's."""
    mixture = {"experts": count, "top_k": 1, "expert_ffn": width}
    shape = {"hidden": hidden, "layers": 1, "heads": 4, "kv_heads": 4, "ffn": width, "vocab": 256}
    model = build_run({"model": {**shape, "family": "mixtral", "mixture": mixture}}).model
    experts = Experts(model, count, width).to(device, torch.bfloat16)
    for number, weight in enumerate(experts.parameters()):
        values = numbers(count * weight.shape[1], weight.shape[2], device, number).view_as(weight)
        weight.data = values / values.float().std() / weight.shape[2] ** 0.5
    x = numbers(rows, hidden, device).requires_grad_()
    counts = torch.full((count,), rows // count, device=device)
    counts[0], counts[1] = counts[0] + counts[1], 0
    gradient = numbers(rows, hidden, device, 2)
    found = []
    for in_fp8 in (False, True):
        if in_fp8:
            fp8_experts.multiply_experts_in_fp8(experts, Deferral())
        for tensor in (x, *experts.parameters()):
            tensor.grad = None
        y = experts(x, counts)
        y.backward(gradient)
        found.append((y.detach(), x.grad, *(weight.grad for weight in experts.parameters())))
    errors = [error(rounded, exact) for exact, rounded in zip(*found, strict=True)]
    show(check="experts", shape=[count, hidden, width, rows], errors=errors, right=max(errors) < 0.15)


def check_rounding_experts(device: torch.device, tokens: int, top_k: int, count: int, hidden: int, width: int) -> None:
    """Kernels that make rows in 16 bits and in fp8, beside those that make them in 16 bits, rounded afterwards."""
    x, gradient = numbers(tokens, hidden, device), numbers(tokens, hidden, device, 1)
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.rand(tokens, count, generator=generator, device=device)
    weights, chosen = scores.topk(top_k, -1)
    kept = torch.rand(tokens, top_k, generator=generator, device=device) < 0.9
    here = permutation_of(Routing(chosen, weights, kept), count)
    last = int(here.counts.sum())
    rows, *rounded = router._PermuteRounded.apply(x, here.home)
    apart = x.index_select(0, here.order // top_k)
    different = [differs(rows[:last], apart[:last])]
    different += [differs(a[:last], b[:last]) for a, b in zip(rounded, fp8_experts.quantise_long(apart), strict=True)]
    y = numbers(tokens * top_k, hidden, device, 2)
    made = []
    for rounds in (False, True):
        leaves = [y.detach().requires_grad_(), weights.detach().requires_grad_()]
        combined = here.unpermute(*leaves, rounds)
        row_gradient, weight_gradient, *_ = router._Combine.backward(combined.grad_fn, gradient)
        in_fp8 = fp8_experts._rounded(row_gradient)
        made.append((weight_gradient * kept, row_gradient[:last], *(each[:last] for each in in_fp8)))
    different += [error(made[1][0], made[0][0])]
    different += [differs(a, b) for a, b in zip(made[1][1:], made[0][1:], strict=True)]
    fused, of_inner = numbers(tokens, 2 * width, device, 3), numbers(tokens, width, device, 4)
    for found, double in (
        (fp8_experts._swiglu(fused), lambda whole: swiglu(*whole.chunk(2, 1))),
        (
            fp8_experts._swiglu_gradients(of_inner, fused),
            lambda whole: fp8_experts._swiglu_gradients(of_inner.cpu().double(), whole)[0],
        ),
    ):
        exact = double(fused.cpu().double()).to(device)
        different += [max(0.0, error(found[0], exact) - 3e-3)]
        different += [differs(a, b) for a, b in zip(found[1], fp8_experts.quantise_long(found[0]), strict=True)]
    right = max(different) < 1e-6
    show(check="rows in 16 bits and fp8", shape=[tokens, top_k, count, hidden, width], different=different, right=right)


def time_layer(device: torch.device, sequences: int, folder: Path | None) -> None:
    """A whole MoE layer forward and backward, router and permutations included."""
    model = build_run({"model": "qwen3-30b-a3b"}, ["model.layers=1"]).model
    layer = MoE(model).to(device, torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x = torch.randn(sequences * 4096, HIDDEN, device=device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(x)
    positions = Positions(torch.arange(4096, device=device).unsqueeze(0), None, None)

    def step() -> None:
        layer(x, positions).backward(gradient)
        x.grad = None
        layer.zero_grad()

    found, profiles = {}, {}

    def measure(name: str) -> None:
        found.setdefault(name, []).append(round(1e3 * seconds(step, 5), 3))
        if folder is not None and name not in profiles:
            profiles[name] = kernels(step)

    for _ in range(2):
        layer.experts.whole = None
        measure("bf16")
        fp8_experts.multiply_experts_in_fp8(layer.experts, Deferral())
        measure("fp8")
        layer.takes_rounded = lambda: False  # type: ignore[method-assign]
        measure("fp8, rows rounded apart")
        del layer.takes_rounded
        layer.experts.matmul = grouped_matmul
    show(time="layer of experts, forward and backward", tokens=sequences * 4096, milliseconds=found)
    if folder is not None:
        (folder / f"layer_{sequences}.json").write_text(json.dumps(profiles, indent=1))


def kernels(step: Callable[[], None], times: int = 3) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of each in a step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    rows = [
        (event.key[:140], round(event.self_device_time_total / 1e3 / times, 4), event.count // times)
        for event in profile.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


def time_linear(device: torch.device, tokens: int, inputs: int, outputs: int) -> None:
    x, weight, gradient = (numbers(*size, device) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    work = 2e-12 * tokens * inputs * outputs
    rates: dict[str, dict[str, float]] = {
        "output": {"bf16": work / seconds(lambda: x @ weight.t())},
        "input gradient": {"bf16": work / seconds(lambda: gradient @ weight)},
        "weight gradient": {"bf16": work / seconds(lambda: gradient.t() @ x)},
    }
    of_x, of_gradient = quantise_both(x), quantise_both(gradient)
    square, transposed = quantise_weight(weight, False), quantise_weight(weight, True)
    of_blocks = {
        "output": (*of_x[:2], *square),
        "input gradient": (*of_gradient[:2], *transposed),
        "weight gradient": (*of_gradient[2:], *of_x[2:]),
    }
    for name, (a, a_scales, b, b_scales) in of_blocks.items():
        rates[name]["block"] = work / seconds(lambda: block_matmul(a, a_scales, b, b_scales, torch.bfloat16))  # noqa: B023
    for kind, by_row in (("tensor", False), ("row", True)):
        for name, fast, a, b in (
            ("output", True, x, weight),
            ("input gradient", False, gradient, weight.t()),
            ("weight gradient", False, gradient.t(), x.t()),
        ):
            factors = *quantise(a, torch.float8_e4m3fn, by_row), *quantise(b, torch.float8_e4m3fn, by_row)
            rates[name][kind] = work / seconds(lambda: multiply(*factors, torch.bfloat16, fast))  # noqa: B023
    rounded = {name: {kind: round(rate) for kind, rate in found.items()} for name, found in rates.items()}
    show(time="matmul", shape=[tokens, inputs, outputs], tflops=rounded)


def time_rounding(rows: int, columns: int, device: torch.device) -> None:
    x, kept = numbers(rows, columns, device), fp8_block.WARPS
    found: dict[str, dict[int, int]] = {"both": {}, "weight": {}, "transposed": {}}
    for warps in (4, 8, 16):
        fp8_block.WARPS = warps
        for name, moved, work in (
            ("both", 4, lambda: quantise_both(x)),
            ("weight", 3, lambda: quantise_weight(x, False)),
            ("transposed", 3, lambda: quantise_weight(x, True)),
        ):
            found[name][warps] = round(moved * x.numel() / seconds(work) / 1e9)
    fp8_block.WARPS = kept
    show(time="rounding", shape=[rows, columns], gigabytes_by_warps=found)


def time_whole(device: torch.device, tokens: int, inputs: int, outputs: int) -> None:
    """A linear forward and backward, compiled, with all that rounds."""
    x, weight = numbers(tokens, inputs, device).requires_grad_(), numbers(outputs, inputs, device).requires_grad_()
    gradient = numbers(tokens, outputs, device)
    found = {}
    for name, matmul in (
        ("bf16", functional.linear),
        *((kind, Fp8Matmul(kind)) for kind in ("tensor", "row", "block")),  # type: ignore[arg-type]
    ):
        compiled = torch.compile(matmul, dynamic=False)

        def step() -> None:
            compiled(x, weight, None).backward(gradient)  # noqa: B023
            x.grad = weight.grad = None

        found[name] = round(1e3 * seconds(step), 3)
    show(time="linear, forward and backward", shape=[tokens, inputs, outputs], milliseconds=found)


def time_experts(device: torch.device, rows: int) -> None:
    x = numbers(rows, HIDDEN, device)
    weight = numbers(EXPERTS * 2 * WIDTH, HIDDEN, device, 1).view(EXPERTS, 2 * WIDTH, HIDDEN)
    gradient = numbers(rows, 2 * WIDTH, device, 2)
    counts = torch.full((EXPERTS,), rows // EXPERTS, device=device)
    values, weights = fp8_experts.quantise_long(x), fp8_experts.quantise_long(weight)
    by_row, offsets = functional.ScalingType.RowWise, counts.cumsum(0, dtype=torch.int32)
    transposed = weight.transpose(1, 2)
    gate, up = (half.contiguous() for half in weight.chunk(2, dim=1))

    def scaled(fast: bool) -> Tensor:
        return functional.scaled_grouped_mm(
            values[0],
            weights[0].transpose(1, 2),
            values[1],
            by_row,
            weights[1],
            by_row,
            offs=offsets,
            output_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    found = {
        "bf16 output": seconds(lambda: grouped_matmul(x, weight, counts)),
        "bf16 input gradient": seconds(lambda: grouped_matmul(gradient, transposed, counts)),
        "bf16 weight gradient": seconds(lambda: grouped_outer(gradient, x, counts)),
        "fp8 output": seconds(lambda: scaled(False)),
        "fp8 output, fast sums": seconds(lambda: scaled(True)),
        "fp8 output with rounding": seconds(lambda: fp8_experts.fp8_grouped_matmul(x, weight, counts)),
        "fp8 input gradient with rounding": seconds(
            lambda: fp8_experts.fp8_grouped_matmul(gradient, transposed, counts)
        ),
        "rounding rows": seconds(lambda: fp8_experts.quantise_long(x)),
        "rounding weights": seconds(lambda: fp8_experts.quantise_long(weight)),
        "rounding a pair of weights": seconds(lambda: fp8_experts.quantise_pair(gate, up)),
    }
    scales, kept = fp8_experts.quantise_pair(gate, up)[1], (fp8_experts.TALL, fp8_experts.WIDE)
    for tile in ((64, 64), (64, 128), (128, 64), (128, 128), (32, 128)):
        fp8_experts.TALL, fp8_experts.WIDE = tile
        found[f"rounding transposes, {tile}"] = seconds(lambda: fp8_experts.quantise_transposes((gate, up), scales))
    fp8_experts.TALL, fp8_experts.WIDE = kept
    inner, tile_of = numbers(rows, WIDTH, device, 3), fp8_experts._tile
    for tall in (1, 2, 4, 8):
        for warps in (4, 8):
            fp8_experts._tile = lambda width: {"TALL": tall, "BLOCK": 1024, "num_warps": warps}  # noqa: B023
            found[f"swiglu {tall} rows {warps} warps"] = seconds(lambda: fp8_experts._swiglu(gradient))
            found[f"its gradient {tall} rows {warps} warps"] = seconds(
                lambda: fp8_experts._swiglu_gradients(inner, gradient)
            )
    fp8_experts._tile = tile_of
    milliseconds = {name: round(1e3 * value, 3) for name, value in found.items()}
    show(time="experts", shape=[EXPERTS, HIDDEN, 2 * WIDTH, rows], milliseconds=milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="only small shapes, and no times")
    parser.add_argument("--experts", action="store_true", help="only of experts")
    parser.add_argument("--folder", type=Path, help="for the times of every kernel of a layer of experts")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    show(device=where, torch=torch.__version__, cuda=torch.version.cuda)
    tried("rounding", lambda: check_rounding(device, [(128, 128), (272, 336), (80, 48), (1024, 640)]))
    for odd in ODD:
        tried(f"matmul {odd}", lambda: check_matmul(device, *odd))  # noqa: B023
    tried("experts", lambda: check_experts(device, 8, 256, 192, 1024))
    if device.type == "cuda":
        for case in ((64, 2, 8, 256, 192), (1024, 8, 128, 2048, 768), (100, 3, 5, 96, 80), (300, 4, 16, 5120, 1536)):
            tried("rows of experts", lambda: check_rounding_experts(device, *case))  # noqa: B023
    if options.small or device.type != "cuda":
        return
    if options.experts:
        for sequences in (4, 8, 16):
            tried("time of a layer", lambda: time_layer(device, sequences, options.folder))  # noqa: B023
        for rows in (65536, 262144):
            tried("time of experts", lambda: time_experts(device, rows))  # noqa: B023
        return
    tried("matmul", lambda: check_matmul(device, 8192, 4096, 14336))
    tried("rounding", lambda: check_rounding(device, [(8192, 4096)]))
    tried("time of rounding", lambda: time_rounding(8192, 4096, device))
    tried("time of rounding", lambda: time_rounding(8192, 14336, device))
    for tokens in (8192, 16384):
        for inputs, outputs in LINEARS:
            tried("time of matmuls", lambda: time_linear(device, tokens, inputs, outputs))  # noqa: B023
    for rows in (65536, 262144):
        tried("time of experts", lambda: time_experts(device, rows))  # noqa: B023
    tried("time of a linear", lambda: time_whole(device, 8192, 4096, 14336))


if __name__ == "__main__":
    main()
