"""What stands beside the weights of an exported model: tokenizer files, and which tokens begin and end a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuboid.checkpoint.huggingface.folder import CONFIG, read_config, require_inside
from cuboid.data.store import TOKENIZER
from cuboid.data.tokenizer import tokenizer_files
from cuboid.spec.run import Run

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
        files = {name: require_inside(start, name).read_bytes() for name in COPIED if (start / name).is_file()}
        if TOKENIZER in files and made.files.get(TOKENIZER, files[TOKENIZER]) == files[TOKENIZER]:
            config = read_config(start)
            return Companions(f"that of hf:{start}", files, {name: config.get(name) for name in TOKENS})
    files = dict(made.files)
    if made.end_of_document is not None:
        files[GENERATION] = json.dumps({"eos_token_id": made.end_of_document}).encode()
    return Companions(made.note, files, {**dict.fromkeys(TOKENS), "eos_token_id": made.end_of_document})
