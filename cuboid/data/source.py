"""Sources of samples: a sample is (tokens, labels), each of the sequence's length, labels one token ahead."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import Run

END_OF_DOCUMENT = 256
"""The token after each file; 0 to 255 are bytes."""


class Source(Protocol):
    size: int
    """How many samples one epoch has."""

    def sample(self, index: int) -> tuple[Tensor, Tensor]: ...


class PythonLibrary:
    """Byte-level text of the Python standard library's own source, which is on every machine."""

    def __init__(self, sequence: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
        paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
        documents = [(root / path).read_bytes() for path in paths if not skipped.intersection(path.parts)]
        pieces: list[Tensor] = []
        for document in filter(None, documents):
            pieces += [torch.frombuffer(bytearray(document), dtype=torch.uint8).short()]
            pieces += [torch.tensor([END_OF_DOCUMENT], dtype=torch.short)]
        self._tokens = torch.cat(pieces)
        self._sequence = sequence
        self.size = (len(self._tokens) - 1) // sequence

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._sequence
        window = self._tokens[start : start + self._sequence + 1].long()
        return window[:-1], window[1:]


class Synthetic:
    """Random tokens, and labels masked at a rate that differs from sample to sample: some samples have none at all."""

    size = 1 << 20

    def __init__(self, vocabulary: int, sequence: int, seed: int) -> None:
        self._vocabulary, self._sequence, self._seed = vocabulary, sequence, seed

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        digest = hashlib.sha256(f"synthetic/{self._seed}/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        window = torch.randint(0, self._vocabulary, (self._sequence + 1,), generator=generator)
        rate = (digest[8] % 5) / 4
        masked = torch.rand(self._sequence, generator=generator) < rate
        return window[:-1], window[1:].masked_fill(masked, IGNORED)


def make_source(run: Run) -> Source:
    if run.data.source == "synthetic":
        return Synthetic(run.model.vocab, run.training.sequence, run.training.seed)
    check_vocabulary(run)
    return PythonLibrary(run.training.sequence)


def check_vocabulary(run: Run) -> None:
    if run.data.source == "python-stdlib" and run.model.vocab <= END_OF_DOCUMENT:
        raise UserError(
            f"model.vocab={run.model.vocab} is smaller than the {END_OF_DOCUMENT + 1} tokens of "
            f"data.source=python-stdlib; use vocab={END_OF_DOCUMENT + 1} or more"
        )
