"""A layout on a cluster, for one dimension: what each rank holds, which ranks communicate, and what a step moves.

Places, groups, chunks of a sequence and bytes are those of the program itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

from drawing import COLOURS, EMPTY, FILL, LINE, PAPER, SOFT, box, curve, picture, text

from cuboid.planning.choose import predict
from cuboid.planning.plan import Plan
from cuboid.planning.question import Question
from cuboid.planning.traffic import moved
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.ranks import Group, coordinates, groups
from cuboid.spec.sharding import chunks_of

WIDTH, MARGIN, CARD, HIGH, SIDE = 900, 20, 100, 82, 38
Part = tuple[float, float, float, float]
"""x, y, width and height of what is held, of a square of side 1."""


SQUARES = {
    "tokens": "a step, down its sequences, across their tokens",
    "matrices": "the model, down its layers, across their width",
    "optimizer": "the optimizer's state",
    "experts": "a layer",
}
"""What a whole square stands for."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure, and the question that the planner is asked for it."""

    name: str
    title: str
    layout: str
    dimension: str
    """The kind of group whose communication is drawn."""
    squares: tuple[str, ...]
    model: str = "llama3-8b"
    cluster: str = "h100x16"
    batch: int = 64
    sequence: int = 8192


FIGURES = (
    Figure(
        name="data",
        title="Data parallelism: other sequences on each rank, gradients summed; ZeRO 1 splits the optimizer state",
        layout="dp=16,zero=1",
        dimension="shard",
        squares=("tokens", "optimizer"),
        model="llama3.2-1b",
    ),
    Figure(
        name="tensor",
        title="Tensor parallelism: every matrix is split within a node, sums of activations travel in every layer",
        layout="dp=2,tp=8,sequence_parallel=false",
        dimension="tp",
        squares=("tokens", "matrices"),
    ),
    Figure(
        name="sequence",
        title="Sequence parallelism: between the split matrices the same ranks split the tokens",
        layout="dp=2,tp=8",
        dimension="tp",
        squares=("tokens", "matrices"),
    ),
    Figure(
        name="pipeline",
        title="Pipeline parallelism: layers are split, activations travel from stage to stage and gradients back",
        layout="tp=8,pp=4",
        dimension="pp",
        squares=("tokens", "matrices"),
        cluster="h100x32",
    ),
    Figure(
        name="context",
        title="Context parallelism: each rank holds an early and a late chunk, keys and values go round",
        layout="dp=2,cp=8,zero=3",
        dimension="cp",
        squares=("tokens", "optimizer"),
        batch=16,
        sequence=65536,
    ),
    Figure(
        name="expert",
        title="Expert parallelism: each rank holds some experts, tokens travel to theirs and back",
        layout="dp=16,ep=8,zero=1",
        dimension="ep",
        squares=("tokens", "experts"),
        model="mixtral-8x7b",
        cluster="h200x16",
        sequence=4096,
    ),
)


def question_of(figure: Figure) -> Question:
    return Question(
        model=load_model(figure.model),
        cluster=load_cluster(figure.cluster),
        global_batch=figure.batch,
        sequence=figure.sequence,
    )


def draw(figure: Figure) -> str:
    plan = predict(question_of(figure), Layout.parse(figure.layout))
    layout, per_node = plan.layout, plan.question.cluster.accelerators_per_node
    rows = layout.world_size // per_node
    parts = [text(MARGIN, 30, figure.title, 15, bold=True)]
    about = f"{figure.model}, {figure.batch} sequences of {figure.sequence:,} tokens a step"
    parts.append(text(MARGIN, 50, f"{figure.layout} on {figure.cluster}: {about}", 12, fill=SOFT))
    for node in range(rows):
        _, y = place(node * per_node, per_node)
        parts.append(box(MARGIN, y - 26, WIDTH - 2 * MARGIN, HIGH + 92, PAPER, LINE, 8))
        parts.append(text(MARGIN + 10, y - 10, f"node {node}", 12, fill=SOFT))
    found = groups(layout)[figure.dimension]
    for number, group in enumerate(found):
        parts += lines(group, COLOURS[number % len(COLOURS)], figure.dimension, per_node)
    for rank in range(layout.world_size):
        parts += card(plan, rank, figure.squares, per_node)
    bottom = place((rows - 1) * per_node, per_node)[1] + HIGH + 84
    words = described(figure, plan)
    parts += [text(MARGIN, bottom + 16 + 19 * index, line, 13, bold=not index) for index, line in enumerate(words)]
    legend = "; ".join(f"{name}: {SQUARES[name]}" for name in figure.squares)
    parts.append(text(MARGIN, bottom + 20 + 19 * len(words), f"Blue is what a rank holds of {legend}", 11, fill=SOFT))
    return picture(WIDTH, bottom + 32 + 19 * len(words), figure.title, parts)


def place(rank: int, per_node: int) -> tuple[float, float]:
    """The upper left corner of a rank's card."""
    node, index = divmod(rank, per_node)
    return MARGIN + 10 + index * (CARD + 7.1), 92 + node * (HIGH + 102)


def card(plan: Plan, rank: int, squares: tuple[str, ...], per_node: int) -> list[str]:
    x, y = place(rank, per_node)
    parts = [box(x, y, CARD - 2, HIGH, "white", LINE, 5), text(x + 8, y + 16, f"rank {rank}", 12, bold=True)]
    for index, name in enumerate(squares):
        left, top = x + 7 + index * (SIDE + 8), y + 24
        parts.append(box(left, top, SIDE, SIDE, EMPTY))
        for a, b, width, height in held(name, plan, rank):
            # What is a thousandth of a square could not be seen.
            parts.append(box(left + a * SIDE, top + b * SIDE, max(width * SIDE, 1.2), max(height * SIDE, 1.2), FILL))
        parts.append(text(left + SIDE / 2, top + SIDE + 13, name, 10, "middle", SOFT))
    return parts


def held(square: str, plan: Plan, rank: int) -> list[Part]:
    """What a rank holds of all tokens of a step (down: sequences, across: their tokens), of the matrices (down: layers,
    across: their width), of the optimizer's state and of the experts (one after another)."""
    layout, at = plan.layout, coordinates(rank, plan.layout)
    if square == "tokens":
        top, height = at.dp / layout.dp, 1 / layout.dp
        chunks = (
            [(0.0, 1.0)]
            if layout.cp == 1
            else [(c / 2 / layout.cp, 0.5 / layout.cp) for c in chunks_of(at.cp, layout.cp)]
        )
        if layout.tp > 1 and layout.sequence_parallel:
            chunks = [(left + at.tp / layout.tp * width, width / layout.tp) for left, width in chunks]
        return [(left, top, width, height) for left, width in chunks]
    if square == "matrices":
        layers = sum(plan.layers)
        before = [sum(plan.layers[:stage]) for stage in layout.stages_of(at.pp)]
        own = [plan.layers[stage] for stage in layout.stages_of(at.pp)]
        pairs = zip(before, own, strict=True)
        return [(at.tp / layout.tp, first / layers, 1 / layout.tp, count / layers) for first, count in pairs]
    kind = "shard" if square == "optimizer" else "ep"
    group = next(group for group in groups(layout)[kind] if rank in group)
    return [(0, group.index(rank) / len(group), 1, 1 / len(group))]


def lines(group: Group, colour: str, dimension: str, per_node: int) -> list[str]:
    """Who sends to whom: everybody to everybody, on to the next stage, or round in a ring."""
    if dimension == "ep":
        return [_line(a, b, colour, per_node, arrow=False, opacity=0.45) for a, b in combinations(group, 2)]
    found = [_line(a, b, colour, per_node) for a, b in pairwise(group)]
    if dimension == "pp":
        return found
    return [*found, _line(group[-1], group[0], colour, per_node)]


def _line(a: int, b: int, colour: str, per_node: int, arrow: bool = True, opacity: float = 1) -> str:
    (x, y), (u, v) = place(a, per_node), place(b, per_node)
    x, u = x + CARD / 2, u + CARD / 2
    if y == v:
        low = high = y + HIGH + 14 + 5.5 * abs(a - b)
        start, end = y + HIGH, v + HIGH + 3
    elif y < v:
        low, high, start, end = y + HIGH + 40, v - 40, y + HIGH, v - 3
    else:
        low, high, start, end = y - 40, v + HIGH + 40, y, v + HIGH + 3
    path = f"M{x:.1f},{start:.1f} C{x:.1f},{low:.1f} {u:.1f},{high:.1f} {u:.1f},{end:.1f}"
    return curve(path, colour, 1.6, arrow, opacity)


def described(figure: Figure, plan: Plan) -> list[str]:
    """The bytes of the dimension, by the formulas of the program."""
    entry = next(entry for entry in moved(plan) if entry.dimension == figure.dimension)
    size = f"{entry.bytes / 1e9:,.1f} GB"
    lines = [f"A rank sends {size} in a step, over {entry.tier.name} at {entry.tier.bandwidth:g} GB/s:"]
    return [*lines, *entry.formulas[:2]]
