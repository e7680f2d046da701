"""Why no plan was found, in one sentence that says what would work."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import gcd
from typing import Any

import numpy as np

from cuboid.errors import UserError, either
from cuboid.planning.export.engines import FIXED, refuse_model
from cuboid.planning.question import Question, resized
from cuboid.planning.search import any_fits, emptiest, sayable_layouts
from cuboid.planning.space import DEGREES, Space, degrees, divisors, shapes, with_context
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout

MOST_ACCELERATORS = 2**20
FEW = 4
"""Values that a sentence proposes at most."""


def explain_nothing(question: Question) -> UserError:
    """The error for a question without an answer."""
    world_size = question.cluster.accelerators
    try:
        refuse_model(question.model, question.target)
    except UserError as reason:
        return reason
    if next(degrees(question, world_size), None) is None:
        return _no_degrees(question, world_size)
    if not len(with_context(question, shapes(question, world_size))):
        micro_batch = question.fixed.get("micro_batch")
        return UserError(
            f"no layout of {question.cluster.name} divides global_batch={question.global_batch} with "
            f"{_fixed(question)}; {'use another micro_batch or ' if micro_batch else ''}fix less"
        )
    return _unsayable(question, world_size) or _too_small(question, world_size)


def _unsayable(question: Question, world_size: int) -> UserError | None:
    """The error for a target that has no words for what the user decided: which field, and what it has instead."""
    target = question.target
    if not target or len(sayable_layouts(question, world_size)):
        return None
    decided = _decided(question)
    # A degree is what the user wants most.
    names = sorted(decided, key=lambda name: name in DEGREES)
    for dropped in (dropped for count in (1, 2) for dropped in combinations(names, count)):
        kept = {name: value for name, value in question.fixed.items() if name not in dropped}
        try:
            found = sayable_layouts(replace(question, fixed=kept), world_size)
        except UserError:  # what is kept makes no layout
            continue
        if len(found):
            lacking, others = (
                {name: decided[name] for name in decided if (name in dropped) is lost} for lost in (True, False)
            )
            beside = f" with {_named(others)}" if others else ""
            return UserError(f"{_named(lacking)}{beside} is not in {target}; use {either(_instead(found, dropped))}")
    return UserError(f"{_named(decided)} is not in {target}; fix less")


def _instead(space: Space, names: Sequence[str]) -> list[str]:
    """Values of some fields that occur, at most a few."""
    rows = np.stack([space.columns[name] for name in names], axis=1).tolist()
    firsts = {tuple(row): where for where, row in reversed(list(enumerate(rows)))}
    layouts = [space.layout(firsts[values]) for values in sorted(firsts)[:FEW]]
    return [_named({name: getattr(layout, name) for name in names}) for layout in layouts]


def _no_degrees(question: Question, world_size: int) -> UserError:
    model, replicas = question.model, sorted(_replicas(question, world_size))
    if not replicas:
        try:
            fixed = {name: question.fixed[name] for name in ("tp", "pp", "ep") if name in question.fixed}
            check_model(Layout(dp=fixed.get("ep", 1), **fixed), model)
        except UserError as reason:
            return reason
        return UserError(f"{_fixed(question)} fits no layout of {world_size} accelerators; fix less")
    batch = question.global_batch
    near = set()
    below = [batch // dp * dp for dp in replicas if batch >= dp]
    near |= {max(below)} if below else set()
    near.add(min(-(-batch // dp) * dp for dp in replicas))
    given = f" with {_fixed(question)}" if _decided(question) else ""
    return UserError(
        f"global_batch={batch} divides over no layout of {model.name} on {world_size} accelerators{given}; "
        f"use {either(f'global_batch={number}' for number in sorted(near))}"
    )


def _replicas(question: Question, world_size: int) -> set[int]:
    """Every dp that some layout would have if the batch allowed it."""
    found = set()
    for dp in divisors(world_size):
        wide = replace(question, global_batch=dp)
        if fits := next((entry for entry in degrees(wide, world_size) if entry[0] == dp), None):
            found.add(fits[0])
    return found


def _too_small(question: Question, world_size: int) -> UserError:
    kept = f" in {question.target}" if question.target else ""
    kept += f" with {_fixed(question)}" if _decided(question) else ""
    limit = f"{question.limit / 2**30:.4g} GiB a rank"
    needed = _enough(question, world_size)
    least = emptiest(question, world_size)
    lacking = ""
    if least:
        layout, held = least
        lacking = f": {layout} would hold {held / 2**30:.1f}, {(held - question.limit) / 2**30:.1f} too many"
    what = (
        f"cluster={question.cluster.name} is too small for {question.model.name}{kept} "
        f"at global_batch={question.global_batch} and seq={question.sequence} within {limit}{lacking}"
    )
    name = question.cluster.name.rpartition("x")[0] or question.cluster.accelerator
    if needed is None:
        return UserError(f"{what}, and so is any larger one; use another accelerator or a smaller sequence")
    return UserError(f"{what}; it takes {needed} accelerators, as {name}x{needed}")


def _enough(question: Question, world_size: int) -> int | None:
    """The least accelerators of twice, three times, four times … the cluster that hold the model."""
    ranks = 1
    for name in ("dp", "tp", "pp", "cp"):
        ranks *= question.fixed.get(name, 1)
    if all(name in question.fixed for name in ("dp", "tp", "pp")) and ranks == world_size:
        return None
    size = world_size
    node = question.cluster.accelerators_per_node
    while size <= MOST_ACCELERATORS:
        for candidate in (size * 3 // 2, size * 2) if size > 1 else (2,):
            whole = candidate % node == 0 if candidate > node else node % candidate == 0
            if whole and gcd(candidate, node) and _holds(resized(question, candidate)):
                return candidate
        size *= 2
    return None


def _holds(question: Question) -> bool:
    return any_fits(question, question.cluster.accelerators)


def _decided(question: Question) -> dict[str, Any]:
    """What the user fixed, without what the target leaves no choice of."""
    return {name: value for name, value in question.fixed.items() if name not in FIXED.get(question.target, {})}


def _fixed(question: Question) -> str:
    return _named(_decided(question)) or "these sizes"


def _named(fields: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in fields.items())
