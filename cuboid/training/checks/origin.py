"""Of all that is wrong in a step, where it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from cuboid.training.checks.words import DRIFTED, UNKNOWN, Located, Pass

ORDER: Sequence[str] = get_args(Pass)
AFTER_PASSES = ("reduction", "norm", "update")
THROUGH_ROUTER = "only what comes back through the router is wrong: auxiliary losses, their factor or their statistics"
IN_ATTENTION = "attention's own backward pass: what came in is right, gradients of queries, keys or values are not"


def origin(found: list[Located]) -> Located:
    """The first in the order of execution: others may follow from it."""
    # What is wrong on one rank says more than what is wrong over all.
    ranked = sorted(found, key=lambda each: (ORDER.index(each.where), each.rank is None))
    # Ranks whose copies differ before a step compute other things in every pass. What lets them drift apart, step after
    # step, stands behind the passes.
    drifted = [each for each in ranked if each.where == "weights" and each.cause.startswith(DRIFTED)]
    if drifted:
        others = [each for each in ranked if not each.cause.startswith(DRIFTED)]
        causes = [each for each in others if each.where in AFTER_PASSES]
        explained = [each for each in others if not each.cause.startswith(UNKNOWN)]
        return (causes or explained or drifted)[0]
    first = ranked[0]
    return _inside_block(first, ranked) if first.where == "input gradient" else first


def _inside_block(first: Located, found: list[Located]) -> Located:
    """An input gradient that is wrong, told of the part of the block where the weight gradients begin to be: a backward
    pass comes to the feed-forward first."""
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
