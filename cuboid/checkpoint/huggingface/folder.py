"""A model's folder from Hugging Face, opened without running anything of it: `config.json` and safetensors.

It may come from a stranger. Nothing is unpickled, names inside it cannot leave it, and what its files say of sizes is
compared with the files before anything is read: the library does so when it opens one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from cuboid.data.store import TOKENIZER
from cuboid.data.tokenizer import tokenizer_files
from cuboid.errors import UserError
from cuboid.readers import Unreadable, open_safetensors, read_bytes, read_json
from cuboid.spec.huggingface import table_from_config
from cuboid.spec.load import as_stored, build_model
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LARGEST_JSON = 1 << 26
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""What weights can be; other types mean something only together with scales, which no model here has."""


@dataclass(frozen=True)
class StoredTensor:
    file: str
    shape: tuple[int, ...]
    dtype: str
    """As the file names it."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ModelFolder:
    """The tensors of a folder, of which any part can be read."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor] | None = None) -> None:
        """`tensors`: what is needed of them, told by the rank that looked at all; then a file is opened when something
        of it is read."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.tensors = self._look_at_all() if tensors is None else tensors

    def _look_at_all(self) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for name in _weight_files(self.folder):
            for tensor, stored in self._tensors_of(name).items():
                if tensor in tensors:
                    raise damaged(self.folder / name, f"{tensor} stands in {tensors[tensor].file} too")
                tensors[tensor] = stored
        return tensors

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = open_safetensors(require_inside(self.folder, name))
        return self._files[name]

    def _tensors_of(self, name: str) -> dict[str, StoredTensor]:
        file, found = self._open(name), {}
        for tensor in file.keys():  # noqa: SIM118, it has no other way
            part = file.get_slice(tensor)
            found[tensor] = StoredTensor(name, tuple(part.get_shape()), part.get_dtype())
        for tensor, stored in found.items():
            if stored.dtype not in ITEM_BYTES:
                path, known = require_inside(self.folder, name), " or ".join(ITEM_BYTES)
                raise UserError(f"{tensor} of {path} has dtype {stored.dtype}; convert it to {known}")
        return found

    def read(self, tensor: str, index: Sequence[slice]) -> Tensor:
        """A part of a tensor; no more of the file is read."""
        # A file has no steps: what lies between is read too, and skipped.
        whole = tuple(slice(each.start, each.stop) for each in index)
        part: Tensor = self._open(self.tensors[tensor].file).get_slice(tensor)[whole]
        return part[tuple(slice(None, None, each.step) for each in index)]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        problem = "has no config.json" if folder.is_dir() else "is no folder"
        raise UserError(f"hf:{folder} {problem}; name a folder with config.json and model.safetensors")
    return _read_json(folder, CONFIG)


def model_of(folder: Path) -> ModelSpec:
    """The model that the folder's config.json describes."""
    return build_model(as_stored(table_from_config(read_config(folder), folder.resolve().name), folder))


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        table = _read_json(folder, INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise damaged(folder / INDEX, "it has no weight_map")
        names = sorted({str(name) for name in table.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise damaged(folder / INDEX, f"it names {name}, which is no safetensors file of the folder")
        return names
    if (folder / SINGLE).exists():
        return [SINGLE]
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        raise UserError(
            f"hf:{folder} holds {pickles[0]}, a pickle that could run code, and no safetensors; convert it where you "
            "trust it, with save_pretrained of transformers"
        )
    raise UserError(f"hf:{folder} holds no {SINGLE}; name a folder with config.json and safetensors")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(require_inside(folder, name), LARGEST_JSON)
    except Unreadable as error:
        raise damaged(folder / name, f"it {error.reason}") from None


def require_inside(folder: Path, name: str) -> Path:
    """Where the file really lies: in the folder or, as in Hugging Face's cache, among the blobs of the same model."""
    real, home = (folder / name).resolve(), folder.resolve()
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not real.is_file():
        raise damaged(folder / name, "it is missing")
    if real.parent not in homes:
        raise damaged(folder / name, "it is a link that leaves the folder")
    return real


def damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; copy the model again")


# What stands beside the weights of an exported model: tokenizer files, and which tokens begin and end a text.


GENERATION = "generation_config.json"
COPIED = (
    TOKENIZER,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION,
)
"""Of the folder a run started from."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Companions:
    note: str
    """Which tokenizer it is, or why there is none."""
    files: dict[str, bytes]
    tokens: dict[str, Any] = field(default_factory=dict)
    """For config.json. All are written out: what a family's default says belongs to another tokenizer."""


def companions(run: Run) -> Companions:
    """Of the model the run started from, unless its data has another tokenizer."""
    made = tokenizer_files(run.data)
    start = Path(run.training.start_from.removeprefix("hf:")) if run.training.start_from.startswith("hf:") else None
    if start is not None and (start / CONFIG).is_file():
        files = {name: read_bytes(require_inside(start, name)) for name in COPIED if (start / name).is_file()}
        if TOKENIZER in files and made.files.get(TOKENIZER, files[TOKENIZER]) == files[TOKENIZER]:
            config = read_config(start)
            return Companions(f"that of hf:{start}", files, {name: config.get(name) for name in TOKENS})
    files = dict(made.files)
    if made.end_of_document is not None:
        files[GENERATION] = json.dumps({"eos_token_id": made.end_of_document}).encode()
    return Companions(made.note, files, {**dict.fromkeys(TOKENS), "eos_token_id": made.end_of_document})
