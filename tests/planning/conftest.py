"""Questions small enough to be answered by trying everything, and every layout there is for them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.planning.question import Question
from cuboid.planning.refine import least_kind
from cuboid.spec.cluster import load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.layout import RECOMPUTE, STAGES_PER_RANK, Layout
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.partition import longest_stage

DENSE = ModelSpec(name="small", hidden=512, layers=6, heads=4, ffn=1024, vocab=1000)
MIXED = ModelSpec(
    name="small-mixture",
    hidden=512,
    layers=4,
    heads=4,
    ffn=1024,
    vocab=1000,
    mixture=MixtureSpec(experts=4, top_k=2, expert_ffn=512, first_dense_layers=1),
)


@pytest.fixture
def ask() -> Callable[..., Question]:
    """A question about a small model, or about a named one."""

    def make(model: str | ModelSpec = DENSE, cluster: str = "a100x8", **more: Any) -> Question:
        spec = load_model(model) if isinstance(model, str) else model
        values = {"global_batch": 8, "sequence": 512, **more}
        return Question(model=spec, cluster=load_cluster(cluster), **values)

    return make


def every_mix(question: Question, layout: Layout) -> Iterator[Layout]:
    """The layout with every number of layers recomputed that is not all of them, where that is worth a look."""
    if RECOMPUTE.index(layout.recompute) >= least_kind(question):
        for count in range(1, longest_stage(question.model, layout.stages, question.sequence)):
            yield replace(layout, recompute_layers=count)


def every_layout(question: Question, world_size: int) -> Iterator[Layout]:
    """Every layout of the world that `check` accepts and that recomputes its layers alike, by trying all combinations
    of fields."""
    degrees = [number for number in range(1, world_size + 1) if world_size % number == 0]
    extra = degrees if "cp" in question.explores else [1]
    experts = degrees if "ep" in question.explores else [1]
    batches = [number for number in range(1, question.global_batch + 1) if question.global_batch % number == 0]
    pairs = [
        (name, vpp)
        for name, fixed in STAGES_PER_RANK.items()
        for vpp in ([fixed] if fixed else range(2, question.model.layers + 1))
    ]
    ways = [("ring", 1), ("allgather", 1), *(("ulysses", cp) for cp in extra), *(("hybrid", inner) for inner in extra)]
    names = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "zero", "recompute", "sequence_parallel", "schedule", "vpp")
    recompute = ("none", "selective", "full")
    for dp, tp, pp, cp in product(degrees, degrees, degrees, extra):
        if dp * tp * pp * cp != world_size or question.global_batch % dp:
            continue
        for ep, batch, zero, again, sequence_parallel, (schedule, vpp), (method, inner) in product(
            experts, batches, range(4), recompute, (True, False), pairs, ways if cp > 1 else [("ring", 1)]
        ):
            if (tp == 1 and sequence_parallel) or vpp * pp > question.model.layers:
                continue
            try:
                values = (dp, tp, pp, cp, ep, batch, zero, again, sequence_parallel, schedule, vpp)
                layout = Layout(**dict(zip(names, values, strict=True)), cp_method=method, cp_inner=inner)
                check(layout, question.model, global_batch=question.global_batch, sequence=question.sequence)
            except UserError:
                continue
            yield layout
