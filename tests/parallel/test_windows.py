"""Windows and sinks equal one device on every layout, and what a ring sends is what the planner counts."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.planning.collectives import predicted_ledger
from cuboid.spec.layout import CONTEXT_METHODS
from cuboid.spec.run import Run
from cuboid.verification.compare import compare, observed_trace
from cuboid.verification.reference import reference_trace
from tests.matrix import crossed, rest
from tests.parallel.cases import assert_equal, small_run

WINDOWS = ("model.windows=[3, 0]", "model.sinks=true")


def windowed(layout: str, *overrides: str, model: str = "tiny-llama") -> Run:
    return small_run(layout, *WINDOWS, *overrides, model=model)


@pytest.mark.parametrize(
    "layout",
    [
        "tp=4",
        "tp=2,sequence_parallel=false,dp=2",
        "dp=4,zero=2",
        "dp=4,zero=3,shard=2",
        "pp=2,schedule=1f1b,tp=2,recompute=selective",
        "pp=2,schedule=zb1p,recompute=full",
        "pp=2,schedule=zbv,dp=2",
        "pp=2,schedule=dualpipev",
        *rest("dp=4,zero=1", "dp=4,zero=3", "pp=2,schedule=gpipe", "pp=2,schedule=interleaved"),
    ],
)
def test_each_dimension(pool: Pool, layout: str) -> None:
    assert_equal(pool, windowed(layout))


@pytest.mark.parametrize(("method", "window"), crossed(CONTEXT_METHODS, [1, 2, 5, 40]))
def test_each_context_method(pool: Pool, method: str, window: int) -> None:
    """Within a chunk, over one border, over several, and beyond the sequence."""
    more = f"model.windows=[{window}, 3, 0]", "data.attention_within_documents=false"
    assert_equal(pool, windowed(f"cp=4,cp_method={method}", *more))


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_within_documents(pool: Pool, method: str) -> None:
    assert_equal(pool, windowed(f"cp=4,cp_method={method},recompute=selective", "training.sequence=48"))


@pytest.mark.parametrize(
    "layout",
    [
        "cp=2,tp=2,pp=2,ep=2,zero=1,schedule=zbv,cp_method=ulysses,recompute=selective",
        "dp=2,cp=2,pp=2,ep=4,zero=3,schedule=1f1b,cp_method=allgather,recompute=full",
        *rest("dp=2,cp=2,tp=2,ep=2", "dp=2,tp=2,pp=2,ep=2,zero=2,schedule=interleaved"),
    ],
)
def test_with_experts(pool: Pool, layout: str) -> None:
    assert_equal(pool, windowed(layout, model="tiny-mixtral"))


FAMILIES = ["tiny-gemma2", "tiny-gemma3", "tiny-olmo3", "tiny-gpt-oss"]


LAYOUTS = [
    "tp=4,dp=2,zero=1",
    "tp=2,dp=2,sequence_parallel=false,recompute=selective",
    "dp=2,tp=2,pp=2,zero=3,schedule=zbv,recompute=full",
    "cp=2,tp=2,pp=2,schedule=1f1b",
]


@pytest.mark.parametrize(("model", "layout"), crossed(FAMILIES, LAYOUTS))
def test_families(pool: Pool, model: str, layout: str) -> None:
    """Norms on other places, gates of other kinds, two rotations, norms over all heads, biases of experts."""
    assert_equal(pool, small_run(layout, model=model))


CAPS = ("model.attention_softcap=0.5", "model.logit_softcap=0.5")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("cp=4,cp_method=ring", ()),
        ("cp=4,cp_method=hybrid,recompute=selective", ("model.windows=[]",)),
        ("cp=2,tp=2,cp_method=allgather", ("model.sinks=true", "training.z_loss=0.1")),
        ("cp=2,tp=2,pp=2,zero=1,schedule=dualpipev,recompute=full", ("model.prediction_layers=2",)),
        ("cp=4,cp_method=ring", ("model.windows=[]", "data.attention_within_documents=false")),
        *rest(
            ("cp=2,cp_method=ulysses,dp=2,zero=3", ("model.sinks=true",)),
            ("dp=2,tp=2,pp=2,zero=2,schedule=zbv", ("optimizer.kind=muon", "optimizer.qk_clip=0.5")),
        ),
    ],
)
def test_softcaps(pool: Pool, layout: str, more: tuple[str, ...]) -> None:
    assert_equal(pool, small_run(layout, *CAPS, *more, model="tiny-gemma2"))


def test_a_softcap_ignored_is_no_proof() -> None:
    for cap in ("attention", "logit"):
        run = small_run("dp=1", *CAPS, model="tiny-gemma2")
        without = observed_trace(small_run("dp=1", *CAPS, f"model.{cap}_softcap=0", model="tiny-gemma2"), 0)
        assert without is not None and not compare(run, without, reference_trace(run)).passed


@pytest.mark.parametrize("layout", ["cp=2,tp=2,pp=2,ep=4,schedule=dualpipev,zero=1", *rest("dp=2,tp=2,ep=4,zero=2")])
def test_biases_of_spread_experts(pool: Pool, layout: str) -> None:
    assert_equal(pool, small_run(layout, model="tiny-gpt-oss"))


def test_norms_behind_experts(pool: Pool) -> None:
    """Recomputation sums again what such a norm takes."""
    more = ("model.norms=both", "model.unit_norms=true")
    assert_equal(pool, small_run("dp=2,tp=2,ep=2,recompute=full,sequence_parallel=false", *more, model="tiny-mixtral"))


@pytest.mark.parametrize("layout", ["tp=4", "tp=8,sequence_parallel=false"])
def test_norms_over_replicated_heads(pool: Pool, layout: str) -> None:
    """Of two key-value heads, which several tensor ranks hold."""
    assert_equal(pool, small_run(layout, "model.kv_heads=2", model="tiny-olmo3"))


def test_heads_that_tensor_ranks_replicate(pool: Pool) -> None:
    assert_equal(pool, windowed("cp=2,tp=4", "model.kv_heads=2"))


def sent(run: Run) -> list[int]:
    """Bytes that each rank sends to its context-parallel neighbours in a step."""
    entries = [predicted_ledger(run, rank).entries.get(("cp", "send")) for rank in range(run.layout.world_size)]
    return [entry.bytes if entry is not None else 0 for entry in entries]


def test_a_ring_sends_what_the_window_shows() -> None:
    """Two micro-batches of sequences of 64 tokens, whose keys and values have 2 × 4 × 8 numbers of 8 bytes. A window of
    3 sees two keys over each border between chunks; they travel forward and again backward, and their gradients back.
    The first and the last chunk have one neighbour, and the two in the middle are one rank's."""
    sizes = ("model.layers=2", "training.sequence=64", "model.sinks=false")
    run = small_run("cp=4", "model.windows=[3]", *sizes)
    token = 2 * 4 * 8 * 8
    # Rank 0 holds chunks 0 and 7, rank 3 chunks 3 and 4: keys of 0, then of 1 and 6, … go to the next chunk's rank.
    keys, gradients = [1, 2, 2, 1], [1, 2, 2, 1]
    assert sent(run) == [
        2 * 2 * 2 * token * (2 * key + gradient) for key, gradient in zip(keys, gradients, strict=True)
    ]
    whole = sent(small_run("cp=4", *sizes))
    assert whole == [2 * 2 * 16 * token * 9] * 4


def test_a_window_as_long_as_the_sequence_is_none(pool: Pool) -> None:
    """To the loss; the way of keys is another."""
    job, more = "tests.parallel.cases:losses", ("model.layers=2", "training.sequence=32")
    runs = [small_run("cp=2", *more, *windows) for windows in ((), ("model.windows=[32]",))]
    plain, wide = (pool.run(job, (run,), ranks=2)[0] for run in runs)
    assert plain == pytest.approx(wide, rel=1e-12)
