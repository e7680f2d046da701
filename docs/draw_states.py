"""What the ZeRO stages leave on a rank: bars of the states that the planner counts for one model on sixteen ranks."""

from __future__ import annotations

from drawing import COLOURS, SOFT, box, picture, text

from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

PARTS = ("weights", "gradients", "optimizer")
TITLE = "States of one rank of dp=16 by ZeRO stage, llama3-8b in bf16"


def draw() -> str:
    question = Question(model=load_model("llama3-8b"), cluster=load_cluster("h100x16"), global_batch=64, sequence=8192)
    rows = {zero: predict(question, Layout.parse(f"dp=16,zero={zero}")).memory[0] for zero in range(4)}
    widest = max(sum(row[part] for part in PARTS) for row in rows.values())
    parts = [text(20, 30, TITLE, 15, bold=True)]
    for zero, row in rows.items():
        y, x = 50 + 34 * zero, 90.0
        parts.append(text(20, y + 16, f"zero={zero}", 13))
        for part, colour in zip(PARTS, COLOURS, strict=False):
            width = 640 * row[part] / widest
            parts.append(box(x, y, width, 22, colour))
            x += width
        parts.append(text(x + 8, y + 16, f"{sum(row[part] for part in PARTS) / 2**30:.1f} GiB", 13))
    for index, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=False)):
        parts += [box(90 + 130 * index, 194, 12, 12, colour), text(108 + 130 * index, 205, part, 12)]
    parts.append(text(500, 205, "an H100 has 79.2 GiB; activations come on top", 12, fill=SOFT))
    return picture(900, 220, TITLE, parts)
