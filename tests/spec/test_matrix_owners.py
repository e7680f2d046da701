"""Owners of matrices: every element travels there once and back to all who keep it; the work is balanced."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cuboid.errors import UserError
from cuboid.spec import matrix_owners
from cuboid.spec.layout import Layout
from cuboid.spec.matrix_owners import Matrix, arithmetic, matrices_of, sent_elements, stage_buckets, stage_size
from cuboid.spec.run import Run, build_run

LAYOUTS = [
    ("tiny-llama", "dp=1"),
    ("tiny-llama", "dp=4,zero=0"),
    ("tiny-llama", "dp=2,tp=2,zero=1"),
    ("tiny-llama", "dp=4,tp=2,zero=2,shard=2"),
    ("tiny-llama", "tp=8,pp=2"),
    ("tiny-llama", "dp=3,cp=2,tp=2,zero=3,schedule=zbv,pp=2"),
    ("tiny-mixtral", "dp=2,tp=4,ep=8,zero=3,sequence_parallel=false"),
    ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2"),
    ("tiny-deepseek", "dp=2,tp=2,ep=4"),
]


def muon(model: str, layout: str, **optimizer: object) -> Run:
    batch = 16 * Layout.parse(layout).dp
    training = {"global_batch": batch, "sequence": 48}
    optimizer = {"kind": "muon", **optimizer}
    return build_run({"model": model, "layout": layout, "optimizer": optimizer, "training": training})


def matrices(run: Run) -> list[Matrix]:
    return [matrix for place in range(run.layout.pp) for bucket in stage_buckets(run, place) for matrix in bucket]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_every_element_has_one_place_and_one_sender(model: str, layout: str, per_head: bool) -> None:
    run = muon(model, layout, per_head=per_head)
    found = matrices(run)
    for matrix in found:
        ends = sorted((span.place, span.place + span.size) for span in matrix.spans)
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == matrix.rows * matrix.columns
        assert all(span.sender in span.ranks for span in matrix.spans)
        assert any(matrix.owner in span.ranks for span in matrix.spans), "an owner keeps some of what it orthogonalises"
    alone = matrices(muon(model, "dp=1", per_head=per_head))
    shapes = [Counter((matrix.parameter, matrix.rows, matrix.columns) for matrix in each) for each in (found, alone)]
    assert shapes[0] == shapes[1], "the layout decides nothing of which matrices there are"


def test_ranks_keep_what_zero_says_and_no_element_twice() -> None:
    run = muon("tiny-llama", "dp=4,tp=2,zero=2,shard=2")
    kept: Counter[tuple[str, int]] = Counter()
    for matrix in matrices(run):
        for span in matrix.spans:
            for rank in span.ranks:
                kept[matrix.parameter, rank] += span.size
    sizes: Counter[str] = Counter()
    for (name, _), size in kept.items():
        sizes[name] += size
    # Queries are split over two tensor ranks and two shards, and replicated over two groups of these.
    assert sizes["layers.0.attention.query.weight"] == 2 * 64 * 64


def test_layers_of_one_kind_are_kept_alike() -> None:
    """Of three prediction layers the first has a parameter more, and so other shards than the others."""
    run = muon("tiny-deepseek", "dp=2,zero=3")
    run = replace(run, model=replace(run.model, layers=3, prediction_layers=3))
    apart = [matrix for layer in range(6) for matrix in matrix_owners._placeless(run, layer)]
    assert [(each.parameter, [(span.start, span.size, span.ranks) for span in each.spans]) for each in apart] == [
        (each.parameter, [(span.start, span.size, span.ranks) for span in each.spans]) for each in matrices(run)
    ]


@pytest.mark.parametrize(("model", "layout"), [("tiny-llama", "dp=4,zero=0"), ("tiny-mixtral", "dp=4,ep=4,zero=1")])
def test_owners_are_balanced_by_their_work(model: str, layout: str) -> None:
    run = muon(model, layout)
    loads = Counter[int]()
    for matrix in matrices(run):
        loads[matrix.owner] += arithmetic(matrix.rows, matrix.columns, 5)
    assert max(loads.values()) < 1.1 * sum(loads.values()) / stage_size(run.layout)


def test_buckets_hold_whole_layers_and_a_matrix_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "BUCKET", 1000)
    matrix_owners.stage_buckets.cache_clear()
    try:
        buckets = stage_buckets(muon("tiny-llama", "dp=8,zero=1"), 0)
    finally:
        matrix_owners.stage_buckets.cache_clear()
    assert [len(bucket) for bucket in buckets] == [14, 14, 14, 14]  # seven matrices a layer, for eight ranks
    assert not {matrix.parameter for matrix in buckets[0]} & {matrix.parameter for matrix in buckets[1]}


def test_what_is_sent_is_what_arrives() -> None:
    run = muon("tiny-deepseek", "dp=2,tp=2,ep=2,zero=1")
    elements = sum(matrix.rows * matrix.columns for matrix in matrices(run))
    there, back = zip(*(sent_elements(run, rank)[0] for rank in range(4)), strict=True)
    assert sum(there) == elements
    assert sum(back) == sum(span.size * len(span.ranks) for matrix in matrices(run) for span in matrix.spans)


def test_roles() -> None:
    names = {matrix.parameter.split(".", 2)[2] for matrix in matrices(muon("tiny-mixtral", "dp=1"))}
    attention = {f"attention.{name}.weight" for name in ("query", "key", "value", "output")}
    experts = [
        matrix
        for matrix in matrices(muon("tiny-mixtral", "dp=2,ep=2"))
        if "layers.1.feed_forward.experts" in matrix.parameter
    ]
    mixture = muon("tiny-mixtral", "dp=1").model.mixture
    assert mixture is not None
    assert len(experts) == 3 * mixture.experts, "each expert's matrix is one"
    assert names == attention | {f"feed_forward.experts.{name}" for name in ("gate", "up", "down")}


def test_heads_latents_and_what_is_fused() -> None:
    run = muon("tiny-deepseek", "dp=1")
    latent, model = run.model.latent, run.model
    assert latent is not None
    wide = latent.qk_nope_dim + latent.v_dim
    up = matrices_of(run, "layers.0.attention.key_value_up.weight", (model.heads * wide, latent.kv_rank))
    assert [len(rows) for rows in up] == [model.heads, model.heads]
    assert up[0][1] == (wide, wide + latent.qk_nope_dim)
    assert up[1][0] == (latent.qk_nope_dim, wide)
    by_head = muon("tiny-llama", "dp=1", per_head=True)
    query = matrices_of(by_head, "layers.0.attention.query.weight", (64, 64))
    assert len(query) == by_head.model.heads
    assert query[1] == ((8, 16),)
    assert matrices_of(by_head, "layers.0.attention.output.weight", (64, 64)) == [((0, 64),)]
    fused = muon("python:examples/own_attention.py:build", "dp=1", fused={"up.weight": [100, 92]})
    assert matrices_of(fused, "layers.0.feed_forward.up.weight", (192, 64)) == [((0, 100),), ((100, 192),)]
    with pytest.raises(UserError, match=r"has 192 rows, but layers\.0\.feed_forward\.up\.weight has 10"):
        matrices_of(fused, "layers.0.feed_forward.up.weight", (10, 64))
