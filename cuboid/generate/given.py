"""The tokens of data that a model is measured on: of any source a training can have, or of a file of text."""

from __future__ import annotations

from pathlib import Path

from cuboid.data.indexed import pair_paths
from cuboid.data.opened import open_source
from cuboid.errors import UserError
from cuboid.generate.detokenizer import Words


def read_tokens(source: str, count: int, words: Words, vocabulary: int) -> list[int]:
    """The first `count` of them."""
    path = Path(source)
    if path.is_file() and not any(half.is_file() for half in pair_paths(path)):
        if not words.tokenizer:
            raise UserError(f"data={source} is text and the model has no tokenizer; use --tokenizer byte or FOLDER")
        try:
            found = list(words.encode(path.read_text(encoding="utf-8")))[:count]
        except UnicodeDecodeError:
            raise UserError(f"data={source} is not UTF-8 text; name a file of text, or a store") from None
    else:
        if source == "synthetic":
            raise UserError("data=synthetic is no text; use python-stdlib, a store or a file of text")
        found = open_source(source).tokens.tokens[:count].tolist()
    if len(found) < 2:
        raise UserError(f"data={source} has {len(found)} tokens, of which none follows another; use longer text")
    if max(found) >= vocabulary:
        raise UserError(f"data={source} holds token {max(found)}, not below the model's vocab={vocabulary}")
    return found
