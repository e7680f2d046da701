"""Opens what `data.source` names: a store, a Megatron pair, or Python's own source. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cuboid.data.indexed import IndexedTokens, Tokens, check_pair, in_memory, largest_token, open_pair, pair_paths
from cuboid.data.store import BLOCK, PREFIX, check_store, is_store, open_store
from cuboid.data.tokenizer import END_OF_DOCUMENT
from cuboid.errors import UserError
from cuboid.readers import plain_file, read_bytes
from cuboid.spec.plugin import PythonModelSpec, is_plugin, load_plugin, resolve
from cuboid.spec.run import Run
from cuboid.spec.training import OWN_DATA

# Which documents are held out: the last few of every stripe of the source, so that both sides see all of it.
#
# The split depends on the source and the fraction alone, not on sequence, seed or layout: what is once held out stays
# so.


STRIPES = 64


@dataclass(frozen=True)
class Split:
    """Documents as ranges [first, last)."""

    training: tuple[tuple[int, int], ...]
    held_out: tuple[tuple[int, int], ...]


def split_documents(documents: int, fraction: float, name: str) -> Split:
    held = int(documents * fraction)
    if not fraction:
        return Split(((0, documents),), ())
    if held < 1 or held >= documents:
        least = 1 / documents
        raise UserError(
            f"data.validation_fraction={fraction} of the {documents:,} documents of {name} leaves nothing on one side; "
            + (f"use {least:.2g} or more" if documents > 1 else "name another source in data.validation")
        )
    stripes = min(STRIPES, held)
    training, held_out = [], []
    for stripe in range(stripes):
        first, last = documents * stripe // stripes, documents * (stripe + 1) // stripes
        cut = last - (held * last // documents - held * first // documents)
        training.append((first, cut))
        held_out.append((cut, last))
    return Split(tuple(training), tuple(held_out))


READ_WHOLE = 1 << 30
"""Data up to so many bytes is read and verified before a training starts; `cuboid data verify` reads any amount."""


@dataclass(frozen=True)
class OpenedSource:
    name: str
    tokens: IndexedTokens
    vocabulary: int | None
    """Every token is below; None where nobody wrote it down."""
    completions: bool = False
    """Every second sequence is a completion, and only these are learned."""
    named: str = ""
    """What a store's manifest or its name say of its data, which need not be read then."""

    @property
    def identity(self) -> str:
        """Equal for equal data."""
        if self.named or not isinstance(self.tokens.tokens, np.memmap):
            return self.named
        return json.dumps([self.counts, *map(_digest, pair_paths(self.name))])

    @property
    def counts(self) -> str:
        """What was the identity of a pair before its bytes were a part of it, as checkpoints of then have it."""
        return self.named or json.dumps([len(self.tokens.tokens), self.tokens.sequences, self.tokens.documents])


SAMPLES, SAMPLE = 1 << 10, 1 << 16
"""Of a file larger than READ_WHOLE so many parts of so many bytes stand for the rest, evenly spread."""


def _digest(path: Path) -> str:
    facts = path.stat()
    return _digest_of(path, READ_WHOLE, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@cache
def _digest_of(path: Path, whole: int, number: int, size: int, changed: int) -> str:
    """Once for as long as these stay: it is asked for several times as a run begins."""
    digest = hashlib.sha256()
    with plain_file(path) as file:
        for start in range(0, min(whole, size), BLOCK):
            digest.update(file.read(min(BLOCK, whole - start)))
        last = size - SAMPLE
        for sample in range(SAMPLES if size > whole else 0):
            file.seek(max(whole + (last - whole) * sample // (SAMPLES - 1), 0))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def open_source(name: str) -> OpenedSource:
    path = Path(name)
    if name == "python-stdlib":
        return OpenedSource(name, in_memory(name, _python_files()), END_OF_DOCUMENT + 1, named=name)
    if is_store(path):
        store = open_store(path)
        manifest = store.manifest
        identity = json.dumps([manifest.kind, {file: entry.sha256 for file, entry in manifest.files.items()}])
        return OpenedSource(name, store.tokens, manifest.vocabulary, manifest.kind == "completions", identity)
    if any(half.is_file() for half in pair_paths(path)):
        return OpenedSource(name, open_pair(path), None)
    if path.exists():
        option = " --completions" if ".jsonl" in path.suffixes else ""
        raise UserError(
            f"data.source={name} is not made of tokens; run `cuboid data build {name} -o {path.stem}-tokens` "
            + (f"(with{option} for prompts and completions) " if option else "")
            + f"and use data.source={path.stem}-tokens"
        )
    raise UserError(f"data.source={name} does not exist; use python-stdlib, synthetic, or the path of a store")


def _python_files() -> Iterator[Tokens]:
    """Bytes of the standard library's own source, which is on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        if data := read_bytes(path):
            yield np.append(np.frombuffer(data, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))


def check_data(run: Run) -> None:
    """Refuses what could not be trained on, before any process starts: once, not on every rank."""
    names = {*run.data.sources, run.data.validation} - {"", "synthetic"}
    for name in sorted(names):
        if is_own(name):
            _check_own(run, name)
            continue
        _verify(name)
        opened = open_source(name)
        check_vocabulary(run, opened)
        fraction = run.data.validation_fraction if name in run.data.sources else 0.0
        check_samples(run, opened, split_documents(opened.tokens.documents, fraction, name))


def is_own(name: str) -> bool:
    """Whether a source is a data set of one's own."""
    return name == OWN_DATA or is_plugin(name)


def make_own(run: Run, name: str, held_out: bool = False) -> Callable[[], Any]:
    """What makes the data set. `held_out`: the one of the model to evaluate on."""
    if run.data.uses_documents:
        raise UserError(
            f"data.source={name} has no documents; use data.attention_within_documents=false and "
            "data.positions_within_documents=false"
        )
    if run.data.validation_fraction:
        raise UserError(
            f"data.source={name} cannot be held out in part; use data.validation=python:my_data.py:held_out"
        )
    where = "data.validation" if held_out else "data.source"
    if name != OWN_DATA:
        made: Callable[[], Any] = load_plugin(resolve(name, Path(), where), where)
        return made
    built = run.model.built if isinstance(run.model, PythonModelSpec) else None
    make: Callable[[], Any] | None = None
    if built is not None:
        make = built.evaluation_data if held_out else built.data
    if make is None:
        field = "evaluation_data" if held_out else "data"
        raise UserError(
            f"{where}=model needs a model of one's own that brings data, Model({field}=…); use python-stdlib or a store"
        )
    return make


def _check_own(run: Run, name: str) -> None:
    from cuboid.data.own import check_stream, has_length  # here, because it brings torch

    if name in run.data.sources:
        make = make_own(run, name)
        if not has_length(make()):
            check_stream(make, name)
    if name == run.data.validation:
        make_own(run, name, held_out=True)
    if name == run.data.validation and run.evaluation.every:
        from cuboid.data.source import make_validation_source

        make_validation_source(run)


def _own_identity(run: Run, name: str) -> str:
    """Where it comes from, and how many samples it has: what they hold is its owner's word."""
    dataset = make_own(run, name)()
    return f"{name}/{len(dataset) if hasattr(dataset, '__len__') else 'stream'}"


def check_vocabulary(run: Run, opened: OpenedSource) -> None:
    needed = opened.vocabulary
    if needed is None:
        needed = largest_token(opened.tokens, READ_WHOLE // opened.tokens.tokens.itemsize) + 1
    if run.model.vocab < needed:
        raise UserError(
            f"model.vocab={run.model.vocab} is smaller than the {needed} tokens of "
            f"data.source={opened.name}; use vocab={needed} or more"
        )


def check_samples(run: Run, opened: OpenedSource, split: Split) -> None:
    """Each side must have at least one sample."""
    if run.data.packing == "padded":
        return
    for ranges in filter(None, (split.training, split.held_out)):
        start = opened.tokens.document_start
        held = sum(start(last) - start(first) for first, last in ranges)
        if held <= run.training.sequence:
            side = "trained on" if ranges is split.training else "held out"
            raise UserError(
                f"training.sequence={run.training.sequence} is too long for the {held:,} tokens of data.source="
                f"{opened.name} that are {side}; use training.sequence={max(held - 1, 1)} or less, or "
                "data.packing=padded"
            )


def _verify(name: str) -> None:
    """Reads stores and pairs that are not too large; what is neither is left to `open_source` to refuse."""
    path = Path(name)
    tokens = path / f"{PREFIX}.bin" if is_store(path) else pair_paths(path)[0]
    if name == "python-stdlib" or not tokens.is_file() or tokens.stat().st_size > READ_WHOLE:
        return
    if is_store(path):
        check_store(path)
    else:
        check_pair(path)


def _identity(run: Run, name: str, by_counts: bool) -> str:
    if is_own(name):
        return _own_identity(run, name)
    if name == "synthetic":
        return ""
    opened = open_source(name)
    return opened.counts if by_counts else opened.identity


def data_identity(run: Run) -> str:
    """Equal for runs that meet the same samples in the same order: what a resumed run must share with its past, as
    `same_data` says."""
    return _data_identity(run, by_counts=False)


def same_data(run: Run, known: str) -> bool:
    """Whether the run meets the samples of a checkpoint with this identity. Those written before the bytes of a
    Megatron pair were a part of it say no more than its counts."""
    return any(known == _data_identity(run, by_counts) for by_counts in (True, False))


def _data_identity(run: Run, by_counts: bool) -> str:
    held = {name: _identity(run, name, by_counts) for name in run.data.sources}
    facts = [held, list(run.data.weights.values()), run.data.packing, run.data.mask_across_documents]
    facts += [run.data.validation_fraction, run.training.sequence, run.training.seed, run.training.global_batch]
    facts += [run.training.batch_ramp] if run.training.batch_ramp else []
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
