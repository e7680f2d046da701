"""What a generation is asked of: a run, a checkpoint or a folder of Hugging Face, as a model, its weights and its
words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cuboid.checkpoint.huggingface.folder import CONFIG, COPIED, ModelFolder, companions, model_of, require_inside
from cuboid.checkpoint.manifest import run_of
from cuboid.checkpoint.weights import PREFIX, Weights, check_weights, find_checkpoint
from cuboid.data.store import TOKENIZER
from cuboid.data.tokenizer import BYTES, byte_tokenizer, load_tokenizer
from cuboid.errors import UserError
from cuboid.generate.detokenizer import Words, words_of
from cuboid.generate.own import check_logits
from cuboid.readers import read_bytes, read_text
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run


@dataclass(frozen=True)
class Target:
    model: ModelSpec
    weights: str
    """hf:FOLDER, or the one checkpoint that was meant."""
    precision: str
    """In which it was trained; float32 where that is unknown."""
    words: Words
    run: Run | None
    """That wrote the checkpoint."""
    data: str = ""
    """The identity of what it was trained on; empty where that is unknown."""
    notes: tuple[str, ...] = ()
    """About newer checkpoints that are damaged."""

    def __post_init__(self) -> None:
        if isinstance(self.model, PythonModelSpec):
            check_logits(self.model)


def find_target(place: str, tokenizer: str | None = None) -> Target:
    """`tokenizer`: byte, a tokenizer.json or a folder with one, in place of what the model brings."""
    if place.startswith(PREFIX):
        folder = Path(place.removeprefix(PREFIX))
        model = model_of(folder)
        check_weights(ModelFolder(folder), model)
        names = [name for name in (*COPIED, CONFIG) if (folder / name).is_file()]
        words = words_of({name: read_bytes(require_inside(folder, name)) for name in names}, begins=True)
        return Target(model, place, "float32", _other(words, tokenizer), None)
    if "://" not in place and not Path(place).is_dir():
        problem = "is a file" if Path(place).exists() else "does not exist"
        raise UserError(f"{place} {problem}; name a run's folder, one of its checkpoints, or hf:FOLDER")
    found, manifest, damaged = find_checkpoint(place)
    run = run_of(found, manifest)
    Weights(found, run.model)
    words = words_of(companions(run).files, begins=False)
    words = _other(words, tokenizer)
    return Target(run.model, str(found), run.training.weights, words, run, manifest.data, tuple(damaged))


def _other(words: Words, tokenizer: str | None) -> Words:
    if tokenizer is None:
        return words
    ends = (load_tokenizer(tokenizer).end_of_document,)
    if tokenizer == BYTES:
        return Words(json.dumps(byte_tokenizer()), ends)
    path = Path(tokenizer) / TOKENIZER if Path(tokenizer).is_dir() else Path(tokenizer)
    return Words(read_text(path), words.ends or ends, words.begins)
