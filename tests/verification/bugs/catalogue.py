"""All bugs, and the job that verifies a layout with one of them."""

from __future__ import annotations

import re
from typing import Any

from cuboid.verification.compare import verify_rank
from tests.verification.bugs import data_bugs, tensor_bugs
from tests.verification.bugs.bug import CATALOGUE, Patches

FILES = (tensor_bugs, data_bugs)


def verify_with(rank: int, name: str, precision: str) -> dict[str, Any] | None:
    """What each rank does."""
    bug = CATALOGUE[name]
    run = bug.run(precision)
    patches = Patches(rank, run)
    bug.install(patches)
    try:
        return verify_rank(rank, run)
    finally:
        patches.undo()


def score(name: str, verdict: dict[str, Any]) -> dict[str, bool]:
    """Whether the bug was found, and its module, pass and cause named."""
    bug, located = CATALOGUE[name], verdict["located"] or {}
    asked = {"module": bug.module, "where": bug.where, "cause": bug.cause}
    named = {kind: bool(re.search(pattern, str(located.get(kind, "")))) for kind, pattern in asked.items()}
    return {"found": not verdict["passed"], **named}
