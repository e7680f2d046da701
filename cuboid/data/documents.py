"""Documents of input files, as texts to be tokenised: plain documents, or prompts and completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cuboid.data.inputs import InputFile
from cuboid.data.readers import Row, read_rows
from cuboid.errors import UserError

Kind = Literal["text", "completions"]
Document = tuple[str, ...]
"""Of kind text: the text. Of kind completions: a prompt, its completion, and so on in turns."""

COMPLETION_FIELDS = ("prompt", "completion", "messages")


@dataclass
class Chunk:
    """Consecutive documents: the piece of work of one process, decided by the input alone."""

    number: int
    documents: list[Document] = field(default_factory=list)
    end: tuple[int, int] = (0, 0)
    """Where the next chunk begins: number of the input file, and of the row in it."""
    empty: int = 0
    """Documents without any text, which are omitted."""
    read: int = 0
    """Bytes of all input files read up to here."""


def read_chunks(
    files: Sequence[InputFile], kind: Kind, column: str, size: int, start: tuple[int, int] = (0, 0), number: int = 0
) -> Iterator[Chunk]:
    """Chunks of at least `size` characters, from a place where a chunk begins; the same whenever they are read."""
    columns = (column,) if kind == "text" else COMPLETION_FIELDS
    chunk, held = Chunk(number), 0
    before = sum(file.size for file in files[: start[0]])
    for index in range(start[0], len(files)):
        file = files[index]
        for row in read_rows(file, columns, start[1] if index == start[0] else 0):
            document = (_field(file, row, column),) if kind == "text" else _turns(file, row)
            length = sum(map(len, document))
            if length:
                chunk.documents.append(document)
            else:
                chunk.empty += 1
            held += length
            chunk.end, chunk.read = (index, row.number + 1), before + row.position
            if held >= size:
                yield chunk
                chunk, held = Chunk(chunk.number + 1), 0
        before += file.size
    if chunk.documents or chunk.empty:
        yield chunk


def _turns(file: InputFile, row: Row) -> Document:
    if row.values.get("messages") is not None:
        return _conversation(file, row)
    if file.format == "text":
        raise UserError(f"{file.path} is text without prompts; use JSON Lines with the fields prompt and completion")
    return _field(file, row, "prompt"), _field(file, row, "completion")


def _conversation(file: InputFile, row: Row) -> Document:
    """Messages in the form of ChatML; what the assistant says, and the mark that ends it, is to be learned."""
    texts, prompt = [], ""
    messages = row.values["messages"]
    for message in messages if isinstance(messages, list) else [None]:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{_place(file, row)} has messages without role and content; write both as strings")
        if role == "assistant":
            texts += [f"{prompt}<|im_start|>assistant\n", f"{content}<|im_end|>\n"]
            prompt = ""
        else:
            prompt += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    # A last question without answer teaches nothing.
    return tuple(texts)


def _field(file: InputFile, row: Row, name: str) -> str:
    value: Any = row.values.get(name)
    if isinstance(value, str):
        return value
    if name in row.values:
        raise UserError(f"{_place(file, row)} has field {name} of type {type(value).__name__}; it must be a string")
    raise UserError(f"{_place(file, row)} has no field {name}; it has {', '.join(row.values) or 'none'}")


def _place(file: InputFile, row: Row) -> str:
    return f"{file.path} row {row.number + 1}"
