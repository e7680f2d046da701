"""Two walks through the rooms: a training step and a plan, file after file, each with what happens there."""

from __future__ import annotations

from dataclasses import dataclass

from drawing import COLOURS, INK, LINE, PAPER, SOFT, box, curve, picture, text

WIDTH, TOP, STEP, HIGH = 900, 62, 50, 38
ROOM, FILE, WORDS = 20, 128, 372
"""Left edges of the columns."""


@dataclass(frozen=True)
class Stop:
    """A file of the walk, under `cuboid/`, and what happens there."""

    file: str
    words: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Walk:
    name: str
    title: str
    stops: tuple[Stop, ...]


WALKS = (
    Walk(
        "walk-step",
        "A training step: from cuboid train to the checkpoint",
        (
            Stop("cli/train.py", "reads the run file and what the user changes of it"),
            Stop("launch/start.py", "checks machine, data and folder; is this all of the job, one rank, or one node?"),
            Stop("launch/supervisor.py", "starts the ranks of this machine, and again when one fails"),
            Stop("launch/rank.py", "chooses a device, joins the process group, watches for signals"),
            Stop("parallel/parallelize.py", "puts the layout on the model: groups, shards, stages, ZeRO"),
            Stop("training/trainer.py", "the loop: batches, step, evaluation, saves, metrics"),
            Stop("data/loader.py", "the micro-batches of this replica, by step and position alone"),
            Stop("training/step.py", "counts tokens, runs the pipeline, clips, updates"),
            Stop("parallel/pipeline.py", "runs the schedule's table: forwards, backwards, messages"),
            Stop("parallel/stage.py", "gathers a block, runs it, releases it (ZeRO 3)"),
            Stop("model/transformer.py", "the block itself, written for one device"),
            Stop("parallel/tensor.py", "its matrices split over tensor ranks, with their collectives"),
            Stop("parallel/grad_reduce.py", "all-reduce or reduce-scatter of gradients, behind the backward"),
            Stop("parallel/grad_norm.py", "one norm of all shards on all ranks"),
            Stop("training/optimizer.py", "clips and runs AdamW on the shards this rank keeps"),
            Stop("training/metrics.py", "a line on the console, a row of metrics.jsonl"),
            Stop("checkpoint/save.py", "copies the state aside; a thread writes it while training continues"),
        ),
    ),
    Walk(
        "walk-plan",
        "A plan: from cuboid plan to plan.toml",
        (
            Stop("cli/plan.py", "reads model, cluster, batch and what the user has fixed"),
            Stop("spec/load.py", "a model from the catalog, a TOML file or a config.json"),
            Stop("spec/cluster.py", "accelerators, nodes and links, from the catalog, a file or a probe"),
            Stop("planning/question.py", "all of it as one question"),
            Stop("planning/space.py", "every layout worth a look, as columns of numbers"),
            Stop("planning/search.py", "each is scored, or proved worse than those returned"),
            Stop("planning/score.py", "scores many layouts at once, in closed form"),
            Stop("cost/memory.py", "what the fullest rank holds"),
            Stop("cost/step.py", "seconds: compute, collectives, what overlap hides, bubble, update"),
            Stop("planning/refine.py", "finalists in full: uneven stages, every rank's memory"),
            Stop("schedule/simulate.py", "their schedule's table against a clock"),
            Stop("planning/choose.py", "orders them, and drops near-copies"),
            Stop("planning/plan.py", "why it is the first; a run file, which cuboid train takes"),
        ),
    ),
)


def draw(walk: Walk) -> str:
    parts = [text(ROOM, 34, walk.title, 16, bold=True)]
    rooms = list(dict.fromkeys(stop.room for stop in walk.stops))
    for row, stop in enumerate(walk.stops):
        y, colour = TOP + row * STEP, COLOURS[rooms.index(stop.room) % len(COLOURS)]
        middle = y + HIGH / 2 + 5
        parts.append(box(FILE, y, WORDS - FILE - 20, HIGH, PAPER, LINE, 6))
        parts.append(box(FILE, y, 5, HIGH, colour))
        parts.append(text(FILE + 16, middle, stop.file, 13, bold=True))
        parts.append(text(WORDS, middle, stop.words, 13))
        if row == 0 or walk.stops[row - 1].room != stop.room:
            parts.append(text(ROOM, middle, stop.room, 13, fill=SOFT))
        if row + 1 < len(walk.stops):
            parts.append(curve(f"M{FILE + 24},{y + HIGH} V{y + STEP - 2}", INK))
    return picture(WIDTH, TOP + len(walk.stops) * STEP + 6, walk.title, parts)
