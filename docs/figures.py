"""Draws the figures of the pages from the program's own groups, schedules and costs.

python docs/figures.py docs/figures
"""

from __future__ import annotations

import sys
from pathlib import Path

import draw_flow
import draw_ranks
import draw_states
import draw_walk

from cuboid.planning.picture import svg
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts, simulate
from cuboid.spec.layout import STAGES_PER_RANK

RANKS, MICRO_BATCHES = 4, 8


def figures() -> dict[str, str]:
    """File -> its text."""
    return {
        "which.svg": draw_flow.draw(),
        "zero.svg": draw_states.draw(),
        **{f"{figure.name}.svg": draw_ranks.draw(figure) for figure in draw_ranks.FIGURES},
        **{f"{walk.name}.svg": draw_walk.draw(walk) for walk in draw_walk.WALKS},
        **{f"schedule-{name}.svg": schedule(name) for name in STAGES_PER_RANK},
    }


def schedule(name: str) -> str:
    """Equal layers, a backward pass of twice the forward one, messages that take no time."""
    each = STAGES_PER_RANK[name] or 2
    made = make_schedule(name, RANKS, MICRO_BATCHES, each)
    timeline = simulate(made, StageCosts.uniform(RANKS * each, 1 / each, 1 / each, 1 / each))
    words = f"bubble {timeline.bubble_fraction:.0%}; a rank keeps up to {max(timeline.peak_in_flight)} micro-batches"
    if each > 1:
        words += f" of its {each} stages, each half as long"
    return svg(timeline, f"{name}: {RANKS} ranks, {MICRO_BATCHES} micro-batches", words)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in figures().items():
        (folder / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
