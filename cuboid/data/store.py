"""A store: a folder with a Megatron pair of tokens, the tokenizer that made them, and a manifest that describes both.

    STORE/manifest.json  tokens.bin  tokens.idx  [tokenizer.json]

A store may come from a stranger: nothing in it is executed or unpickled, no name in it is followed, and sizes are
compared with the files before anything is mapped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from cuboid.data.indexed import IndexedTokens, check_pair, damaged, largest_token, open_pair
from cuboid.errors import UserError
from cuboid.readers import Unreadable, plain_file, read_json
from cuboid.spec.coding import decode

MANIFEST = "manifest.json"
PREFIX = "tokens"
TOKENIZER = "tokenizer.json"
FILES = (f"{PREFIX}.bin", f"{PREFIX}.idx", TOKENIZER)
LARGEST_MANIFEST = 1 << 28
BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    name: str
    size: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: Literal["cuboid-store"] = "cuboid-store"
    version: int = 1
    kind: Literal["text", "completions"] = "text"
    """completions: every second sequence is a completion, the others are prompts."""
    tokens: int
    documents: int
    sequences: int
    empty_documents: int = 0
    """Documents without text, or of completions rows without an answer, skipped."""
    type: str
    """Of a token, by numpy's name."""
    vocabulary: int
    """Every token is below."""
    end_of_document: int
    tokenizer: str
    """Equal for tokenizers that give equal tokens."""
    build: str
    """Equal for builds of the same sources in the same way."""
    files: dict[str, FileEntry] = field(hash=False)
    sources: tuple[SourceEntry, ...]


@dataclass(frozen=True)
class Store:
    folder: Path
    manifest: Manifest
    tokens: IndexedTokens


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    _require_inside(path, folder)
    try:
        table = read_json(path, LARGEST_MANIFEST)
        if table.get("version") != Manifest.version:
            raise UserError(f"its version is {table.get('version')}, not {Manifest.version}")
        manifest = decode(Manifest, table)
    except Unreadable as error:
        raise damaged(path, f"it {error.reason}") from None
    except UserError as error:
        raise damaged(path, str(error)) from None
    for name in manifest.files:
        if name not in FILES:
            raise damaged(path, f"it names the file {name}, which no store has")
    for name in FILES[:2]:
        if name not in manifest.files:
            raise damaged(path, f"it does not name {name}")
    return manifest


def open_store(folder: str | Path) -> Store:
    """Maps the tokens. Files have the sizes the manifest says; that their bytes are right, only `check_store` knows."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    _check_sizes(folder, manifest)
    pair = open_pair(folder / PREFIX)
    counts: dict[str, object] = {"tokens": len(pair.tokens), "documents": pair.documents, "sequences": pair.sequences}
    counts |= {"type": pair.tokens.dtype.name}
    for name, found in counts.items():
        if getattr(manifest, name) != found:
            raise damaged(folder / MANIFEST, f"it says {name}={getattr(manifest, name)}, but tokens.idx says {found}")
    if manifest.kind == "completions" and pair.sequences % 2:
        raise damaged(folder / f"{PREFIX}.idx", "a prompt has no completion")
    return Store(folder, manifest, replace(pair, name=str(folder)))


def check_store(folder: str | Path) -> Store:
    """Reads every byte: checksums, the index, and that every token is in the vocabulary."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    _check_sizes(folder, manifest)
    # Before the index is believed, which may blame the tokens for its own damage.
    for name, entry in manifest.files.items():
        if (found := checksum(folder / name)) != entry.sha256:
            raise damaged(folder / name, f"its checksum is {found[:12]}…, not {entry.sha256[:12]}…")
    store = open_store(folder)
    check_pair(store.folder / PREFIX)
    largest = largest_token(store.tokens, len(store.tokens.tokens))
    if largest >= store.manifest.vocabulary:
        raise damaged(store.folder / f"{PREFIX}.bin", f"token {largest} is not in {store.manifest.vocabulary} tokens")
    return store


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        _require_inside(path, folder)
        if path.stat().st_size != entry.size:
            raise damaged(path, f"it has {path.stat().st_size:,} bytes, not {entry.size:,}")


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with plain_file(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _require_inside(path: Path, folder: Path) -> None:
    if not path.is_file():
        raise damaged(path, "it is missing")
    if path.resolve().parent != folder.resolve():
        raise damaged(path, "it is a link that leaves the folder")
