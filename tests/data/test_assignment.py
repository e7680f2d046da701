"""Sequences assigned by their work: the same ones on every layout, each once, and none waits long for another."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.cost.compute import active_parameters, model_flops_per_token
from cuboid.cost.inputs import Shape, number
from cuboid.data.assignment import assign, work
from cuboid.data.loader import assigned, micro_batches
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.model.batch import MicroBatch
from cuboid.spec.run import Run, build_run
from tests.parallel.cases import assert_equal, small_run

CPU = torch.device("cpu")


def make_run(layout: str, **training: object) -> Run:
    table = {"model": "tiny-llama", "layout": layout, "training": {"global_batch": 24, "sequence": 64, **training}}
    return build_run({**table, "data": {"source": "synthetic", "attention_within_documents": True}}, WORK)


WORK = ["data.assignment=work"]


@given(replicas=st.sampled_from([1, 2, 4]), width=st.integers(1, 3), count=st.integers(1, 4), seed=st.integers(0, 1000))
def test_each_sequence_once_and_as_many_for_each(replicas: int, width: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    works = torch.rand(replicas * width * count, generator=generator).pow(4).mul(1000).long().tolist()
    taken = assign(works, [1] * replicas, width)
    assert [len(batches) for batches in taken] == [count] * replicas
    assert all(len(batch) == width for batches in taken for batch in batches)
    assert sorted(place for batches in taken for batch in batches for place in batch) == list(range(len(works)))
    loads = [[sum(works[place] for place in batch) for batch in batches] for batches in taken]
    totals = [sum(each) for each in loads]
    assert max(totals) - min(totals) <= max(max(each) for each in loads)
    # Micro-batches at the same time are neighbours in the order of their work.
    assert all(min(now) >= max(then) for now, then in pairwise(zip(*loads, strict=True)))


def test_work_is_that_of_the_planner() -> None:
    run = make_run("dp=1")
    whole, halves = (work(run, torch.tensor(lengths).numpy()) for lengths in ([4096], [2048, 2048]))
    shape = Shape.of(run.model)
    told = model_flops_per_token(shape, number(4096), causal=True) / (6 * active_parameters(shape)) * 4096
    assert whole == pytest.approx(float(told), rel=1e-3)
    assert whole - 4096 == pytest.approx(2 * (halves - 4096), rel=1e-3)


def sequences(batches: list[MicroBatch]) -> list[tuple[list[int], ...]]:
    found = []
    for batch in batches:
        assert batch.documents is not None
        for each in zip(batch.tokens, batch.labels, batch.documents, strict=True):
            found.append(tuple(x.tolist() for x in each))
    return found


def test_a_step_has_the_sequences_it_has_in_order() -> None:
    for layout in ("dp=1", "dp=2,micro_batch=3", "dp=4,micro_batch=2", "dp=8"):
        run = make_run(layout, sequence_ramp="16x2")
        source = make_source(run)
        for step in (1, 5):
            found = [sequences(micro_batches(source, run, step, one, CPU)) for one in range(run.layout.dp)]
            plain = [(*source.at(place), source.documents_at(place)) for place in range(24 * step, 24 * step + 24)]
            expected = [tuple(x.tolist() for x in each) for each in plain]  # type: ignore[union-attr]
            assert sorted(each for taken in found for each in taken) == sorted(expected)
            told = assigned(source, run, step)
            assert told is not None and 1 <= told.imbalance <= told.in_order + 1e-9


def test_without_documents_there_is_nothing_to_assign_by() -> None:
    with pytest.raises(UserError, match=r"assignment=work needs data\.attention_within_documents=true"):
        build_run({"model": "tiny-llama", "data": {"source": "synthetic"}}, WORK)


@pytest.mark.parametrize(
    ("layout", "model", "more"),
    [
        (
            "dp=2,pp=2,zero=1,schedule=zbv,micro_batch=2",
            "tiny-llama",
            ("training.sequence_ramp=4x1", "training.dropout=0.1"),
        ),
        ("dp=2,ep=2,zero=3", "tiny-deepseek", ("training.batch_ramp=4x1",)),
        ("dp=2,cp=2,zero=2", "tiny-qwen3", ()),
    ],
)
def test_equal_to_one_device(pool: Pool, layout: str, model: str, more: tuple[str, ...]) -> None:
    assert_equal(pool, small_run(layout, *WORK, *more, model=model, micro_batches=4))
