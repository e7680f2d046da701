"""Worker processes that turn chunks of documents into finished parts.

Each is fed by a thread that reads the next chunk while the worker is busy. A worker ends when its pipe closes, so none
outlives the build, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from cuboid.data.documents import Chunk
from cuboid.data.parts import Part, write_part
from cuboid.data.tokenizer import Tokenizer, load_tokenizer
from cuboid.errors import RankError, UserError

TokenizerName = tuple[str, str | None]
"""What `load_tokenizer` takes: a worker loads its own."""


def make_parts(
    chunks: Iterator[Chunk],
    folder: Path,
    tokenizer: TokenizerName,
    workers: int,
    done: Callable[[Chunk, Part], None],
) -> None:
    """Has every chunk made a part; calls `done` for each, in any order, never twice at once."""
    if workers == 1:
        loaded = load_tokenizer(*tokenizer)
        for chunk in chunks:
            done(chunk, write_part(folder, chunk, loaded))
        return
    reading, reporting = threading.Lock(), threading.Lock()
    errors: list[BaseException] = []

    def take() -> Chunk | None:
        with reading:
            return next(chunks, None) if not errors else None

    def feed() -> None:
        process = None
        try:
            chunk = take()
            if chunk is None:
                return
            process, pipe = _start(folder, tokenizer)
            with pipe:
                while chunk is not None:
                    pipe.send(chunk)
                    following = take()
                    part = pipe.recv()
                    if isinstance(part, BaseException):
                        raise part
                    with reporting:
                        done(chunk, part)
                    chunk = following
        except (EOFError, ConnectionError):
            errors.append(RankError("a worker of the build died; run the same command again to go on"))
        except BaseException as error:
            errors.append(error)
        finally:
            if process is not None:
                process.join()

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _start(folder: Path, tokenizer: TokenizerName) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    # Spawned, not forked: a fork would inherit the pipes of its siblings and keep them open.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, folder, tokenizer), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(pipe: Connection, folder: Path, name: TokenizerName) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer: Tokenizer | None = None
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            tokenizer = tokenizer or load_tokenizer(*name)
            pipe.send(write_part(folder, chunk, tokenizer))
        except OSError as error:
            pipe.send(UserError(f"{folder} cannot be written: {error.strerror}; free some space and run it again"))
        except Exception as error:
            pipe.send(RankError(f"a worker of the build failed: {error!r}"))
