"""What the ranks of a run communicated in its last step (`output.count_communication`), beside the planner's count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cuboid.planning.collectives import predicted_ledger, unforeseen
from cuboid.readers import read_rows
from cuboid.spec.run import Run
from cuboid.telemetry.communication_ledger import FILES, Entry, Ledger


@dataclass(frozen=True)
class Compared:
    """Counted beside predicted, by dimension and kind of collective, on the rank that communicates most."""

    dimension: str
    kind: str
    counted: Entry | None
    predicted: Entry | None


@dataclass(frozen=True)
class Summary:
    rows: list[Compared]
    ranks: int
    """How many wrote their counts where they could be read."""
    unforeseen: list[str]
    """What is not as predicted, by rank."""


def summarize(run: Run) -> Summary:
    """The last step of all ranks."""
    paths = [path for path in sorted(Path(run.output.folder).glob(FILES)) if _rank(path) < run.layout.world_size]
    largest: dict[tuple[str, str], Compared] = {}
    surprises: list[str] = []
    ranks = 0
    for path in paths:
        rank, rows = _rank(path), read_rows(path, Ledger.is_row)
        if not rows:  # all steps had been done before
            continue
        ranks += 1
        counted = Ledger.from_row(rows[-1])
        step = run.of_batch(rows[-1]["step"] - 1)
        predicted = predicted_ledger(step, rank)
        surprises += [f"rank {rank} {line}" for line in unforeseen(step, rank, counted)]
        # Either side may lack an entry: a collective nobody predicted, or one that never came.
        for key in counted.entries.keys() | predicted.entries.keys():
            row = Compared(*key, counted.entries.get(key), predicted.entries.get(key))
            largest[key] = max(row, largest.get(key, row), key=_size)
    return Summary([largest[key] for key in sorted(largest)], ranks, surprises)


def _size(row: Compared) -> int:
    entry = row.counted or row.predicted
    return entry.bytes if entry else 0


def _rank(path: Path) -> int:
    """A wider layout that the run had before may have left files of ranks that are no more."""
    return int(path.stem.partition("-")[2])
