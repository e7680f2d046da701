"""What ranks communicated in a step, counted and predicted, as a table and as JSON."""

from typing import Any

from cuboid.telemetry.communication_ledger import Entry
from cuboid.train.communication import Summary


def as_rows(summary: Summary) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "dimension": row.dimension,
            "kind": row.kind,
            "calls": row.counted.calls if row.counted else 0,
            "bytes": row.counted.bytes if row.counted else 0,
            "ring_bytes": row.counted.sent if row.counted else 0.0,
            "predicted_calls": row.predicted.calls if row.predicted else 0,
            "predicted_bytes": row.predicted.bytes if row.predicted else 0,
        }
        for row in summary.rows
    ]


def show(summary: Summary) -> None:
    """The table, and whether every rank exchanged what was predicted of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, title="communicated in a step, by the busiest rank", title_justify="left")
    for name in ("dimension", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "calls", "bytes", "ring sends", "predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.rows:
        known = row.counted or row.predicted
        sent = f"{row.counted.sent:,.0f}" if row.counted else "0"
        table.add_row(
            row.dimension,
            row.kind,
            str(known.ranks if known else 0),
            f"{row.counted.calls if row.counted else 0:,}",
            _bytes(row.counted),
            sent,
            _bytes(row.predicted),
        )
    if summary.rows:
        console.print(table)
    for line in summary.unforeseen[:3]:
        console.print(f"not as predicted: {line}", style="yellow")
    if summary.ranks and not summary.unforeseen:
        ranks = "1 rank" if summary.ranks == 1 else f"{summary.ranks} ranks"
        console.print(f"counted as predicted, to the byte, on {ranks}")


def _bytes(entry: Entry | None) -> str:
    return f"{entry.bytes if entry else 0:,}"
