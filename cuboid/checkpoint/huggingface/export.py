"""A checkpoint as a folder that `from_pretrained` of transformers loads; written aside, published by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.huggingface.folder import companions
from cuboid.checkpoint.manifest import Place, run_of
from cuboid.checkpoint.shards import ShardedTensor, TensorSlice
from cuboid.checkpoint.state import AVERAGE, PARAMETER
from cuboid.checkpoint.weights import Weights, find_checkpoint
from cuboid.errors import UserError
from cuboid.model.huggingface import Origin, from_huggingface, parameter_shapes, to_huggingface
from cuboid.outputs import check_way
from cuboid.spec.huggingface_writer import config_from_model
from cuboid.spec.run import Run

# Safetensors files written one at a time: memory holds one of them and no more.
#
# A file is eight bytes with the length of its header, the header as JSON (each tensor's dtype, shape and place), and
# the tensors one after another. It is written here and not by the library, because then the tensors of a file lie in
# one buffer that is filled in place.


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


SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True)
class ExportReport:
    checkpoint: str
    folder: str
    step: int
    parameters: int
    dtype: str
    files: tuple[str, ...]
    """Those with weights."""
    bytes: int
    """Of the weights."""
    tokenizer: str
    """Which it is, or why there is none."""
    warnings: tuple[str, ...]
    """About newer checkpoints that are damaged."""


def export_model(
    source: Place,
    target: Path,
    dtype: str | None = None,
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int, int], None] = lambda done, total: None,
    average: bool = False,
) -> ExportReport:
    """Weights in `dtype`; skipped, bf16 of a run that computed in it and float32 of every other. `progress` is told
    how many files of all are written. `average`: not the weights, but their moving average."""
    check_way("hf:", target)
    if target.exists() or target.is_symlink():
        raise UserError(f"hf:{target} exists already; name a folder that does not")
    checkpoint, manifest, warnings = find_checkpoint(source)
    run = run_of(checkpoint, manifest)
    if average and not run.optimizer.average:
        raise UserError(f"{checkpoint} has no average of weights; train with optimizer.average=0.999 or omit --average")
    dtype = dtype or ("bf16" if run.training.weights == "bf16" else "float32")
    aside = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        weights = Weights(checkpoint, run.model, kind=AVERAGE if average else PARAMETER)
        shards = _write_weights(run, weights, aside, dtype, shard_size, progress)
        tokenizer = _write_rest(run, aside, dtype)
        os.rename(aside, target)
    except OSError as error:
        raise UserError(f"hf:{target} cannot be written: {error.strerror}; use another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    names = tuple(shard.name for shard in shards)
    size = sum(prod(shape) for shard in shards for shape in shard.tensors.values()) * DTYPES[dtype][1].itemsize
    return ExportReport(
        str(checkpoint),
        str(target),
        manifest.step,
        run.model.parameters,
        dtype,
        names,
        size,
        tokenizer,
        tuple(warnings),
    )


def _write_weights(
    run: Run, weights: Weights, folder: Path, dtype: str, shard_size: int, progress: Callable[[int, int], None]
) -> list[Shard]:
    origins: dict[str, dict[str, Origin]] = {}
    for parameter, places in from_huggingface(run.model).items():
        for origin in places:
            origins.setdefault(origin.tensor, {})[parameter] = origin
    shapes = {}
    for name, target in to_huggingface(run.model).items():
        # A tied head is skipped, as Hugging Face itself leaves it out; prediction layers have their copies.
        if target.copy_of is None or name != "lm_head.weight":
            shapes[name] = target.shape
            origins.setdefault(name, origins.get(target.copy_of or name, {}))
    ours = parameter_shapes(run.model)
    item_size = DTYPES[dtype][1].itemsize
    shards = plan_shards(shapes, item_size, shard_size)
    for done, shard in enumerate(shards):
        progress(done, len(shards))
        buffer = ShardBuffer(shard, dtype)
        wanted: dict[str, ShardedTensor] = {}
        for name, values in buffer.tensors.items():
            for parameter, origin in origins[name].items():
                held = wanted[parameter].slices if parameter in wanted else ()  # other experts in the same file
                tensor_slice = TensorSlice(*origin.bounds, 0)
                wanted[parameter] = ShardedTensor(
                    ours[parameter], values.dtype, (*held, (tensor_slice, origin.take(values)))
                )
        weights.read(wanted)
        buffer.write(folder / shard.name)
    progress(len(shards), len(shards))
    if len(shards) > 1:
        table = {
            "metadata": {"total_size": sum(map(prod, shapes.values())) * item_size},
            "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
        }
        _write_json(folder / "model.safetensors.index.json", table)
    return shards


def _write_rest(run: Run, folder: Path, dtype: str) -> str:
    """Configuration and tokenizer; returns what is to be said of the latter."""
    beside = companions(run)
    for name, content in beside.files.items():
        (folder / name).write_bytes(content)
    precision = str(DTYPES[dtype][1]).removeprefix("torch.")
    _write_json(folder / "config.json", config_from_model(run.model) | beside.tokens | {"torch_dtype": precision})
    return beside.note


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
