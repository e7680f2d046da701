"""Why no plan was found, in one sentence that says what would work."""

from dataclasses import replace
from math import gcd

from cuboid.errors import UserError, either
from cuboid.planning.question import Question
from cuboid.planning.search import search
from cuboid.planning.sizes import resized
from cuboid.planning.space import degrees, divisors, shapes, with_context
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout

MOST_ACCELERATORS = 2**20


def explain_nothing(question: Question) -> UserError:
    """The error for a question without an answer."""
    world_size = question.cluster.accelerators
    if next(degrees(question, world_size), None) is None:
        return _no_degrees(question, world_size)
    if not len(with_context(question, shapes(question, world_size))):
        micro_batch = question.fixed.get("micro_batch")
        return UserError(
            f"no layout of {question.cluster.name} divides global_batch={question.global_batch} with "
            f"{_fixed(question)}; {'use another micro_batch or ' if micro_batch else ''}fix less"
        )
    return _too_small(question, world_size)


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
    given = f" with {_fixed(question)}" if question.fixed else ""
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
    kept = f" with {_fixed(question)}" if question.fixed else ""
    limit = f"{question.limit / 2**30:.4g} GiB a rank"
    needed = _enough(question, world_size)
    least = search(replace(question, memory_limit=1e18), world_size, keep=1, objective="memory")
    lacking = ""
    if len(least.space):
        held = float(least.memory[0])
        lacking = (
            f": {least.space.layout(0)} would hold {held / 2**30:.1f}, {(held - question.limit) / 2**30:.1f} too many"
        )
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
    product = 1
    for name in ("dp", "tp", "pp", "cp"):
        product *= question.fixed.get(name, 1)
    if all(name in question.fixed for name in ("dp", "tp", "pp")) and product == world_size:
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
    return len(search(question, question.cluster.accelerators, keep=1).space) > 0


def _fixed(question: Question) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in question.fixed.items()) or "these sizes"
