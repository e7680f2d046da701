"""Reads the published runs, says what each measured, and which of them calibration may not see."""

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuboid.cost.compute import model_flops_per_token
from cuboid.cost.inputs import Shape, number
from cuboid.cost.published import Case, understand
from cuboid.errors import UserError

FOLDER = Path(__file__).parent / "published"
HELD_OUT_SHARE = 0.4
HELD_OUT_SOURCES = ("moefold-", "moezoo-", "automodel-", "deepseek-", "megascale-")
"""Sources that no constant was fitted on or set by."""


@dataclass(frozen=True)
class Run:
    """A published run: the row, what the planner understands of it, and what it measured."""

    row: dict[str, str]
    case: Case | None
    lacks: str
    seconds: float
    """Of one step; nan where it is not printed and does not follow from what is."""
    memory: float
    """GiB; nan where it is not printed."""
    out_of_memory: bool

    @property
    def id(self) -> str:
        """The row's id."""
        return self.row["id"]

    @property
    def source(self) -> str:
        """The campaign: the id without its number."""
        return self.id.rsplit("-", 1)[0]

    @property
    def held_out(self) -> bool:
        """Whether calibration may not see the row: decided by a hash of its id, so that new rows change nothing."""
        return held_out(self.id)

    @property
    def group(self) -> tuple[str, ...]:
        """Runs of one model on as many accelerators: they differ in their layout and batch."""
        return (self.source, *(self.row[name] for name in ("model", "gpu", "gpus", "seq", "precision")))


def held_out(name: str) -> bool:
    """Whether a hash of the name falls into the held-out share, or its whole source is held out."""
    if name.startswith(HELD_OUT_SOURCES):
        return True
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < 1000 * HELD_OUT_SHARE


def load(files: Iterable[str] = ("runs.csv", "playbook.csv", "moe.csv", "large.csv")) -> list[Run]:
    """Every row of the files."""
    runs = []
    for file in files:
        with (FOLDER / file).open(newline="", encoding="utf-8") as opened:
            runs += [_run(row) for row in csv.DictReader(opened)]
    return runs


def _run(row: dict[str, str]) -> Run:
    case, lacks = None, ""
    try:
        case = understand(row)
    except (LookupError, UserError) as error:
        lacks = str(error.args[0])
    memory = float(row["mem_gb"]) if row["mem_gb"] else np.nan
    return Run(row, case, lacks, _seconds(row, case), memory, row["status"] != "ok")


HARDWARE_FLOPS = ("sc21-",)
"""Sources that print TFLOP/s by Narayanan's formula, which counts the recomputed forward pass too (definitions.md)."""


def _seconds(row: dict[str, str], case: Case | None) -> float:
    if row["step_s"]:
        return float(row["step_s"])
    if case is None:
        return np.nan
    job = case.job
    world = job["dp"] * job["tp"] * job["pp"] * job["cp"]
    tokens = job["global_batch"] * job["sequence"]
    if row["tok_s_gpu"]:
        return tokens / (float(row["tok_s_gpu"]) * world)
    if row["tflops_gpu"] and row["id"].startswith(HARDWARE_FLOPS):
        shape = Shape.make(**case.shape)
        logits = 2 * case.shape["hidden"] * case.shape["vocab"]
        # Layers run forward twice, the head once: 8/6 of the model's arithmetic but for a third of the head's.
        flops = float(model_flops_per_token(shape, number(job["sequence"]))) * 4 / 3 - logits
        return tokens * flops / (float(row["tflops_gpu"]) * 1e12 * world)
    return np.nan
