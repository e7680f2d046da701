"""Parts of today's recipes for pretraining: on every layout what one process computes."""

from __future__ import annotations

import pytest

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run
from cuboid.verification.reference import reference_trace
from tests.parallel.cases import assert_equal, small_run, verdict

Z_LOSS = "training.z_loss=0.1"
"""Large, so that a wrong gradient would show."""


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=1", "tiny-llama"),
        ("dp=2,tp=2,pp=2,zero=0", "tiny-llama"),
        ("dp=2,tp=2,zero=1", "tiny-gpt2"),
        ("dp=2,cp=2,zero=2", "tiny-llama"),
        ("dp=2,pp=2,zero=3,schedule=zbv", "tiny-llama"),
        ("tp=4,sequence_parallel=false", "tiny-llama"),
        ("tp=2,pp=2,schedule=dualpipev", "tiny-llama"),
        ("cp=2,tp=2,pp=2", "tiny-llama"),
        ("dp=2,tp=2,ep=4,zero=1", "tiny-mixtral"),
    ],
)
def test_z_loss(pool: Pool, layout: str, model: str) -> None:
    micro_batches = 4 if "dualpipev" in layout else 2
    assert_equal(pool, small_run(layout, Z_LOSS, model=model, micro_batches=micro_batches))


def test_z_loss_over_rows_that_only_pad_the_vocabulary(pool: Pool) -> None:
    assert_equal(pool, small_run("tp=8", Z_LOSS, "model.vocab=9", "model.tie_embeddings=true"))


def test_z_loss_is_told_apart_and_changes_gradients() -> None:
    with_it, without = (reference_trace(small_run("dp=1", *settings)) for settings in ([Z_LOSS], []))
    assert with_it.losses[0] == without.losses[0] and with_it.losses[1] != without.losses[1]
    assert len(with_it.z_losses) == 2 and not without.z_losses
    assert with_it.z_losses[1] < with_it.z_losses[0]


def test_z_loss_of_another_coefficient_is_no_proof(pool: Pool) -> None:
    from cuboid.verification.compare import compare, observed_trace

    run = small_run("dp=1", Z_LOSS)
    observed = observed_trace(small_run("dp=1", "training.z_loss=0.1000001"), 0)
    assert observed is not None and not compare(run, observed, reference_trace(run)).passed


def test_evaluation_has_no_z_loss(pool: Pool) -> None:
    found, expected = (
        pool.run("tests.parallel.cases:losses_and_evaluation", (small_run("tp=2", *still),), ranks=2)[0]
        for still in (["learning_rate.peak=0", Z_LOSS], ["learning_rate.peak=0"])
    )
    assert found == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_z_loss_in_sixteen_bits(pool: Pool, precision: str) -> None:
    run = small_run("dp=2,tp=2,zero=1", Z_LOSS, f"training.precision={precision}")
    found = verdict(pool, run)
    assert found["passed"], found


RATES = ("optimizer.embedding_rate=0.3", "optimizer.head_rate=5")


@pytest.mark.parametrize(
    ("layout", "model", "settings"),
    [
        ("dp=2,tp=2,pp=2,zero=1", "tiny-llama", RATES),
        ("dp=2,pp=2,zero=3,schedule=zbv", "tiny-llama", ("model.initialization=mup", *RATES)),
        ("dp=2,cp=2,zero=2", "tiny-llama", RATES),
        ("dp=2,tp=2,ep=2,zero=0", "tiny-mixtral", RATES),
        ("tp=2,pp=2", "tiny-gpt2", ("model.tie_embeddings=true", "optimizer.embedding_rate=0.3")),
        ("dp=2,tp=2,zero=1", "tiny-llama", ("optimizer.kind=muon", *RATES)),
        ("dp=2,zero=3", "tiny-llama", ("optimizer.kind=sgd", *RATES)),
    ],
)
def test_embedding_and_head_at_rates_of_their_own(
    pool: Pool, layout: str, model: str, settings: tuple[str, ...]
) -> None:
    assert_equal(pool, small_run(layout, *settings, model=model))


def test_rates_move_embedding_and_head_alone() -> None:
    """Without decay the first step of AdamW moves an element by its learning rate."""
    found = []
    for settings in (RATES, ()):
        run = small_run("dp=1", "optimizer.weight_decay=0", *settings)
        trace = reference_trace(run)
        found.append({name: (after - trace.start[name]).norm() for name, after in trace.parameters[0].items()})
    factors = {name: float(moved / found[1][name]) for name, moved in found[0].items()}
    expected = {"embedding.tokens.weight": 0.3, "head.output.weight": 5.0}
    assert factors == pytest.approx({name: expected.get(name, 1.0) for name in factors}, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["training.z_loss=-1"], "training.z_loss=-1"),
        (["training.z_loss=nan"], "training.z_loss=nan"),
        (["optimizer.embedding_rate=0"], "optimizer.embedding_rate=0.0 would not learn"),
        (["optimizer.head_rate=-1"], "optimizer.head_rate=-1"),
        (["optimizer.head_rate=inf"], "optimizer.head_rate=inf"),
        (["optimizer.head_rate=2", "model.tie_embeddings=true"], "optimizer.head_rate=2.* ties embeddings"),
    ],
)
def test_what_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_run({"model": "tiny-llama"}, settings)
