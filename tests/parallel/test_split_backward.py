"""What waits for a weight gradient is whole when its turn comes."""

from collections.abc import Callable

import torch
from torch import Tensor

from cuboid.model.linear import Linear
from cuboid.model.split_backward import UNTOUCHED, Deferral, split_matmul


def test_compiled_graphs_do_not_write_to_what_waits() -> None:
    """Made into kernels, unlike those of other tests: with one of the two options alone a gradient is wrong."""
    torch.manual_seed(0)
    linears, deferral = [Linear(16, 16, bias=False) for _ in range(2)], Deferral()
    for linear in linears:
        torch.nn.init.normal_(linear.weight)
        linear.matmul = split_matmul(linear, deferral, None)

    def run(x: Tensor) -> Tensor:
        first, second = linears
        return second(first(x).softmax(1)) * x

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for linear in linears:
            linear.weight.grad = None
        x = torch.linspace(-1, 1, 8 * 16).reshape(8, 16).requires_grad_()
        function(x).sum().backward()
        for works in deferral.take().values():
            for work in works:
                work()
        return [linear.weight.grad for linear in linears if linear.weight.grad is not None]

    expected = gradients(run)
    deferral.active = True
    found = gradients(torch.compile(run, fullgraph=True, dynamic=False, options=UNTOUCHED))
    assert len(found) == 2
    torch.testing.assert_close(found, expected)
