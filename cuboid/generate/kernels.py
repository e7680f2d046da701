"""Kernels of our own for decoding on Arm CPUs, in `kernels.c`: compiled when they are first used, and kept for the next
time. Nothing needs them: where they cannot be compiled, torch computes as ever."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

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
