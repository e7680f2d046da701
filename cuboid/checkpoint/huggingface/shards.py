"""Safetensors files written one at a time: memory holds one of them and no more.

A file is eight bytes with the length of its header, the header as JSON (each tensor's dtype, shape and place), and the
tensors one after another. It is written here and not by the library, because then the tensors of a file lie in one
buffer that is filled in place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "float32": ("F32", torch.float32),
    "bf16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float64": ("F64", torch.float64),
}
"""Name in Cuboid -> name in a file, dtype."""
ALIGNMENT = 8


@dataclass(frozen=True)
class Shard:
    name: str
    tensors: dict[str, tuple[int, ...]]


def plan_shards(shapes: Mapping[str, tuple[int, ...]], item_size: int, limit: int) -> list[Shard]:
    """Tensors in their order, as many in a file as fit; one that is larger than the limit has a file of its own."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        size = prod(shape) * item_size
        if groups[-1] and held + size > limit:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += size
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    count = len(groups)
    return [
        Shard(f"model-{number:05d}-of-{count:05d}.safetensors", group) for number, group in enumerate(groups, start=1)
    ]


class ShardBuffer:
    """The contents of a shard in memory; `tensors` are views to be filled."""

    def __init__(self, shard: Shard, dtype: str) -> None:
        code, kind = DTYPES[dtype]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, shape in shard.tensors.items():
            size = prod(shape) * kind.itemsize
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % ALIGNMENT)
        self._buffer = torch.empty(place // kind.itemsize, dtype=kind)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, shape in shard.tensors.items():
            self.tensors[name] = self._buffer[start : start + prod(shape)].view(shape)
            start += prod(shape)

    @property
    def bytes(self) -> int:
        return self._buffer.nbytes

    def write(self, path: Path) -> None:
        content: Any = self._buffer.view(torch.uint8).numpy()
        with path.open("wb") as file:
            file.write(len(self._header).to_bytes(8, "little") + self._header)
            file.write(memoryview(content))
            file.flush()
            os.fsync(file.fileno())
