"""Experts on one GPU: torch's grouped kernel in bf16 against plain products in float64, and against a loop in bf16.

    python benchmarks/gpu_experts.py

Tokens are spread unevenly, with an expert that gets none; the result and all gradients are compared, of the plain
product and of the one whose weight gradient comes later (split-backward pipelines)."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from cuboid.model.mixture import GroupedProduct, grouped_product
from cuboid.parallel.deferral import Deferral, deferrable_grouped_product

DEVICE = torch.device("cuda")
HIDDEN, WIDTH, EXPERTS, ROWS = 2048, 1024, 16, 16384


def looped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([functional.linear(rows, each) for rows, each in parts])


def outcome(product: GroupedProduct, x: Tensor, weight: Tensor, counts: Tensor, gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    result = product(*leaves, counts)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def milliseconds(product: GroupedProduct, *given: Tensor) -> float:
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        outcome(product, *given)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    torch.manual_seed(0)
    shares = torch.rand(EXPERTS) ** 2
    shares[3] = 0.0
    counts = (shares / shares.sum() * ROWS).int()
    counts[0] += ROWS - int(counts.sum())
    counts = counts.to(DEVICE)
    make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    x, weight, gradient = make(ROWS, HIDDEN), make(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5, make(ROWS, WIDTH)
    expected = outcome(looped, x.double(), weight.double(), counts, gradient.double())
    products = {"one kernel": grouped_product, "deferrable": deferrable_grouped_product(Deferral()), "loop": looped}
    for name, product in products.items():
        found = outcome(product, x, weight, counts, gradient)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        shown = " ".join(f"{error:.1e}" for error in errors)
        verdict = "" if max(errors) < 1e-2 else "WRONG"
        print(f"{name:>11}: {milliseconds(product, x, weight, counts, gradient):6.2f} ms, errors {shown} {verdict}")


if __name__ == "__main__":
    main()
