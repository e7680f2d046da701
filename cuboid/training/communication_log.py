"""What this rank communicated in each step, in a file of its own (`output.count_communication`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cuboid.spec.run import Run
from cuboid.telemetry.communication_ledger import FILES, Ledger
from cuboid.training.callbacks import Callback

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class CommunicationLog(Callback):
    """One line a step; nothing where nothing is counted."""

    def __init__(self, run: Run, rank: int, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self._path = Path(run.output.folder) / FILES.replace("*", f"{rank:05d}")
        self._file: TextIO | None = None

    def __enter__(self) -> CommunicationLog:
        if self._ledger is not None:
            self._file = self._path.open("w")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @contextmanager
    def around_step(self, trainer: Trainer, step: int) -> Iterator[None]:
        yield
        self.record(step)

    def record(self, step: int) -> None:
        """Write down what was communicated since the last call."""
        if self._ledger is not None and self._file is not None:
            self._file.write(self._ledger.take().as_line(step))
            self._file.flush()
