"""Workers that turn chunks of documents into finished parts: threads of this process first, then processes.

The tokenizers library works outside Python's lock, so that a few threads keep as many cores busy and need no time to
start. Beyond these a worker is a process, which is there while others work already; it ends when its pipe closes, so
that none outlives the build, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from os.path import lexists
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cuboid.data.documents import Chunk
from cuboid.data.indexed import pair_paths, token_type, write_pair
from cuboid.data.store import checksum
from cuboid.data.tokenizer import Tokenizer, load_tokenizer
from cuboid.errors import RankError, UserError
from cuboid.readers import read_json, read_text
from cuboid.spec.coding import decode

# The unfinished build of a store: what it will hold, and the parts that are finished.
#
#     STORE.partial/plan.json  parts/000000.bin  parts/000000.idx  parts/000000.json
#
# A part is finished when its .json is there, which is written last and holds the checksums of the others.


PLAN = "plan.json"


@dataclass(frozen=True)
class Part:
    """What is known of a finished part."""

    tokens: int
    documents: int
    sequences: int
    empty: int
    end: tuple[int, ...]
    """Where the next chunk of the input begins: number of the file, number of the row."""
    read: int
    """Bytes of the input read up to there."""
    checksums: tuple[str, ...]
    """Of its tokens and its index; none when it has no document."""


def part_prefix(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}"


def write_part(folder: Path, chunk: Chunk, tokenizer: Tokenizer) -> Part:
    """Tokenises a chunk. Files get their names when they are whole: two processes may even do the same part."""
    prefix = part_prefix(folder, chunk.number)
    aside = Path(f"{prefix}.{os.getpid()}")
    arrays = iter(tokenizer.encode([text for document in chunk.documents for text in document]))
    documents = [[next(arrays) for _ in document] for document in chunk.documents]
    for sequences in documents:
        sequences[-1] = np.append(sequences[-1], tokenizer.end_of_document)
    part = Part(0, 0, 0, chunk.empty, chunk.end, chunk.read, ())
    if documents:
        pair = write_pair(aside, documents, token_type(tokenizer.vocabulary))
        checksums = tuple(checksum(path) for path in pair_paths(aside))
        part = Part(len(pair.tokens), pair.documents, pair.sequences, chunk.empty, chunk.end, chunk.read, checksums)
        for written, name in zip(pair_paths(aside), pair_paths(prefix), strict=True):
            written.replace(name)
    record = Path(f"{aside}.json")
    record.write_text(json.dumps(asdict(part)))
    record.replace(f"{prefix}.json")
    return part


def finished_parts(folder: Path) -> dict[int, Part]:
    """Number -> part, of those whose files have the checksums their record says."""
    found = {}
    for record in sorted((folder / "parts").glob("[0-9]*.json")):
        number = record.stem
        if not number.isdigit():
            continue
        try:
            part = decode(Part, read_json(record))
            paths = pair_paths(record.with_suffix("")) if part.documents else ()
            if part.checksums == tuple(checksum(path) for path in paths):
                found[int(number)] = part
        except (OSError, ValueError, UserError):
            continue  # cut short: it is done again
    return found


def aside_of(output: Path) -> Path:
    """Where a store is built."""
    return output.with_name(f"{output.name}.partial")


def is_build(folder: Path) -> bool:
    """Whether it holds what an unfinished build does, and nothing of anybody else's."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(name in (PLAN, "parts", "lock", "store") or name.startswith(f"{PLAN}.") for name in os.listdir(folder))


@contextmanager
def partial_folder(output: Path, plan: Mapping[str, Any], restart: bool) -> Iterator[Path]:
    """The folder beside the store-to-be, held by one process alone; refused when it holds another build's parts."""
    folder = aside_of(output)
    if lexists(folder) and not is_build(folder):
        raise UserError(f"{folder} is no unfinished build, and would be removed; use another output, or rename it")
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={output} cannot be written: {error.strerror}; use another folder") from None
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"output={output} is being built by another process; wait for it, or use another") from None
        _claim(folder, output, plan)
        try:
            yield folder
        except BaseException:
            if not _has_parts(folder):
                shutil.rmtree(folder)  # nothing to continue from
            raise
        shutil.rmtree(folder)


def _claim(folder: Path, output: Path, plan: Mapping[str, Any]) -> None:
    path = folder / PLAN
    text = json.dumps(plan, indent=1, sort_keys=True)
    if not path.exists() or not _has_parts(folder):
        aside = folder / f"{PLAN}.{os.getpid()}"
        aside.write_text(text)
        aside.replace(path)
    elif read_text(path) != text:
        raise UserError(
            f"{folder} holds parts of {output} from other sources or another tokenizer; "
            "use --restart to do without them, or another output"
        )


def _has_parts(folder: Path) -> bool:
    return any((folder / "parts").glob("*.json"))


THREADS = 8
"""Workers that are threads: what each does inside Python's lock is about a twentieth of its work."""

WORKER_BYTES = 19 << 20
"""Memory that a worker process has to itself (USS), at least: 19 MiB for bytes, 25 MiB with a small tokenizer."""

TokenizerName = tuple[str, str | None]
"""What `load_tokenizer` takes: a process loads its own."""
Work = Callable[[Chunk], Part]


def check_workers(workers: int) -> None:
    """Refuse more processes than memory holds."""
    if workers < 1:
        raise UserError(f"workers={workers} is too few; use workers=1 or more")
    processes, free = max(0, workers - THREADS), psutil.virtual_memory().available
    if processes * WORKER_BYTES > free:
        raise UserError(
            f"workers={workers} take at least {processes * WORKER_BYTES / 1e9:.3g} GB of memory, and {free / 1e9:.3g} "
            f"GB are free; use workers={THREADS + free // WORKER_BYTES} or less"
        )


def make_parts(
    chunks: Iterator[Chunk],
    folder: Path,
    name: TokenizerName,
    workers: int,
    done: Callable[[Chunk, Part], None],
) -> None:
    """Has every chunk made a part; calls `done` for each, in any order, never twice at once."""
    reading, reporting = threading.Lock(), threading.Lock()
    errors: list[BaseException] = []
    tokenizer = load_tokenizer(*name)

    def take() -> Chunk | None:
        with reading:
            return next(chunks, None) if not errors else None

    def work(number: int) -> None:
        try:
            if (chunk := take()) is None:  # a small input starts no process for nothing
                return
            with _thread(folder, tokenizer) if number < THREADS else _process(folder, name) as make:
                while chunk is not None:
                    part = make(chunk)
                    with reporting:
                        done(chunk, part)
                    chunk = take()
        except BaseException as error:
            errors.append(error)

    with _one_thread_per_call():
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: nobody takes another chunk
            errors.append(error)
            raise
    if errors:
        raise errors[0]


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """The workers are the parallelism: the library, which knows no other way to be told, starts no threads."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextmanager
def _thread(folder: Path, tokenizer: Tokenizer) -> Iterator[Work]:
    yield lambda chunk: _make(folder, chunk, tokenizer)


@contextmanager
def _process(folder: Path, name: TokenizerName) -> Iterator[Work]:
    # Spawned, not forked: a fork would inherit the pipes of its siblings and keep them open.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder, name), daemon=True)
    process.start()
    theirs.close()

    def make(chunk: Chunk) -> Part:
        try:
            ours.send(chunk)
            answer: Any = ours.recv()
        except (EOFError, ConnectionError):
            raise RankError("a worker of the build died; run the same command again to continue") from None
        if isinstance(answer, Part):
            return answer
        raise answer

    try:
        yield make
    finally:
        ours.close()
        process.terminate()  # it has nothing left to do, and may still be starting
        process.join()


def _serve(pipe: Connection, folder: Path, name: TokenizerName) -> None:
    tokenizer: Tokenizer | None = None
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            tokenizer = tokenizer or load_tokenizer(*name)
            pipe.send(_make(folder, chunk, tokenizer))
        except UserError as error:
            pipe.send(error)
        except Exception as error:
            pipe.send(RankError(f"a worker of the build failed: {error!r}"))


def _make(folder: Path, chunk: Chunk, tokenizer: Tokenizer) -> Part:
    try:
        return write_part(folder, chunk, tokenizer)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; free some space and run it again") from None
