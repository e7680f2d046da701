"""All bugs, and the job that verifies a layout with one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from cuboid.training.checks.hypotheses import UNKNOWN
from cuboid.verification import compare
from cuboid.verification.compare import verify_rank
from cuboid.verification.resume import train_leg
from tests.verification.bugs import (
    checkpoint_bugs,
    context_bugs,
    data_bugs,
    expert_bugs,
    later_bugs,
    model_bugs,
    optimizer_bugs,
    pipeline_bugs,
    tensor_bugs,
)
from tests.verification.bugs.bug import CATALOGUE, Patches

FILES = (
    *(tensor_bugs, data_bugs, context_bugs, pipeline_bugs, expert_bugs, optimizer_bugs, checkpoint_bugs, later_bugs),
    model_bugs,
)


RunOn = Callable[[str, tuple[Any, ...], int], Any]
"""A function by name, its arguments, and on how many ranks; what rank 0 returns."""


def verdict_with(run_on: RunOn, name: str, precision: str) -> dict[str, Any]:
    bug, here = CATALOGUE[name], f"{__name__}:"
    if not bug.onto:
        found = run_on(f"{here}verify_with", (name, precision), bug.run(precision).layout.world_size)
        assert isinstance(found, dict)
        return found
    runs, losses = bug.chain(precision), []
    with TemporaryDirectory(prefix="cuboid-") as folder:
        for leg, run in enumerate(runs):
            losses.append(run_on(f"{here}leg_with", (name, precision, leg, folder), run.layout.world_size))
        judged = run_on("cuboid.verification.resume:judge_chain", (runs, folder, losses), 1)
    assert isinstance(judged, dict)
    return judged


def leg_with(rank: int, name: str, precision: str, leg: int, folder: str) -> list[float]:
    """What each rank does on one layout of a chain."""
    run = CATALOGUE[name].chain(precision)[leg]
    patches = Patches(rank, run, leg)
    CATALOGUE[name].install(patches)
    try:
        return train_leg(rank, run, folder, 2 * leg, 2 * leg + 2)
    finally:
        patches.undo()


def verify_with(rank: int, name: str, precision: str) -> dict[str, Any] | None:
    """What each rank does. The bug is there while ranks compute, and not in what they are compared with."""
    bug = CATALOGUE[name]
    run = bug.run(precision)
    plain = compare._observe

    def observe(*arguments: Any) -> Any:
        patches = Patches(rank, run)
        bug.install(patches)
        try:
            return plain(*arguments)
        finally:
            patches.undo()

    compare._observe = observe
    try:
        return verify_rank(rank, run)
    finally:
        compare._observe = plain


def score(name: str, verdict: dict[str, Any]) -> dict[str, bool]:
    """Whether the bug was found, and its module, pass and cause named."""
    bug, located = CATALOGUE[name], verdict["located"] or {}
    if located.get("cause", UNKNOWN).startswith(UNKNOWN):
        located = {**located, "cause": ""}
    asked = {"module": bug.module, "where": bug.where, "cause": bug.cause}
    named = {kind: bool(re.search(pattern, str(located.get(kind, "")))) for kind, pattern in asked.items()}
    named["cause"] &= bool(located.get("cause"))
    return {"found": not verdict["passed"], **named}
