"""The decision flow, with what it decides for three models: the questions of the three-dimensional recipe, answered
by the program's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from drawing import COLOURS, INK, LINE, PAPER, SOFT, box, curve, picture, text

from cuboid.planning.explain import Framework, framework
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

WIDTH, TOP, STEP, HIGH = 900, 112, 118, 76
ASKED, DONE, SHOWN = (20, 236), (292, 200), (512, 128)
"""Left edge and width of questions, of what follows, and of the first example."""
TITLE = "Which parallelism when: ask from above, stop adding as soon as it fits"


@dataclass(frozen=True)
class Example:
    """A model on a cluster, and the layout the flow leads to."""

    model: str
    cluster: str
    batch: int
    sequence: int
    layout: str

    @property
    def answers(self) -> Framework:
        """The arithmetic."""
        question = Question(
            model=load_model(self.model),
            cluster=load_cluster(self.cluster),
            global_batch=self.batch,
            sequence=self.sequence,
        )
        return framework(question, Layout.parse(self.layout))


EXAMPLES = (
    Example("llama3-8b", "h100x64", 512, 8192, "dp=64,zero=3"),
    Example("gpt3-175b", "a100-80gx1024", 1536, 2048, "dp=8,tp=8,pp=16,zero=1"),
    Example("gpt-1t", "a100-80gx4096", 4096, 2048, "dp=8,tp=8,pp=64,zero=1"),
)

QUESTIONS = (
    (
        ("Does one layer, with its", "activations, fit one", "accelerator?"),
        "no",
        ("tp: the fewest ranks", "that hold it,", "inside one node"),
    ),
    (("Do all states fit", "one node?"), "no", ("pp: stages over nodes;", "or zero=3 where the", "links can carry it")),
    (
        ("Does one sequence still", "overfill a rank?"),
        "yes",
        ("cp: split the sequence;", "recompute costs time,", "cp costs messages"),
    ),
    (("Are there experts?",), "yes", ("ep: spread them over", "ranks of dp × cp × tp,", "inside a node if it can")),
    (("Are accelerators left?",), "yes", ("dp: replicas of all this,", "as the batch allows,", "with ZeRO over them")),
)


def draw() -> str:
    parts = [text(20, 34, TITLE, 16, bold=True)]
    for index, example in enumerate(EXAMPLES):
        x = SHOWN[0] + index * SHOWN[1]
        parts += [text(x, 70, example.model, 13, bold=True), text(x, 88, f"on {example.cluster}", 11, fill=SOFT)]
    answers = [told(example) for example in EXAMPLES]
    for row, (words, way, then) in enumerate(QUESTIONS):
        y = TOP + row * STEP
        parts += _words(*ASKED, y, words, "white", COLOURS[0], bold=True)
        parts += _words(*DONE, y, then, PAPER, LINE)
        parts.append(curve(f"M{ASKED[0] + ASKED[1]},{y + HIGH / 2} H{DONE[0] - 3}", INK))
        parts.append(text(ASKED[0] + ASKED[1] + 18, y + HIGH / 2 - 6, way, 12, "middle"))
        if row + 1 < len(QUESTIONS):
            middle = ASKED[0] + ASKED[1] / 2
            parts.append(curve(f"M{middle},{y + HIGH} V{y + STEP - 3}", INK))
            parts.append(text(middle + 8, y + HIGH + 24, "then", 11, fill=SOFT))
        for index, column in enumerate(answers):
            x = SHOWN[0] + index * SHOWN[1]
            parts += [text(x, y + 18 + 16 * line, part, 11) for line, part in enumerate(column[row])]
    bottom = TOP + len(QUESTIONS) * STEP
    for index, example in enumerate(EXAMPLES):
        x = SHOWN[0] + index * SHOWN[1]
        first, _, last = example.layout.rpartition(",")
        parts += [text(x, bottom, first + ",", 11, bold=True), text(x, bottom + 15, last, 11, bold=True)]
    parts.append(text(20, bottom, "States: 16 bytes a parameter (weights 2, gradients 2, Adam 12).", 11, fill=SOFT))
    parts.append(text(20, bottom + 15, "cuboid explain prints the same sums for any plan.", 11, fill=SOFT))
    return picture(WIDTH, bottom + 34, TITLE, parts)


def _words(
    x: float, width: float, y: float, lines: tuple[str, ...], fill: str, edge: str, bold: bool = False
) -> list[str]:
    parts = [box(x, y, width, HIGH, fill, edge, 8)]
    first = y + HIGH / 2 + 5 - 9 * (len(lines) - 1)
    return [*parts, *(text(x + 14, first + 18 * index, line, 13, bold=bold) for index, line in enumerate(lines))]


def told(example: Example) -> list[list[str]]:
    """What each question finds."""
    found, layout, model = example.answers, Layout.parse(example.layout), load_model(example.model)
    memory = found.accelerator / 1e9
    tensor = "fits: tp is a choice" if found.layer_fits else f"no: tp ≥ {found.tensor_needed}"
    nodes = "fits" if found.node_fits else f"no: {found.nodes_needed} nodes or more"
    node = found.accelerator * found.node_size / 1e9
    layer, kept = found.layer_states / 1e9, found.layer_activations / 1e9
    return [
        [f"{layer:.1f} GB + {kept:.1f} GB", f"of {memory:.0f} GB", tensor],
        [f"{found.states / 1e9:,.0f} GB", f"of {node:,.0f} GB", nodes],
        [f"{example.sequence:,} tokens:", "no"],
        ["yes" if model.mixture else "no"],
        [f"{found.replica:,} of {layout.world_size:,}", f"hold a replica: dp={found.replicas}"],
    ]
