"""How much a rank holds at its fullest moment. It follows from the order of its list alone, not from any timing."""

from __future__ import annotations

from collections.abc import Sequence

from cuboid.schedule.table import Action, Kind, Schedule


def peak_activations(
    schedule: Schedule, held: Sequence[float], kept_after_input: Sequence[float] | None = None
) -> tuple[float, ...]:
    """For each rank the most its activations take at any time.

    `held` is what one micro-batch takes on each stage from its forward to its backward. A split backward lets go of all
    but `kept_after_input` once the input half is done, and of that after the weight half; skipped, all is kept.
    """
    kept = held if kept_after_input is None else kept_after_input
    change = {
        Kind.FORWARD: list(held),
        Kind.BACKWARD: [-size for size in held],
        Kind.INPUT: [rest - size for size, rest in zip(held, kept, strict=True)],
        Kind.WEIGHT: [-rest for rest in kept],
    }
    return tuple(_peak(actions, change) for actions in schedule.actions)


def _peak(actions: Sequence[Action], change: dict[Kind, list[float]]) -> float:
    now = most = 0.0
    for action in actions:
        now += change[action.kind][action.stage]
        most = max(most, now)
    return most


def peak_in_flight(schedule: Schedule, *, until_input: bool = False) -> tuple[int, ...]:
    """For each rank the most micro-batches in flight at once, counted per stage: two stages' activations count two.

    A micro-batch is in flight from its forward until its backward is whole, or with `until_input` only until its input
    gradient is done.
    """
    one = [1.0] * schedule.stages
    kept = [0.0] * schedule.stages if until_input else one
    return tuple(int(peak) for peak in peak_activations(schedule, one, kept))
