"""Parts of today's recipes for pretraining: on every layout what one process computes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.huggingface.export import export_model
from cuboid.checkpoint.location import locate
from cuboid.checkpoint.storage import whole_tensors
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.run import build_run
from cuboid.telemetry.rows import metric_rows
from cuboid.training.trainer import train
from cuboid.verification.compare import compare, observed_trace
from cuboid.verification.make import verification_run
from cuboid.verification.reference import reference_trace
from cuboid.verification.resume import judge_chain
from tests.matrix import crossed, rest
from tests.parallel.cases import assert_equal, losses_and_evaluation, small_run, verdict
from tests.parallel.test_random_layouts import PLAIN, draw

Z_LOSS = "training.z_loss=0.1"
"""Large, so that a wrong gradient would show."""
COMPILED = (
    *("training.steps=3", "training.precision=float32", "model.layers=2", "training.global_batch=2"),
    *("data.attention_within_documents=false", "learning_rate.peak=0.01"),
)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=1", "tiny-llama"),
        ("dp=2,tp=2,zero=1", "tiny-gpt2"),
        ("dp=2,pp=2,zero=3,schedule=zbv", "tiny-llama"),
        ("tp=4,sequence_parallel=false", "tiny-llama"),
        ("tp=2,pp=2,schedule=dualpipev", "tiny-llama"),
        ("cp=2,tp=2,pp=2", "tiny-llama"),
        ("dp=2,tp=2,ep=4,zero=1", "tiny-mixtral"),
        *rest(("dp=2,tp=2,pp=2,zero=0", "tiny-llama"), ("dp=2,cp=2,zero=2", "tiny-llama")),
    ],
)
def test_z_loss(pool: Pool, layout: str, model: str) -> None:
    micro_batches = 4 if "dualpipev" in layout else 2
    assert_equal(pool, small_run(layout, Z_LOSS, model=model, micro_batches=micro_batches))


@pytest.mark.parametrize(("layout", "ranks"), [("tp=2", 2), *rest(("dp=2,zero=1", 2))])
def test_z_loss_and_dropout_in_the_graphs_of_a_compiled_run(pool: Pool, layout: str, ranks: int) -> None:
    fields = [*COMPILED, "training.z_loss=0.1", "training.dropout=0.2"]
    plain = losses_and_evaluation(0, small_run("dp=1", *fields))
    for other in ("z_loss", "dropout"):
        assert plain != losses_and_evaluation(0, small_run("dp=1", *fields, f"training.{other}=0"))
    run = small_run(layout, *fields, "training.compile=on")
    for found, stops in pool.run("tests.parallel.cases:traced", (run,), ranks=ranks):
        assert found == pytest.approx(plain, rel=1e-5)
        assert not stops


def test_z_loss_over_rows_that_only_pad_the_vocabulary(pool: Pool) -> None:
    assert_equal(pool, small_run("tp=8", Z_LOSS, "model.vocab=9", "model.tie_embeddings=true"))


def test_z_loss_is_told_apart_and_changes_gradients() -> None:
    with_it, without = (reference_trace(small_run("dp=1", *settings)) for settings in ([Z_LOSS], []))
    assert with_it.losses[0] == without.losses[0] and with_it.losses[1] != without.losses[1]
    assert len(with_it.z_losses) == 2 and not without.z_losses
    assert with_it.z_losses[1] < with_it.z_losses[0]


def test_z_loss_of_another_coefficient_is_no_proof() -> None:
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
        ("dp=2,tp=2,ep=2,zero=0", "tiny-mixtral", RATES),
        ("tp=2,pp=2", "tiny-gpt2", ("model.tie_embeddings=true", "optimizer.embedding_rate=0.3")),
        ("dp=2,tp=2,zero=1", "tiny-llama", ("optimizer.kind=muon", *RATES)),
        ("dp=2,zero=3", "tiny-llama", ("optimizer.kind=sgd", *RATES)),
        *rest(("dp=2,cp=2,zero=2", "tiny-llama", RATES)),
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
        (["optimizer.average=1"], "optimizer.average=1.* never forgets"),
        (["optimizer.average=-0.5"], "optimizer.average=-0.5"),
        (["optimizer.average=0.9", "layout.offload=true"], "optimizer.average=0.9.* use offload=false"),
        (["evaluation.average=true"], "evaluation.average=true has no average"),
    ],
)
def test_what_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_run({"model": "tiny-llama"}, settings)


AVERAGE = "optimizer.average=0.7"


@pytest.mark.parametrize(
    ("layout", "model", "settings"),
    [
        ("dp=2,tp=2,pp=2,zero=0", "tiny-llama", ()),
        ("dp=2,tp=2,zero=1", "tiny-gpt2", ("model.tie_embeddings=true",)),
        ("dp=2,pp=2,zero=3,schedule=zbv", "tiny-llama", ()),
        ("dp=4,zero=1,shard=2", "tiny-llama", ()),
        ("tp=8", "tiny-llama", ("model.vocab=9",)),
        ("dp=2,tp=2,ep=4,zero=3", "tiny-deepseek", ()),
        ("dp=2,tp=2,zero=1", "tiny-llama", ("optimizer.kind=muon", "optimizer.qk_clip=0.05")),
        ("dp=2,zero=3", "tiny-llama", ("optimizer.kind=sgd",)),
        *rest(("dp=2,cp=2,zero=2", "tiny-llama", ())),
    ],
)
def test_the_average_of_weights(pool: Pool, layout: str, model: str, settings: tuple[str, ...]) -> None:
    run = small_run(layout, AVERAGE, *settings, model=model)
    assert len(reference_trace(run).averages) == 2
    assert_equal(pool, run)


def test_another_decay_is_no_proof() -> None:
    run, other = (small_run("dp=1", f"optimizer.average={decay}") for decay in (0.7, 0.7001))
    observed = observed_trace(other, 0)
    assert observed is not None
    found = compare(run, observed, reference_trace(run))
    assert not found.passed and found.worst_parameter.startswith("average/")


def test_the_average_resumes_on_other_layouts(pool: Pool, tmp_path: Path) -> None:
    chain = ["dp=2,tp=2,zero=3", "tp=2,pp=2", "dp=4,zero=1,shard=2", "cp=2,dp=2,zero=2"]
    common = ("training.global_batch=8", "training.sequence=16", "model.layers=3", AVERAGE)
    runs = [verification_run(layout, "tiny-llama", common, steps=len(chain)) for layout in chain]
    losses = [
        pool.run("cuboid.verification.resume:train_leg", (run, str(tmp_path), step, step + 1), ranks=4)[0]
        for step, run in enumerate(runs)
    ]
    found = judge_chain(0, runs, str(tmp_path), losses)
    assert found["passed"], found
    held = whole_tensors(checkpoint_path(locate(tmp_path), 4))
    name = "embedding.tokens.weight"
    assert not held[f"average/{name}"].equal(held[f"parameter/{name}"])


@pytest.mark.parametrize(("precision", "zero"), crossed(["bf16", "fp16"], [0, 1, 3]))
def test_the_average_follows_master_weights_in_sixteen_bits(pool: Pool, precision: str, zero: int) -> None:
    run = small_run(f"dp=2,zero={zero}", AVERAGE, f"training.precision={precision}")
    for dtype, error in pool.run("tests.training.recipe_jobs:average_beside_weights", (run,), ranks=2):
        assert dtype == torch.float32 and error < 1e-6


@pytest.mark.parametrize("precision", ["bf16", *rest("float32")])
def test_the_average_in_one_compiled_pass(pool: Pool, precision: str) -> None:
    fields = (*COMPILED, AVERAGE, f"training.precision={precision}", "training.compile=on")
    run = small_run("dp=2,zero=1", *fields)
    for dtype, error in pool.run("tests.training.recipe_jobs:average_as_traced", (run,), ranks=2):
        assert dtype == torch.float32 and error < 1e-6


def test_a_training_evaluates_its_average(tmp_path: Path) -> None:
    """With a decay that all but keeps the first weights, the loss stays what it was at the start."""
    fields = (*COMPILED, "training.steps=4", "training.global_batch=4", "data.source=python-stdlib")
    fields += ("data.validation_fraction=0.1", "evaluation.every=2", "evaluation.batches=1")
    found = {}
    for name, more in {
        "weights": (),
        "average": ("evaluation.average=true", "optimizer.average=0.999999"),
        "still": ("learning_rate.peak=0",),
        "kept": ("optimizer.average=0.999999",),
    }.items():
        run = small_run("dp=1", *fields, *more, f"output.folder={tmp_path / name}")
        train(run, 0, torch.device("cpu"), quiet=True)
        found[name] = metric_rows(tmp_path / name / "metrics.jsonl")
    losses = {name: [row["loss"] for row in rows] for name, rows in found.items()}
    validation = {
        name: [row["validation_loss"] for row in rows if "validation_loss" in row] for name, rows in found.items()
    }
    assert losses["average"] == losses["weights"] == losses["kept"]
    assert validation["kept"] == validation["weights"] and len(validation["weights"]) == 2
    assert validation["average"] == pytest.approx(validation["still"], rel=1e-4)
    assert validation["weights"][1] < 0.99 * validation["still"][1]


@pytest.mark.parametrize(
    ("layout", "precision"), crossed(["dp=2,tp=2,zero=1", "dp=2,zero=0", "dp=2,pp=2,zero=3"], ["float64", "bf16"])
)
def test_evaluation_of_the_average(pool: Pool, layout: str, precision: str) -> None:
    """And the training continues as if nobody had looked."""
    run = small_run(layout, AVERAGE, f"training.precision={precision}")
    ranks = run.layout.world_size
    for averaged, plain, before, after in pool.run("tests.training.recipe_jobs:evaluated", (run,), ranks=ranks):
        assert averaged != plain
        assert before == after
    if precision == "float64":
        whole = pool.run("tests.training.recipe_jobs:evaluated", (replace(run, layout=Layout()),), ranks=1)
        found = pool.run("tests.training.recipe_jobs:evaluated", (run,), ranks=ranks)
        assert [each[:2] for each in found] == [pytest.approx(whole[0][:2], rel=1e-9)] * ranks


def test_the_planner_counts_four_bytes_a_parameter_over_its_shards() -> None:
    cluster, model = load_cluster("h100x16"), load_model("llama3-8b")
    plans = [
        predict(Question(model=model, cluster=cluster, global_batch=64, sequence=4096, average=decay), layout)
        for layout in (Layout.parse("dp=16,zero=1"), Layout.parse("dp=8,tp=2,zero=0"))
        for decay in (0.0, 0.999)
    ]
    held = [plan.memory[0]["optimizer"] for plan in plans]
    assert held[1] - held[0] == pytest.approx(4 * model.parameters / 16, rel=0.01)
    assert held[3] - held[2] == pytest.approx(4 * model.parameters / 2, rel=0.01)
    assert plans[1].seconds > plans[0].seconds
    assert plans[1].run.optimizer.average == 0.999


def test_ranks_keep_what_the_planner_counts(pool: Pool) -> None:
    extra = []
    for layout in ("dp=2,zero=0", "dp=2,zero=1"):
        with_it, without = (
            pool.run("tests.training.recipe_jobs:state_bytes", (small_run(layout, *settings),), ranks=2)[0]
            for settings in ([AVERAGE, "training.precision=float32"], ["training.precision=float32"])
        )
        extra.append(with_it - without)
    parameters = small_run("dp=2").model.parameters
    assert extra == pytest.approx([4 * parameters, 2 * parameters], rel=0.02)


def test_hugging_face_gets_the_average(pool: Pool, tmp_path: Path) -> None:
    run = small_run("dp=2,tp=2,zero=1", AVERAGE, "training.precision=float32")
    pool.run("tests.checkpoint.jobs:train_part", (run, str(tmp_path / "checkpoints"), 0, 2, None), ranks=4)
    for average in (True, False):
        export_model(tmp_path / "checkpoints", tmp_path / str(average), average=average)
    averaged, plain = (load_file(tmp_path / str(average) / "model.safetensors") for average in (True, False))
    held = whole_tensors(checkpoint_path(locate(tmp_path / "checkpoints"), 2))
    name = "embedding.tokens.weight"
    assert averaged["model.embed_tokens.weight"].equal(held[f"average/{name}"])
    assert plain["model.embed_tokens.weight"].equal(held[f"parameter/{name}"])
    assert not held[f"average/{name}"].equal(held[f"parameter/{name}"])


def test_no_average_is_exported_where_none_was_kept(pool: Pool, tmp_path: Path) -> None:
    run = small_run("dp=2")
    pool.run("tests.checkpoint.jobs:train_part", (run, str(tmp_path / "checkpoints"), 0, 1, None), ranks=2)
    with pytest.raises(UserError, match="has no average of weights"):
        export_model(tmp_path / "checkpoints", tmp_path / "out", average=True)


def test_all_parts_on_random_layouts(pool: Pool, thorough: bool) -> None:
    source = random.Random(20261119)
    for _ in range(60 if thorough else 3):
        run = draw(source, 8, PLAIN)
        head_rate = 1.0 if run.model.tie_embeddings else 5.0
        parts = replace(run.optimizer, average=0.7, embedding_rate=0.3, head_rate=head_rate)
        assert_equal(pool, replace(run, training=replace(run.training, z_loss=0.1), optimizer=parts))
