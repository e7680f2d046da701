"""Builds a store: reads documents, tokenises them in parallel, publishes the whole by one rename.

Killed at any moment and started again, it keeps the parts that were finished, and ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.data.chat import Renderer, find_template
from cuboid.data.documents import Chunk, InputFile, Kind, find_inputs, read_chunks
from cuboid.data.indexed import HashingFile, merge_pairs, token_type
from cuboid.data.store import (
    PREFIX,
    TOKENIZER,
    FileEntry,
    Manifest,
    SourceEntry,
    is_store,
    read_manifest,
    write_manifest,
)
from cuboid.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from cuboid.data.workers import (
    Part,
    aside_of,
    check_workers,
    finished_parts,
    is_build,
    make_parts,
    part_prefix,
    partial_folder,
)
from cuboid.errors import UserError
from cuboid.outputs import check_way
from cuboid.readers import read_bytes

SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 1 << 18, 1 << 26, 2048
"""A chunk is a 2,048th of the input, but not less nor more than this many characters."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    sources: tuple[str, ...]
    output: Path
    tokenizer: str = BYTES
    end_of_document: str | None = None
    kind: Kind = "text"
    field: str = "text"
    """Where rows of JSON Lines, Parquet and datasets hold their text."""
    workers: int = 1
    restart: bool = False
    """Do without the finished parts of an earlier attempt."""


@dataclass(frozen=True)
class BuildReport:
    store: str
    kind: Kind
    tokens: int
    documents: int
    empty_documents: int
    """As the manifest has it."""
    vocabulary: int
    seconds: float
    tokens_per_second: float
    """Of the tokens made now, over the seconds until the last part was finished."""
    resumed_tokens: int
    """Tokens of parts that an earlier attempt had finished."""


@dataclass(frozen=True)
class Progress:
    read: int
    """Bytes of the input whose documents are done, of `total`."""
    total: int
    tokens: int


def build(request: BuildRequest, report: Callable[[Progress], None] = lambda progress: None) -> BuildReport:
    started = time.perf_counter()
    check_workers(request.workers)
    check_way("output=", request.output)
    _check_apart(request.sources, request.output)
    tokenizer = load_tokenizer(request.tokenizer, request.end_of_document)
    files = find_inputs(request.sources)
    plan = _plan(request, tokenizer, files)
    identity = _identity(plan)
    if request.output.exists():
        return _existing(request.output, identity)
    with partial_folder(request.output, plan, request.restart) as folder:
        parts = finished_parts(folder)
        resumed = sum(part.tokens for part in parts.values())
        _complete(request, files, folder, parts, plan["chunk"], report)
        tokenised = time.perf_counter()
        manifest = _assemble(folder, parts, request, tokenizer, files, identity)
        _publish(folder / "store", request.output)
    speed = (manifest.tokens - resumed) / (tokenised - started)
    return _report(request.output, manifest, time.perf_counter() - started, speed, resumed)


def _check_apart(sources: tuple[str, ...], output: Path) -> None:
    """A store inside a folder that is read would be read by the next build of that folder."""
    for source in sources:
        if Path(source).is_dir() and output.resolve().is_relative_to(Path(source).resolve()):
            raise UserError(f"output={output} is inside {source}, which is read; use a folder outside it")


def _plan(request: BuildRequest, tokenizer: Tokenizer, files: list[InputFile]) -> dict[str, Any]:
    """What parts must have in common to be merged."""
    total = sum(file.size for file in files)
    chat = find_template(request.tokenizer) if request.kind == "completions" else None
    if chat is not None:
        with Renderer(chat) as renderer:
            renderer.require_end()
    return {
        **({"chat": hashlib.sha256(f"{chat.source}{chat.tokens}".encode()).hexdigest()} if chat else {}),
        "kind": request.kind,
        "field": request.field,
        "tokenizer": tokenizer.fingerprint,
        "chunk": min(max(total // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK),
        "sources": [[file.name, file.size, file.fingerprint, file.modified] for file in files],
    }


def _identity(plan: dict[str, Any]) -> str:
    """What decides the bytes: neither the size of a chunk nor when a file was changed does."""
    lasting = {**plan, "chunk": 0, "sources": [source[:3] for source in plan["sources"]]}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()


def _existing(output: Path, identity: str) -> BuildReport:
    if is_store(output):
        manifest = read_manifest(output)
        if manifest.build == identity:
            if is_build(aside_of(output)):
                shutil.rmtree(aside_of(output), ignore_errors=True)
            return _report(output, manifest, 0.0, 0.0, manifest.tokens)
    raise UserError(f"output={output} exists already; use another name, or remove it first")


def _complete(
    request: BuildRequest,
    files: list[InputFile],
    folder: Path,
    parts: dict[int, Part],
    size: int,
    report: Callable[[Progress], None],
) -> None:
    """Adds to `parts` those that are missing."""
    total = sum(file.size for file in files)
    tokens = sum(part.tokens for part in parts.values())
    first = 0
    while first in parts:
        first += 1
    file, row = parts[first - 1].end if first else (0, 0)
    read = parts[first - 1].read if first else 0

    def missing() -> Iterator[Chunk]:
        for chunk in read_chunks(files, request.kind, request.field, size, (file, row), first, renderer):
            if chunk.number not in parts:
                yield chunk

    def done(chunk: Chunk, part: Part) -> None:
        nonlocal tokens, read
        parts[chunk.number] = part
        tokens += part.tokens
        read = max(read, part.read)
        report(Progress(read, total, tokens))

    report(Progress(read, total, tokens))
    chat = find_template(request.tokenizer) if request.kind == "completions" else None
    with Renderer(chat) if chat is not None else nullcontext() as renderer:
        make_parts(missing(), folder, (request.tokenizer, request.end_of_document), request.workers, done)
    report(Progress(total, total, tokens))


def _assemble(
    folder: Path,
    parts: dict[int, Part],
    request: BuildRequest,
    tokenizer: Tokenizer,
    files: list[InputFile],
    identity: str,
) -> Manifest:
    """The whole store, in a folder that still has another name."""
    if not any(part.documents for part in parts.values()):
        lacking, instead = "text", "files with text in them"
        if request.kind == "completions":
            lacking, instead = "answer to learn", "rows with a completion, or with messages of the assistant"
        raise UserError(f"source={' '.join(request.sources)} holds no {lacking}; name {instead}")
    target = folder / "store"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    held = [part_prefix(folder, number) for number in range(len(parts)) if parts[number].documents]
    written: dict[str, HashingFile] = merge_pairs(held, target / PREFIX)
    entries = {name: FileEntry(size=file.size, sha256=file.checksum) for name, file in written.items()}
    if request.tokenizer != BYTES:
        data = read_bytes(tokenizer.name)
        (target / TOKENIZER).write_bytes(data)
        entries[TOKENIZER] = FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(
        kind=request.kind,
        tokens=sum(part.tokens for part in parts.values()),
        documents=sum(part.documents for part in parts.values()),
        sequences=sum(part.sequences for part in parts.values()),
        empty_documents=sum(part.empty for part in parts.values()),
        type=token_type(tokenizer.vocabulary).name,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        tokenizer=tokenizer.fingerprint,
        build=identity,
        files=entries,
        sources=tuple(SourceEntry(name=file.name, size=file.size, fingerprint=file.fingerprint) for file in files),
    )
    write_manifest(target, manifest)
    return manifest


def _publish(folder: Path, output: Path) -> None:
    """One rename, after all bytes are on the disk."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    try:
        folder.rename(output)
    except OSError as error:
        raise UserError(f"output={output} cannot be written: {error.strerror}; use another name") from None


def _report(output: Path, manifest: Manifest, seconds: float, speed: float, resumed: int) -> BuildReport:
    return BuildReport(
        store=str(output),
        kind=manifest.kind,
        tokens=manifest.tokens,
        documents=manifest.documents,
        empty_documents=manifest.empty_documents,
        vocabulary=manifest.vocabulary,
        seconds=seconds,
        tokens_per_second=speed,
        resumed_tokens=resumed,
    )
