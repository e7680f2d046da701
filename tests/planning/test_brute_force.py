"""For models, worlds and limits nobody thought of, the search returns what trying everything returns."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.planning.choose import plans
from cuboid.planning.question import Question
from cuboid.planning.score import score
from cuboid.planning.search import search
from cuboid.planning.space import Space
from cuboid.spec.cluster import load_cluster
from cuboid.spec.fitting import check
from cuboid.spec.model import ModelSpec
from tests.planning.conftest import every_layout, every_mix

models = st.builds(
    lambda heads, layers, width, vocab, tied: ModelSpec(
        name="any",
        hidden=heads * 64,
        layers=layers,
        heads=heads,
        ffn=heads * 64 * width,
        vocab=vocab,
        tie_embeddings=tied,
    ),
    heads=st.sampled_from([2, 4, 6]),
    layers=st.sampled_from([2, 3, 5]),
    width=st.sampled_from([2, 4]),
    vocab=st.sampled_from([101, 32000]),
    tied=st.booleans(),
)
clusters = st.sampled_from(["h100x4", "a100-40gx2", "a100x4", "b200x3"])
batches = st.sampled_from([2, 3, 4])


def question_of(model: ModelSpec, cluster: str, batch: int, sequence: int, share: float) -> Question:
    place = load_cluster(cluster)
    limit = share * place.memory_gib * 2**30
    return Question(model=model, cluster=place, global_batch=batch, sequence=sequence, memory_limit=limit)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, clusters, batches, st.sampled_from([96, 2048]), st.sampled_from([0.08, 0.15, 0.95]))
def test_nothing_is_better_than_the_first_answer(
    model: ModelSpec, cluster: str, batch: int, sequence: int, share: float
) -> None:
    question = question_of(model, cluster, batch, sequence, share)
    world = question.cluster.accelerators
    # ZeRO with nobody to share with is the same as none.
    layouts = [layout for layout in every_layout(question, world) if layout.dp * layout.cp > 1 or not layout.zero]
    assume(layouts)
    alike = score(question, Space.of(layouts, question))
    fitting = [layout for layout, fits in zip(layouts, alike.fits, strict=True) if fits]
    layouts += [mix for layout in fitting for mix in every_mix(question, layout)]
    mixed = score(question, Space.of(layouts, question))
    # Less memory is what more layers are recomputed for, so mixes are tried for the time only.
    for objective, scores in (("time", mixed), ("memory", alike)):
        found = search(question, world, keep=3, objective=objective)
        if not scores.fits.any():
            assert len(found.space) == 0
            continue
        values, mine = (each.memory if objective == "memory" else each.seconds for each in (scores, found))
        assert mine[0] == pytest.approx(float(np.min(values[scores.fits])), rel=1e-8)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, clusters, batches, st.sampled_from([96, 2048]))
def test_every_plan_keeps_its_promises(model: ModelSpec, cluster: str, batch: int, sequence: int) -> None:
    question = question_of(model, cluster, batch, sequence, 0.95)
    try:
        found = plans(question, top=3)
    except UserError as reason:
        assert str(reason).count("\n") == 0
        return
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)
    for plan in found:
        check(plan.layout, model, global_batch=batch, sequence=sequence, world_size=question.cluster.accelerators)
        assert plan.peak <= question.limit
        assert sum(plan.layers) == model.layers
        assert plan.seconds > 0
        assert len(plan.memory) == plan.layout.pp


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, st.sampled_from(["h100x4", "a100x4"]), st.sampled_from([0.1, 0.2, 0.5]))
def test_more_memory_never_makes_the_best_slower(model: ModelSpec, cluster: str, share: float) -> None:
    tight = search(question_of(model, cluster, 4, 1024, share), 4, keep=1)
    roomy = search(question_of(model, cluster, 4, 1024, min(2 * share, 0.95)), 4, keep=1)
    if len(tight.space):
        assert roomy.seconds[0] <= tight.seconds[0] * (1 + 1e-9)
