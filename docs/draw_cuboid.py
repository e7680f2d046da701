"""Draws the README's picture: the cuboid of eight ranks, and the loss of the demo on one process and on eight.

cuboid train examples/demo.toml --layout dp=1 --set output.folder=runs/one
cuboid train examples/demo.toml --set output.folder=runs/eight
python docs/draw_cuboid.py runs/one runs/eight docs/cuboid.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cuboid.spec.layout import Layout
from cuboid.spec.ranks import Coordinates, rank_of

INK, PALE, LINE = "#334155", "#94a3b8", "#cbd5e1"
STAGES = [("#bae6fd", "#7dd3fc", "#38bdf8"), ("#fed7aa", "#fdba74", "#fb923c")]
"""Top, left and right face of the cubes of each pipeline stage."""
SIDE = 46
STEP = 62
GAP = 118
"""From one pipeline stage to the next."""


def project(x: float, y: float, z: float) -> tuple[float, float]:
    """Isometric: x to the lower right, y to the lower left, z up."""
    return 215 + (x - y) * 0.866, 206 + (x + y) * 0.5 - z


def polygon(points: list[tuple[float, float, float]], fill: str) -> str:
    flat = " ".join(f"{a:.1f},{b:.1f}" for a, b in (project(*point) for point in points))
    return f'<polygon points="{flat}" fill="{fill}" stroke="white" stroke-width="1.5" stroke-linejoin="round"/>'


def cube(place: Coordinates, rank: int) -> str:
    x, y, z = place.tp * STEP, place.dp * STEP, (1 - place.pp) * GAP
    top, left, right = STAGES[place.pp]
    s = SIDE
    faces = [
        polygon([(x, y + s, z), (x + s, y + s, z), (x + s, y + s, z + s), (x, y + s, z + s)], left),
        polygon([(x + s, y, z), (x + s, y + s, z), (x + s, y + s, z + s), (x + s, y, z + s)], right),
        polygon([(x, y, z + s), (x + s, y, z + s), (x + s, y + s, z + s), (x, y + s, z + s)], top),
    ]
    a, b = project(x + s / 2, y + s / 2, z + s)
    return "".join(faces) + text(a, b + 5, str(rank), "middle", INK, 15, bold=True)


def text(x: float, y: float, words: str, anchor: str, fill: str, size: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{weight}>{words}</text>'
    )


def cuboid_drawing() -> list[str]:
    layout = Layout.parse("dp=2,tp=2,pp=2")
    places = [Coordinates(pp, dp, 0, tp) for pp in (1, 0) for dp in (0, 1) for tp in (0, 1)]
    parts = [cube(place, rank_of(place, layout)) for place in places]
    parts.append(text(330, 292, "tensor", "start", INK, 15, bold=True))
    parts.append(text(330, 310, "splits every matrix", "start", PALE, 13))
    parts.append(text(112, 292, "data", "end", INK, 15, bold=True))
    parts.append(text(112, 310, "splits the batch", "end", PALE, 13))
    parts.append(text(330, 100, "pipeline", "start", INK, 15, bold=True))
    parts.append(text(330, 118, "splits the layers", "start", PALE, 13))
    return parts


def losses(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def loss_drawing(one: list[float], eight: list[float]) -> list[str]:
    left, top, width, height = 520, 70, 330, 210
    highest, lowest = max(one), min(*one, *eight)

    def point(step: int, loss: float) -> str:
        y = top + height * (highest - loss) / (highest - lowest)
        return f"{left + width * step / (len(one) - 1):.1f},{y:.1f}"

    def curve(values: list[float], style: str) -> str:
        points = " ".join(point(step, loss) for step, loss in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>'

    return [
        f'<path d="M{left},{top - 8} V{top + height + 6} H{left + width}" fill="none" stroke="{LINE}"/>',
        curve(one, 'stroke="#fdba74" stroke-width="9" stroke-linecap="round"'),
        curve(eight, 'stroke="#0284c7" stroke-width="2.5"'),
        text(left - 8, top + 5, f"{highest:.1f}", "end", PALE, 13),
        text(left - 8, top + height + 5, f"{lowest:.1f}", "end", PALE, 13),
        text(left, top + height + 26, "step 1", "start", PALE, 13),
        text(left + width, top + height + 26, str(len(one)), "end", PALE, 13),
        f'<path d="M{left + 120},{top + 6} h30" stroke="#fdba74" stroke-width="9"/>',
        text(left + 160, top + 11, "loss on one process", "start", INK, 14),
        f'<path d="M{left + 120},{top + 30} h30" stroke="#0284c7" stroke-width="2.5"/>',
        text(left + 160, top + 35, "loss on 2 × 2 × 2 ranks", "start", INK, 14),
    ]


def main() -> None:
    one, eight, target = sys.argv[1:]
    body = "".join([*cuboid_drawing(), *loss_drawing(losses(one), losses(eight))])
    title = "<title>Eight ranks as 2 × 2 × 2, and the same loss on one process and on eight</title>"
    frame = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 340" font-family="system-ui, sans-serif" role="img">'
    )
    Path(target).write_text(f'{frame}{title}<rect width="900" height="340" rx="12" fill="white"/>{body}</svg>\n')


if __name__ == "__main__":
    main()
