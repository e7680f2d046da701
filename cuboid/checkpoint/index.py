"""Which tensors a checkpoint holds and where their chunks lie, checked before anything is read or allocated."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import DATA_FILE, INDEX, Place, damage, read_json

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


def check_index(place: Place) -> dict[str, Any]:
    """The index, with every number that decides what is read or allocated checked against the files."""
    folder = locate(place)
    index = read_json(folder, INDEX)
    sizes: dict[str, int | None] = {}
    for name, entry in index.items():
        try:
            item_bytes = DTYPES[entry["dtype"]].itemsize
            shape = [int(length) for length in entry["shape"]]
            covered = 0
            for chunk in entry["chunks"]:
                lengths, offsets, file = chunk["lengths"], chunk["offsets"], chunk["file"]
                inside = all(
                    offset >= 0 and length > 0 and offset + length <= limit
                    for offset, length, limit in zip(offsets, lengths, shape, strict=True)
                )
                if not inside or chunk["bytes"] != prod(lengths) * item_bytes or not DATA_FILE.fullmatch(file):
                    raise ValueError("a chunk lies outside its tensor")
                if file not in sizes:
                    sizes[file] = (folder / file).size
                if not 0 <= chunk["position"] <= (sizes[file] or 0) - chunk["bytes"]:
                    raise ValueError("a chunk lies outside its file")
                covered += prod(lengths)
            if covered != prod(shape):
                raise ValueError("its chunks do not make the whole tensor")
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise damage(folder, f"{INDEX} is wrong about {name} ({error})") from None
    return index
