"""Draw a simulated schedule in plain text, one row per rank: `print(draw(simulate(schedule, costs)))`."""

from __future__ import annotations

from cuboid.schedule.simulate import Event, Timeline
from cuboid.schedule.table import Schedule

IDLE = "."


def draw(timeline: Timeline, width: int = 100) -> str:
    """Time runs to the right; `F0` is the forward of micro-batch 0, `F0b` on the rank's second stage; dots are idle.

    The drawing is as narrow as shows every label, and at most `width` columns plus the rank's name.
    """
    schedule = timeline.schedule
    chunks = _chunk_letters(schedule)
    scale = _columns_per_second(timeline, chunks, width)
    rows = [[IDLE] * round(timeline.makespan * scale) for _ in range(schedule.ranks)]
    for event in timeline.events:
        start, end = round(event.start * scale), round(event.end * scale)
        rows[event.rank][start:end] = _text(event, chunks, end - start)
    margin = len(str(schedule.ranks - 1))
    lines = [f"rank {rank:>{margin}} {''.join(row)}" for rank, row in enumerate(rows)]
    return "\n".join([*lines, f"{schedule.name}: bubble {timeline.bubble_fraction:.1%}"])


def _columns_per_second(timeline: Timeline, chunks: list[str], width: int) -> float:
    durations = [event.end - event.start for event in timeline.events if event.end > event.start]
    if not durations:
        return 0.0
    wanted = 1 + max(len(_labels(event, chunks)[0]) for event in timeline.events)
    columns = min(wanted, width * min(durations) / timeline.makespan)
    # Whole columns for the shortest action keep equal actions equally wide.
    return (int(columns) if columns >= 1 else columns) / min(durations)


def _text(event: Event, chunks: list[str], width: int) -> str:
    """The most telling label that fits and leaves a space, or else the bare kind."""
    labels = _labels(event, chunks)
    fitting = [label for label in labels if len(label) < width]
    return (fitting or labels[-1:])[0].ljust(width)[:width]


def _labels(event: Event, chunks: list[str]) -> list[str]:
    kind, batch = event.action.kind.value, event.action.micro_batch
    return [f"{kind}{batch}{chunks[event.action.stage]}", f"{kind}{batch}", kind]


def _chunk_letters(schedule: Schedule) -> list[str]:
    """For each stage a letter that tells it from the other stages of its rank; none where there is only one."""
    if schedule.stages == schedule.ranks:
        return [""] * schedule.stages
    return [chr(ord("a") + schedule.stages_of(rank).index(stage)) for stage, rank in enumerate(schedule.stage_rank)]
