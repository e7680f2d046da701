"""Workers that turn chunks of documents into finished parts: threads of this process first, then processes.

The tokenizers library works outside Python's lock, so that a few threads keep as many cores busy and need no time to
start. Beyond these a worker is a process, which is there while others work already; it ends when its pipe closes, so
that none outlives the build, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cuboid.data.documents import Chunk
from cuboid.data.parts import Part, write_part
from cuboid.data.tokenizer import Tokenizer, load_tokenizer
from cuboid.errors import RankError, UserError

THREADS = 8
"""Workers that are threads: what each does inside Python's lock is about a twentieth of its work."""

TokenizerName = tuple[str, str | None]
"""What `load_tokenizer` takes: a process loads its own."""
Work = Callable[[Chunk], Part]


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
            with _thread(folder, tokenizer) if number < THREADS else _process(folder, name) as make:
                while (chunk := take()) is not None:
                    part = make(chunk)
                    with reporting:
                        done(chunk, part)
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
