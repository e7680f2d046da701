"""What a checkpoint says of itself, read without running anything of it.

A checkpoint may come from a stranger: only plain files of known names are opened, nothing in them is unpickled, and
every size is compared with the file before anything is read or allocated."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Protocol

from cuboid import __version__
from cuboid.checkpoint.location import Location, locate
from cuboid.errors import UserError
from cuboid.readers import parse_json, parse_toml
from cuboid.spec.run import Run, build_run
from cuboid.spec.train_state import from_table

# Checksums of a checkpoint's files, spelled `kind:digits`. They find damage, and cost a tenth of what writing costs;
# a checkpoint made to deceive is met by never running anything of it, not by its checksums.


FAST, PLAIN = "xxh3_128", "blake2b_128"
"""XXH3 where its package is installed; what comes with Python elsewhere."""

Watch = Callable[[int], None]
"""Is told of bytes as they are read."""


class Digest(Protocol):
    def update(self, content: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


@cache
def kind_here() -> str:
    return FAST if find_spec("xxhash") else PLAIN


def kind_of(checksum: str) -> str:
    return checksum.partition(":")[0]


def new_digest(kind: str) -> Digest:
    if kind == PLAIN:
        return partial(hashlib.blake2b, digest_size=16)()
    try:
        import xxhash
    except ImportError:
        raise UserError("this checkpoint's checksums are xxh3_128, which needs a package; pip install xxhash") from None
    return xxhash.xxh3_128()


def spell(kind: str, digest: Digest) -> str:
    return f"{kind}:{digest.hexdigest()}"


def checksum_of_bytes(content: bytes | memoryview, kind: str = "") -> str:
    kind = kind or kind_here()
    digest = new_digest(kind)
    digest.update(content)
    return spell(kind, digest)


def checksum_of_file(place: Location, size: int, kind: str, watch: Watch | None = None) -> str:
    digest = new_digest(kind)
    place.files.prefetch(place.path)
    buffer = memoryview(bytearray(min(place.files.read_size, size)))
    for position in range(0, size, place.files.read_size):
        part = buffer[: size - position]
        place.files.read_into(place.path, position, part)
        digest.update(part)
        if watch is not None:
            watch(part.nbytes)
    return spell(kind, digest)


MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = 3
STEP_FOLDER = re.compile(r"step-([0-9]{8,18})")
DATA_FILE = re.compile(r"data-[0-9]{5,9}\.bin")
CHECKSUM = re.compile(f"({FAST}|{PLAIN}):[0-9a-f]{{32}}")
LARGEST = 1 << 30
"""Bytes of JSON that are read at all; a model of a trillion parameters on ten thousand ranks needs less."""
COUNTS = range(1 << 62)


def data_file(rank: int) -> str:
    return f"data-{rank:05d}.bin"


class Damage(UserError):
    """A checkpoint is not what it says; names the file and the reason."""

    def __init__(self, folder: object, file: str, reason: str) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {file} {reason}; use another checkpoint")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return UserError, (str(self),)  # ranks tell one another in words


Place = str | os.PathLike[str] | Location


@dataclass(frozen=True)
class StoredFile:
    """What a file must be."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    """Optimizer steps done; with the global batch this is also the position in the data."""
    updates: int
    """Times the optimizer changed the parameters: fewer, where a step was not finite and skipped."""
    position: int
    """Samples consumed, in the global order."""
    data: str
    """Which samples, in which order: the identity a run must share to continue from here."""
    layout: str
    """The layout that wrote it, for people; any layout can read it."""
    run: str
    """The run as TOML."""
    version: str = __version__
    written: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When its state was taken."""
    torch_version: str = field(default_factory=lambda: metadata.version("torch"))
    files: dict[str, StoredFile] = field(default_factory=dict, hash=False)
    course: dict[str, Any] = field(default_factory=dict, hash=False)
    """`spec.train_state.Course`: batches skipped and the numbers of the latest steps; absent where nothing of it
    matters."""

    def render(self, kind: str = "") -> bytes:
        """`kind`: of its own checksum; default: the best there is here."""
        table = {"format": FORMAT, **asdict(self)}
        if not self.course:
            del table["course"]
        table["checksum"] = checksum_of_bytes(json.dumps(table).encode(), kind)
        return json.dumps(table, indent=1).encode()


def read_json(folder: Location, name: str) -> tuple[bytes, dict[str, Any]]:
    """A table, and the bytes that spell it."""
    content = read_content(folder, name)
    try:
        table = parse_json(content)
    except ValueError as error:
        raise Damage(folder, name, f"is no JSON ({error})") from None
    if not isinstance(table, dict):
        raise Damage(folder, name, "is no table")
    return content, table


def read_content(folder: Location, name: str) -> bytes:
    """A file of a bounded size, here or in a store."""
    try:
        size = require_plain(folder, name)
        if size > LARGEST:
            raise Damage(folder, name, f"has {size:,} bytes, more than any such file")
        return (folder / name).read()
    except OSError as error:
        raise Damage(folder, name, f"cannot be read ({error})") from None


def require_plain(folder: Location, name: str) -> int:
    """The size of a file; a link may lead anywhere, and a pipe never ends."""
    size = (folder / name).size
    if size is None:
        raise Damage(folder, name, "is no plain file" if name in folder.names() else "is missing")
    return size


def read_manifest(place: Place) -> Manifest:
    """A `Damage` if a single byte of it is not what was written."""
    folder = locate(place)
    content, table = read_json(folder, MANIFEST)
    if table.get("format") != FORMAT:
        raise Damage(folder, MANIFEST, f"has format {table.get('format')!r}, not {FORMAT}")
    try:
        values = {each.name: table[each.name] for each in fields(Manifest) if each.name != "course"}
        values["course"] = table.get("course", {})
        values["files"] = {name: StoredFile(**facts) for name, facts in table["files"].items()}
        manifest = Manifest(**values)
    except KeyError as error:
        raise Damage(folder, MANIFEST, f"lacks {error}") from None
    except (TypeError, AttributeError):
        raise Damage(folder, MANIFEST, "has files that are no table of bytes and checksum") from None
    own = table.get("checksum")
    if not isinstance(own, str) or not CHECKSUM.fullmatch(own) or manifest.render(kind_of(own)) != content:
        raise Damage(folder, MANIFEST, "does not match its checksum")
    _check_values(folder, manifest)
    return manifest


def run_of(checkpoint: Location, manifest: Manifest) -> Run:
    """The run that wrote a checkpoint."""
    return parse_run(checkpoint, MANIFEST, manifest.run)


def parse_run(folder: Location, name: str, text: str) -> Run:
    """A run as a file in a folder of checkpoints has it."""
    try:
        return build_run(parse_toml(text))
    except (ValueError, UserError) as error:
        raise Damage(folder, name, f"holds no run ({error})") from None


def _check_values(folder: Location, manifest: Manifest) -> None:
    for each in fields(Manifest):
        value = getattr(manifest, each.name)
        if each.type == "int" and (type(value) is not int or value not in COUNTS):
            raise Damage(folder, MANIFEST, f"has a {each.name} that is no count")
        if each.type == "str" and not isinstance(value, str):
            raise Damage(folder, MANIFEST, f"has a {each.name} that is no text")
    try:
        from_table(manifest.course)
    except ValueError as error:
        raise Damage(folder, MANIFEST, f"has a course that {error}") from None
    if INDEX not in manifest.files:
        raise Damage(folder, MANIFEST, f"does not name {INDEX}")
    for name, facts in manifest.files.items():
        if name != INDEX and not DATA_FILE.fullmatch(name):
            raise Damage(folder, MANIFEST, f"names {name!r}, which is no file of a checkpoint")
        if type(facts.bytes) is not int or facts.bytes not in COUNTS:
            raise Damage(folder, MANIFEST, f"has a size of {name} that is none")
        if not isinstance(facts.checksum, str) or not CHECKSUM.fullmatch(facts.checksum):
            raise Damage(folder, MANIFEST, f"has a checksum of {name} that is none")
