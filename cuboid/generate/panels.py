"""Matmuls and norms by kernels of our own. Libraries for Arm CPUs take half of the time of a decoding step to pack
weights; here these are packed once, into panels, and stay so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.generate.kernels import Kernels, load_kernels
from cuboid.model.linear import Linear, Norm
from cuboid.model.transformer import VocabularyEmbedding

WIDTH = 8


def use_kernels(modules: Iterable[nn.Module], kept: Tensor | None = None) -> str:
    """In all matmuls and norms inside these; say why not, if that cannot be. `kept`: a weight that is read in another
    way too and stays where it is."""
    try:
        kernels = load_kernels()
    except OSError as error:
        return str(error)
    for module in modules:
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, Linear) and child.weight is not kept:
                    use_panels(child, kernels)
                elif isinstance(child, Norm) and child.bias is None:
                    setattr(parent, name, KernelNorm(child, kernels))
    return ""


def use_panels(matmul: Linear, kernels: Kernels) -> None:
    matmul.matmul = PanelMatmul(kernels.matmul, len(matmul.weight))
    matmul.weight = nn.Parameter(in_panels(matmul.weight), requires_grad=False)


def in_panels(weight: Tensor) -> Tensor:
    """(outputs, inputs) → (panels, inputs, WIDTH), the last filled up with zeros."""
    panels = -(-len(weight) // WIDTH)
    if panels * WIDTH != len(weight):
        weight = torch.cat((weight, weight.new_zeros(panels * WIDTH - len(weight), weight.shape[1])))
    return weight.view(panels, WIDTH, -1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PanelMatmul:
    """Of rows with a weight in panels."""

    multiply: Any
    outputs: int

    def __call__(self, x: Tensor, panels: Tensor, bias: Tensor | None) -> Tensor:
        x, whole = x.contiguous(), len(panels) * WIDTH
        y = x.new_empty(x.shape[0], whole)
        arguments = x.data_ptr(), panels.data_ptr(), y.data_ptr(), *x.shape, whole, torch.get_num_threads()
        if self.multiply(*arguments):
            raise MemoryError
        if whole != self.outputs:
            y = y[:, : self.outputs].contiguous()
        return y if bias is None else y.add_(bias)


class PanelTable(VocabularyEmbedding):
    """Looks up rows of a weight in panels."""

    def __init__(self, panels: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.weight = panels

    def forward(self, indices: Tensor) -> Tensor:
        return self.weight[indices // WIDTH, :, indices % WIDTH]


class KernelNorm(nn.Module):
    """RMSNorm."""

    def __init__(self, whole: Norm, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.size, self.epsilon = whole.weight, whole.size, whole.epsilon
        self.normalize = kernels.normalize

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // self.size
        addresses = x.data_ptr(), self.weight.data_ptr(), y.data_ptr()
        self.normalize(*addresses, rows, self.size, self.epsilon, torch.get_num_threads())
        return y
