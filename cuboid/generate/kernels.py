"""Kernels of our own for decoding on Arm CPUs, in `kernels.c`: compiled when they are first used, and kept for the next
time. Nothing needs them: where they cannot be compiled, torch computes as ever.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.model.linear import Linear, Norm, VocabularyEmbedding

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O2", "-fPIC", "-fopenmp", "-shared")
LIBRARIES = ("-lm",)


@dataclass(frozen=True)
class Kernels:
    """Functions that take addresses."""

    matmul: Any
    normalize: Any


def wants_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Elsewhere torch has a library that multiplies few rows well, or nobody has measured."""
    is_arm = sys.platform == "linux" and platform.machine() == "aarch64"
    return is_arm and device.type == "cpu" and dtype == torch.float32


@cache
def load_kernels() -> Kernels:
    """Or OSError, which says why not."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler; install gcc")
    made_of = SOURCE.read_bytes() + repr((FLAGS, platform.machine())).encode()
    name = f"kernels-{blake2b(made_of, digest_size=8).hexdigest()}.so"
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cuboid" / name
    if not path.is_absolute():  # a user without a home, as in many a container
        raise OSError(f"{path.parent} is no place to keep them; set HOME or XDG_CACHE_HOME")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / name
            command = (compiler, *FLAGS, str(SOURCE), "-o", str(made), *LIBRARIES)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise OSError(f"{compiler} fails: {' '.join(done.stderr.split())}")
            made.replace(path)  # several ranks may make it at once
    library = ctypes.CDLL(str(path))
    library.matmul.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_int]
    library.normalize.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int]
    library.normalize.restype = None
    return Kernels(library.matmul, library.normalize)


# Matmuls and norms by kernels of our own. Libraries for Arm CPUs take half of the time of a decoding step to pack
# weights; here these are packed once, into panels, and stay so.


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
        self.weight = nn.Parameter(whole.factor, requires_grad=False) if whole.unit else whole.weight
        self.size, self.epsilon = whole.size, whole.epsilon
        self.normalize = kernels.normalize

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // self.size
        addresses = x.data_ptr(), self.weight.data_ptr(), y.data_ptr()
        self.normalize(*addresses, rows, self.size, self.epsilon, torch.get_num_threads())
        return y
