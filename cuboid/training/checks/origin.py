"""Which of all errors of a step came first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from cuboid.training.checks.hypotheses import DRIFTED, UNKNOWN
from cuboid.training.checks.located import Located, Pass

ORDER: Sequence[str] = get_args(Pass)
AFTER_PASSES = ("reduction", "norm", "update")
THROUGH_ROUTER = "only what comes back through the router is wrong: auxiliary losses, their factor or their statistics"
IN_ATTENTION = "attention's own backward pass: what came in is right, gradients of queries, keys or values are not"


def origin(found: list[Located]) -> Located:
    """The first in the order of execution: the others may follow from it."""
    # An error on one rank says more than an error of all ranks.
    ranked = sorted(found, key=lambda each: (ORDER.index(each.where), each.rank is None))
    # Where copies differ before the step, every pass of it differs too. What lets copies drift apart, step after step,
    # is an error after the passes: a sum, the norm or the update.
    drifted = [each for each in ranked if each.where == "weights" and each.cause.startswith(DRIFTED)]
    if drifted:
        others = [each for each in ranked if not each.cause.startswith(DRIFTED)]
        causes = [each for each in others if each.where in AFTER_PASSES]
        explained = [each for each in others if not each.cause.startswith(UNKNOWN)]
        return (causes or explained or drifted)[0]
    first = ranked[0]
    return _inside_block(first, ranked) if first.where == "input gradient" else first


def _inside_block(first: Located, found: list[Located]) -> Located:
    """Narrow a wrong input gradient down to one half of the block, by its weight gradients: the half whose weight
    gradients are wrong first. A backward pass reaches the feed-forward first."""
    block = first.module
    wrong = [
        each.module for each in found if each.where == "weight gradient" and f"{each.module}.".startswith(f"{block}.")
    ]
    after, before = f"{block}.feed_forward", f"{block}.attention"
    is_unknown = first.cause.startswith(UNKNOWN)
    if not block.startswith("layers.") or not wrong:
        return first
    behind = [each for each in wrong if f"{each}.".startswith(f"{after}.")]
    if behind:
        if all(".router" in each for each in behind):
            return replace(first, module=behind[0], cause=THROUGH_ROUTER if is_unknown else first.cause)
        return replace(first, module=after)
    inside = [each for each in wrong if f"{each}.".startswith(f"{before}.")]
    if inside and f"{before}.output" not in inside:
        return replace(first, module=before, cause=IN_ATTENTION if is_unknown else first.cause)
    return replace(first, module=before) if inside else first
