"""A simulated step in the trace format of Chrome and Perfetto: one row per pipeline rank, microseconds."""

from typing import Any

from cuboid.schedule.simulate import Timeline
from cuboid.schedule.table import Kind

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """Load it at ui.perfetto.dev or chrome://tracing."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}},
        *(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
            for rank in range(timeline.schedule.ranks)
        ),
    ]
    for event in timeline.events:
        action = event.action
        events.append(
            {
                "name": str(action),
                "cat": NAMES[action.kind],
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "ts": round(event.start * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
                "args": {"stage": action.stage, "micro_batch": action.micro_batch, "kind": NAMES[action.kind]},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
