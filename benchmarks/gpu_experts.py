"""Experts on one GPU: torch's grouped kernel in bf16 against plain matmuls in float64, and against a loop in bf16.

    python benchmarks/gpu_experts.py

Tokens are spread unevenly, with an expert that gets none; the result and all gradients are compared, of the plain
matmul and of the one whose weight gradient comes later (split-backward pipelines). Then a whole MoE layer, dispatch
and combine included: with our kernels, with torch's own operations, both against float64; with and without dropped
tokens. Orders of rows must be those of torch's stable sort, to the bit."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as functional
from torch import Tensor

import cuboid.model.moe as mixture_module
from cuboid.kernels.triton_kernels import order_arrivals, order_by_expert
from cuboid.model import router as routing
from cuboid.model.moe import GroupedMatmul, MoE, grouped_matmul
from cuboid.model.rope import Positions
from cuboid.model.split_backward import Deferral, deferrable_grouped_matmul
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec

DEVICE = torch.device("cuda")
HIDDEN, WIDTH, EXPERTS, ROWS = 2048, 1024, 16, 16384


def looped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([functional.linear(rows, each) for rows, each in parts])


def outcome(matmul: GroupedMatmul, x: Tensor, weight: Tensor, counts: Tensor, gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    result = matmul(*leaves, counts)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def milliseconds(matmul: GroupedMatmul, *given: Tensor) -> float:
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        outcome(matmul, *given)
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
    matmuls = {"one kernel": grouped_matmul, "deferrable": deferrable_grouped_matmul(Deferral()), "loop": looped}
    for name, matmul in matmuls.items():
        found = outcome(matmul, x, weight, counts, gradient)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        shown = " ".join(f"{error:.1e}" for error in errors)
        verdict = "" if max(errors) < 1e-2 else "WRONG"
        print(f"{name:>11}: {milliseconds(matmul, x, weight, counts, gradient):6.2f} ms, errors {shown} {verdict}")


def layer_outcome(layer: MoE, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    index = torch.arange(x.shape[0] // 2, device=x.device).unsqueeze(0)
    result = layer(x, Positions(index, None, None))
    result.backward(gradient)
    return [
        value for value in (result.detach(), x.grad, *(each.grad for each in layer.parameters())) if value is not None
    ]


def compare_layers(capacity: float) -> None:
    mixture = MixtureSpec(experts=64, top_k=8, expert_ffn=768, capacity_factor=capacity)
    model = ModelSpec(hidden=2048, layers=1, heads=16, ffn=1024, vocab=512, mixture=mixture)
    layer = MoE(model).to(DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    layer.to(torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    x, gradient = (torch.randn(8192, 2048, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    chosen = layer.router.choose(torch.rand(8192, 64, device=DEVICE) + torch.rand(64, device=DEVICE))
    layer.router.choose = exact.router.choose = lambda scores: chosen  # type: ignore[method-assign]
    expected = layer_outcome(exact, x.double(), gradient.double())
    own = routing.fuses
    for name, rule in (("our kernels", own), ("torch's", lambda _: False)):
        routing.fuses = mixture_module.fuses = rule
        found = layer_outcome(layer, x, gradient)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        times = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            layer_outcome(layer, x, gradient)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        verdict = "" if max(errors) < 2e-2 else "WRONG"
        shown = " ".join(f"{error:.1e}" for error in errors)
        print(f"layer, capacity {capacity}, {name:>11}: {sorted(times)[5]:6.2f} ms, errors {shown} {verdict}")
    routing.fuses = mixture_module.fuses = own


def compare_orders() -> None:
    """Where rows stand in the order of experts, before they leave and after they arrive."""
    for experts, assignments in ((8, 64), (60, 129), (128, 131072), (160, 98304), (256, 262144), (512, 10000)):
        for spare in (0, 1):  # one more: dropped tokens
            chosen = torch.randint(0, experts + spare, (assignments,), device=DEVICE)
            kernels, sorted_by_torch = order_by_expert(chosen, experts), routing._order_by_expert(chosen.cpu(), experts)
            right = all(torch.equal(a.cpu(), b) for a, b in zip(kernels, sorted_by_torch, strict=True))
            print(f"order of {assignments} by {experts} experts: {'equal' if right else 'WRONG'}")
    for ranks, held in ((2, 4), (8, 16), (64, 4), (16, 1)):
        arriving = torch.randint(0, 4096, (ranks, held), device=DEVICE)
        arriving[0, 0] = 0
        rows = int(arriving.sum())
        pairs = zip(order_arrivals(arriving, rows), routing.order_arrivals(arriving.cpu(), rows), strict=True)
        right = all(torch.equal(a.cpu(), b) for a, b in pairs)
        print(f"arrivals of {held} experts from {ranks} ranks: {'equal' if right else 'WRONG'}")


if __name__ == "__main__":
    main()
    compare_orders()
    for factor in (0.0, 1.0):
        compare_layers(factor)
