"""All bugs, and the job that verifies a layout with one of them."""

from __future__ import annotations

import re
from typing import Any

from cuboid.training.checks.words import UNKNOWN
from cuboid.verification import compare
from cuboid.verification.compare import verify_rank
from tests.verification.bugs import context_bugs, data_bugs, expert_bugs, optimizer_bugs, pipeline_bugs, tensor_bugs
from tests.verification.bugs.bug import CATALOGUE, Patches

FILES = (tensor_bugs, data_bugs, context_bugs, pipeline_bugs, expert_bugs, optimizer_bugs)


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
