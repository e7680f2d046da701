"""Products of few rows on Arm CPUs, whose libraries take half of the time of a decoding step to pack weights: they are
packed once here, and multiplied by `panels.c`. Where that cannot be compiled, torch multiplies as ever."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.model.linear import Linear

WIDTH = 8
SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O2", "-fPIC", "-fopenmp", "-shared")


def wants_panels(device: torch.device, dtype: torch.dtype) -> bool:
    """Elsewhere torch has a library that multiplies few rows well, or nobody has measured."""
    is_arm = sys.platform == "linux" and platform.machine() == "aarch64"
    return is_arm and device.type == "cpu" and dtype == torch.float32


def use_panels(modules: Iterable[nn.Module], kept: Tensor | None = None) -> str:
    """Put the weights of all products into panels, but for `kept`, which is read in another way too; or say why not."""
    try:
        multiply = _compiled()
    except OSError as error:
        return str(error)
    for module in modules:
        for product in module.modules():
            if isinstance(product, Linear) and product.weight is not kept:
                product.product = PanelProduct(multiply, len(product.weight))
                product.weight = nn.Parameter(in_panels(product.weight), requires_grad=False)
    return ""


def in_panels(weight: Tensor) -> Tensor:
    """(outputs, inputs) → (panels, inputs, WIDTH), the last filled up with zeros."""
    panels = -(-len(weight) // WIDTH)
    if panels * WIDTH != len(weight):
        weight = torch.cat((weight, weight.new_zeros(panels * WIDTH - len(weight), weight.shape[1])))
    return weight.view(panels, WIDTH, -1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PanelProduct:
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


@cache
def _compiled() -> Any:
    """`product` of panels.c. Compiled once per user, so that ranks start in a moment."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler; install gcc")
    made_of = SOURCE.read_bytes() + repr((FLAGS, platform.machine())).encode()
    name = f"panels-{blake2b(made_of, digest_size=8).hexdigest()}.so"
    library = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cuboid" / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / name
            command = (compiler, *FLAGS, str(SOURCE), "-o", str(made))
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise OSError(f"{compiler} fails: {' '.join(done.stderr.split())}")
            made.replace(library)  # several ranks may make it at once
    multiply = ctypes.CDLL(str(library)).product
    multiply.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_int]
    multiply.restype = ctypes.c_int
    return multiply
