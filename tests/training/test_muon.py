"""Muon: on every layout what one process computes, resumed on any other, with as many bytes on the wire as planned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.storage import whole_tensors
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.kernels.newton_schulz import orthogonalize
from cuboid.launch.pool import Pool
from cuboid.model.attention import HeadPeaks
from cuboid.model.rope import PositionTable
from cuboid.model.transformer import Transformer
from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import CONTEXT_METHODS
from cuboid.spec.matrix_owners import stage_buckets
from cuboid.spec.run import Run, build_run, dump_run
from cuboid.training.own_optimizer import check_optimizer
from cuboid.verification.make import verification_run
from cuboid.verification.muon_reference import MuonUpdates
from cuboid.verification.reference import reference_trace
from tests.matrix import crossed, rest
from tests.parallel.cases import assert_equal, losses_and_evaluation, small_run


def muon(layout: str, *settings: str, model: str = "tiny-llama", micro_batches: int = 2) -> Run:
    return small_run(layout, "optimizer.kind=muon", *settings, model=model, micro_batches=micro_batches)


@pytest.mark.parametrize(("layout", "zero"), crossed(["dp=2,tp=2", "dp=2,cp=2", "dp=2,pp=2"], [0, 1, 2, 3]))
def test_every_zero_stage_equals_one_process(pool: Pool, layout: str, zero: int) -> None:
    assert_equal(pool, muon(f"{layout},zero={zero}"))


@pytest.mark.parametrize(
    "layout",
    [
        "dp=1",
        "tp=8",
        "tp=4,sequence_parallel=false",
        "dp=4,tp=2,zero=2,shard=2",
        "dp=4,pp=2,zero=3,shard=2",
        "dp=4,zero=3,shard=1",
        "dp=3,zero=3",
        *rest("dp=8", "dp=4,zero=1,shard=2"),
    ],
)
def test_shards_replicas_and_tensor_ranks(pool: Pool, layout: str) -> None:
    assert_equal(pool, muon(layout))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", *rest("gpipe", "1f1b", "zb1p", "dualpipev")])
def test_every_schedule(pool: Pool, schedule: str) -> None:
    assert_equal(pool, muon(f"dp=2,tp=2,pp=2,zero=1,schedule={schedule}", micro_batches=4))


@pytest.mark.parametrize("method", ["allgather", "hybrid", *rest("ring", "ulysses")])
def test_every_context_method(pool: Pool, method: str) -> None:
    assert_equal(pool, muon(f"cp=4,tp=2,zero=2,cp_method={method}"))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-mixtral", "dp=2,tp=4,ep=8,sequence_parallel=false,zero=3"),
        ("tiny-qwen3-moe", "dp=2,pp=2,ep=2,schedule=zbv,zero=3,recompute=full"),
        ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2"),
        ("tiny-deepseek", "cp=4,ep=2,cp_method=hybrid,zero=2"),
        ("tiny-deepseek", "dp=2,tp=2,pp=2,ep=2,schedule=dualpipev,zero=1"),
        ("tiny-gpt2", "dp=2,tp=2,pp=2,zero=1"),
        *rest(("tiny-mixtral", "dp=2,ep=2"), ("tiny-qwen3", "dp=2,pp=2,zero=3,schedule=zbv")),
    ],
)
def test_experts_latents_and_other_families(pool: Pool, model: str, layout: str) -> None:
    assert_equal(pool, muon(layout, model=model))


def test_five_dimensions(pool: Pool) -> None:
    assert_equal(pool, muon("dp=2,tp=2,pp=2,cp=2,ep=2,zero=1", model="tiny-mixtral"))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("tp=8", ["model.kv_heads=2"]),
        ("dp=2,tp=4,zero=1", ["model.kv_heads=1"]),
        ("tp=2,dp=2,zero=2", ["model.heads=6", "model.kv_heads=3", "model.head_dim=8"]),
        ("dp=2,tp=2,zero=1", ["optimizer.per_head=true"]),
        ("dp=2,tp=2,zero=1", ["optimizer.normuon=true", "optimizer.beta2=0.8"]),
        ("dp=4,zero=3,shard=2", ["optimizer.normuon=true", "optimizer.update_scale=original"]),
        ("dp=2,tp=2,zero=3", ["optimizer.update_scale=spectral", "optimizer.nesterov=false"]),
        ("dp=2,tp=2", ["optimizer.update_scale=original", "optimizer.matrix_rate=20", "optimizer.momentum=0.8"]),
        ("dp=4,zero=2", ["optimizer.newton_schulz_steps=3", "training.gradient_clip=0.1"]),
        ("dp=2,tp=2,zero=1", ["model.initialization=mup"]),
    ],
)
def test_heads_scales_and_what_does_not_divide(pool: Pool, layout: str, settings: list[str]) -> None:
    assert_equal(pool, muon(layout, *settings))


@pytest.mark.parametrize("setting", ["model.windows=[1]", "training.sequence_ramp=1x2"])
def test_a_gradient_of_rounding_alone_moves_nothing(pool: Pool, setting: str) -> None:
    """Queries that see one key have none: what differs by layout is noise, which even rows must not blow up."""
    assert_equal(pool, muon("tp=4", setting, "optimizer.normuon=true"))


def test_latent_heads(pool: Pool) -> None:
    changes = ("optimizer.per_head=true", "optimizer.normuon=true")
    assert_equal(pool, muon("dp=2,tp=2,ep=2,zero=1", *changes, model="tiny-deepseek"))


OWN = """
import torch

def softened(matrices):
    norms = matrices.norm(dim=(1, 2), keepdim=True)
    x = matrices / norms.clamp(min=1e-9)
    return x @ torch.linalg.inv(torch.eye(x.shape[2], dtype=x.dtype) + x.mT @ x)

def halves(matrices):
    return matrices[:, : matrices.shape[1] // 2]

def mixes(matrices):
    return matrices / matrices.norm()
"""


def test_a_function_of_ones_own_gets_whole_matrices(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    named = f"optimizer.matrix_function=python:{tmp_path}/own.py:"
    run = muon("dp=2,tp=2,zero=1", f"{named}softened")
    check_optimizer(run)
    assert_equal(pool, run)
    assert_equal(pool, muon("dp=2,ep=2,zero=3", f"{named}softened", model="tiny-mixtral"))
    for name, sentence in (
        ("halves", "it must return as many of the same shape"),
        ("mixes", "it must treat each by itself"),
        ("softend", "did you mean softened"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_optimizer(muon("dp=2", f"{named}{name}"))


def test_models_of_ones_own(pool: Pool) -> None:
    fused = "optimizer.fused.up.weight=[64, 192]"
    for name, layout, settings in (
        ("own_attention", "dp=2,tp=2,zero=1", ("optimizer.kind=muon", fused)),
        ("mixture", "dp=2,ep=2,zero=3", ("optimizer.kind=muon",)),
    ):
        assert_equal(pool, verification_run(layout, f"python:examples/{name}.py:build", settings, steps=2))


@pytest.mark.parametrize(
    ("model", "layout", "settings"),
    [
        ("tiny-llama", "dp=2,tp=2,zero=1", []),
        ("tiny-llama", "dp=2,tp=4,zero=3", ["model.kv_heads=2"]),
        ("tiny-llama", "cp=4,dp=2,cp_method=hybrid,recompute=full", []),
        ("tiny-gpt2", "dp=2,tp=2,pp=2,zero=2,recompute=selective", ["model.qkv_bias=true"]),
        ("tiny-deepseek", "dp=2,tp=2,ep=2,zero=1", []),
    ],
)
def test_heads_with_large_logits_are_clipped_alike(pool: Pool, model: str, layout: str, settings: list[str]) -> None:
    run = muon(layout, "optimizer.qk_clip=0.05", *settings, model=model)
    plain = reference_trace(muon(layout, *settings, model=model)).parameters[0]
    clipped = reference_trace(run).parameters[0]
    changed = {name.split(".attention.")[-1].split(".")[0] for name in plain if not plain[name].equal(clipped[name])}
    assert changed == ({"query_up", "key_value_up"} if model == "tiny-deepseek" else {"query", "key"})
    assert_equal(pool, run)


def test_clipped_heads_meet_the_limit() -> None:
    """The logits of the first batch, computed anew with its clipped weights, before anything else is learned."""
    run = muon("dp=1", "optimizer.qk_clip=0.05", "learning_rate.peak=1e-9")
    start, clipped = (reference_trace(run).start, reference_trace(run).parameters[0])
    model = Transformer(run.model).double()
    width, group = run.model.head_dim, run.model.heads // run.model.kv_heads
    bounds = []
    for weights in (start, clipped):
        model.load_state_dict(weights)
        attention = model.layers["0"].attention
        attention.peaks = HeadPeaks(torch.zeros(run.model.heads).double(), torch.zeros(run.model.kv_heads).double())
        source = make_source(run)
        table = PositionTable(run.model, run.training.sequence, torch.float64, torch.device("cpu"))
        for place in range(run.training.global_batch):
            ids = source.documents_at(place).unsqueeze(0)
            tokens, labels = (each.unsqueeze(0) for each in source.at(place))
            model.loss(tokens, labels, table.of(torch.arange(run.training.sequence), ids, run.data))
        query, key = attention.peaks
        bounds.append((query * key.repeat_interleave(group)).sqrt() / width**0.5)
    assert (bounds[0] > 0.05).any()
    assert torch.allclose(bounds[1], bounds[0].clamp(max=0.05), rtol=1e-6)


def test_buckets_travel_one_after_another(pool: Pool) -> None:
    run = muon("dp=2,tp=2,zero=1", "model.layers=5")
    expected = pool.run("tests.parallel.cases:losses", (run,), ranks=4)
    found = pool.run("tests.training.muon_jobs:many_buckets", (run,), ranks=4)
    assert [(buckets, surprises) for buckets, surprises, _ in found] == [(5, [])] * 4
    assert [losses for *_, losses in found] == expected


def draw(source: random.Random) -> Run:
    """A run with Muon on at most 8 ranks, with experts or without; draws again when the rules refuse one."""
    while True:
        pick = source.choice
        sizes = {name: pick([1, 2, 2, 3, 4]) for name in ("dp", "tp", "pp", "cp", "ep")}
        if not 1 < sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"] <= 8:
            continue
        parts = [f"{name}={size}" for name, size in sizes.items()]
        parts += [f"zero={pick(range(4))}", f"shard={pick([0, 0, 1, 2])}"]
        parts += [f"schedule={pick(['gpipe', '1f1b', 'interleaved', 'zb1p', 'zbv', 'dualpipev'])}"]
        parts += [f"cp_method={pick(CONTEXT_METHODS)}", f"sequence_parallel={pick(['true', 'false'])}"]
        settings = [f"model.layers={pick([3, 4, 5])}", f"optimizer.per_head={pick(['true', 'false'])}"]
        settings += [f"optimizer.normuon={pick(['true', 'false'])}", f"optimizer.qk_clip={pick([0, 0.05])}"]
        settings += [f"optimizer.update_scale={pick(['rms', 'spectral', 'original'])}"]
        model = pick(["tiny-mixtral", "tiny-deepseek"] if sizes["ep"] > 1 else ["tiny-llama", "tiny-gpt2"])
        try:
            return muon(",".join(parts), *settings, model=model, micro_batches=pick([1, 2, 3]))
        except UserError:
            continue


def test_random_layouts_equal_one_process(pool: Pool, thorough: bool) -> None:
    source = random.Random(20261118)
    for _ in range(100 if thorough else 3):
        assert_equal(pool, draw(source))


@pytest.mark.parametrize(
    ("precision", "layout"), crossed(["bf16", "fp16", "float32"], ["dp=2,tp=2,pp=2,zero=1", "dp=4,zero=3,shard=2"])
)
def test_bytes_of_other_precisions_are_as_planned(pool: Pool, precision: str, layout: str) -> None:
    run = muon(layout, f"training.precision={precision}", "training.loss_scale=1024.0")
    assert pool.run("tests.parallel.cases:unforeseen", (run,), ranks=run.layout.world_size) == [[]] * (
        run.layout.world_size
    )


def test_master_weights_beside_16_bits(pool: Pool) -> None:
    assert_equal(pool, muon("dp=2,tp=2,zero=3", "training.precision=bf16"))


def test_biases_that_are_clipped_beside_16_bits(pool: Pool) -> None:
    clipped = ("optimizer.qk_clip=0.01", "model.qkv_bias=true", "training.precision=bf16")
    assert_equal(pool, muon("dp=2", *clipped))


CHAIN = ["dp=2,tp=2,zero=3", "tp=2,pp=2", "dp=4,zero=1,shard=2", "cp=2,dp=2,zero=2"]


@pytest.mark.parametrize(
    ("model", "chain", "normuon"),
    [
        ("tiny-llama", CHAIN, False),
        ("tiny-deepseek", ["dp=2,tp=2,zero=0", "dp=2,ep=2,zero=2", "dp=1"], True),
        *rest(("tiny-mixtral", ["dp=2,ep=2,tp=2,zero=1", "pp=2,dp=2,ep=2,zero=3"], True)),
    ],
)
def test_it_resumes_on_other_layouts(pool: Pool, tmp_path: Path, model: str, chain: list[str], normuon: bool) -> None:
    steps = 2 * len(chain)
    common = [f"training.steps={steps}", "training.global_batch=8", "training.sequence=16", "model.layers=3"]
    common += ["optimizer.normuon=true"] if normuon else []
    alone = muon("dp=1", *common, model=model)
    job = "tests.checkpoint.jobs:train_part"
    expected = pool.run(job, (alone, str(tmp_path / "one"), 0, steps, None), ranks=1)[0]
    seen: list[float] = []
    source: str | None = None
    for place, layout in enumerate(chain):
        run = muon(layout, *common, model=model)
        arguments = (run, str(tmp_path / "many"), 2 * place, 2 * place + 2, source)
        seen += pool.run(job, arguments, ranks=run.layout.world_size)[0]
        source = str(checkpoint_path(tmp_path / "many", 2 * place + 2))
    assert seen == pytest.approx(expected, rel=1e-9)
    reference, final = (whole_tensors(checkpoint_path(tmp_path / kind, steps)) for kind in ("one", "many"))
    assert final.keys() == reference.keys()
    kinds = {key.partition("/")[0] for key in final if key.endswith("attention.output.weight")}
    assert kinds == {"parameter", "momentum_buffer"} | ({"row_avg_sq"} if normuon else set())
    assert {key.partition("/")[0] for key in final if "norm" in key} >= {"parameter", "exp_avg", "exp_avg_sq"}
    for key, tensor in reference.items():
        assert torch.allclose(final[key], tensor, rtol=1e-8, atol=1e-12), key


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=2,zero=3,recompute=selective", ["optimizer.qk_clip=0.01", "optimizer.normuon=true"]),
        *rest(("tp=2", []), ("dp=2,zero=1,recompute=full", ["optimizer.qk_clip=0.01", "optimizer.normuon=true"])),
    ],
)
def test_the_graphs_of_a_compiled_run(pool: Pool, layout: str, settings: list[str]) -> None:
    fields = ["training.steps=3", "training.precision=float32", "model.layers=2", "training.global_batch=2"]
    fields += ["data.attention_within_documents=false", "optimizer.kind=muon", "learning_rate.peak=0.01", *settings]
    plain = losses_and_evaluation(0, small_run("dp=1", *fields))
    for found, stops in pool.run(
        "tests.parallel.cases:traced", (small_run(layout, *fields, "training.compile=on"),), ranks=2
    ):
        assert found == pytest.approx(plain, rel=1e-5)
        assert not stops
    if settings:
        unclipped = losses_and_evaluation(0, small_run("dp=1", *fields, "optimizer.qk_clip=0"))
        assert abs(unclipped[-1] - plain[-1]) > 1e-4 * plain[-1], "clipping would be seen"


def test_a_step_that_is_not_finite_changes_nothing(pool: Pool) -> None:
    run = muon("dp=2,tp=2,zero=1")
    assert pool.run("tests.parallel.cases:poisoned_step", (run,), ranks=4) == [(False, True)] * 4


def test_norms_by_layer_are_the_same_on_any_layout(pool: Pool) -> None:
    job = "tests.parallel.cases:layer_norms"
    expected, _ = pool.run(job, (muon("dp=1", "training.global_batch=8"),), ranks=1)[0]
    run = muon("dp=2,tp=2,zero=2", "training.global_batch=8")
    found, _ = pool.run(job, (run,), ranks=4)[0]
    for here, there in zip(found, expected, strict=True):
        for kind in ("gradient_norm", "update_norm", "weight_norm"):
            assert here[kind] == pytest.approx(there[kind], rel=1e-9)
            assert min(here[kind]) > 0


def test_a_rank_keeps_one_moment_of_matrices(pool: Pool) -> None:
    held = [
        pool.run("tests.parallel.cases:held_bytes", (run,), ranks=2)
        for run in (muon("dp=2,zero=1"), small_run("dp=2,zero=1"))
    ]
    matrices = sum(matrix.rows * matrix.columns for matrix in stage_buckets(muon("dp=1"), 0)[0])
    with_muon, with_adamw = (sum(rank["optimizer"] for rank in ranks) for ranks in held)
    assert with_adamw - with_muon == 8 * matrices


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-llama", "dp=2,tp=2,zero=1"),
        ("tiny-llama", "dp=4"),
        ("tiny-llama", "dp=2,pp=2,zero=3"),
        ("tiny-mixtral", "dp=2,ep=2,zero=1"),
    ],
)
def test_the_planner_knows_what_is_kept(pool: Pool, model: str, layout: str) -> None:
    run = muon(layout, "training.precision=float32", "model.layers=4", model=model)
    held = pool.run("tests.parallel.cases:held_bytes", (run,), ranks=run.layout.world_size)
    plan = predict(
        Question(
            model=run.model,
            cluster=load_cluster(f"cpux{run.layout.world_size}"),
            global_batch=run.training.global_batch,
            sequence=run.training.sequence,
            precision="float32",
            optimizer=run.planned_optimizer(),
        ),
        run.layout,
    )
    ranks = run.layout.world_size // run.layout.pp
    for place, row in enumerate(plan.memory):
        kept = [rank["optimizer"] for rank in held[place * ranks : (place + 1) * ranks]]
        assert sum(kept) / ranks == pytest.approx(row["optimizer"], rel=0.01)


@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("original", "original")])
def test_steps_are_those_of_torchs_own_muon(scale: str, theirs: str) -> None:
    run = muon("dp=1", "optimizer.newton_schulz_precision=bf16", f"optimizer.update_scale={scale}")
    parameters = dict(Transformer(run.model).named_parameters())
    updates = MuonUpdates(run, parameters)
    chosen = {name: parameters[name] for name in parameters if ".query." in name or ".down." in name or ".up." in name}
    copies = {name: torch.nn.Parameter(value.detach().clone()) for name, value in chosen.items()}
    optimizer = torch.optim.Muon(list(copies.values()), lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs)
    before = {name: value.detach().clone() for name, value in copies.items()}
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, value in parameters.items():
            value.grad = torch.randn(value.shape, generator=random)  # of full rank: rounding decides nothing
            if name in copies:
                copies[name].grad = value.grad.clone()
        updates.step(0.02)
        optimizer.step()
    for name, value in copies.items():
        way = (value - before[name]).norm()
        assert ((chosen[name] - value).norm() / way).item() < 0.05, name  # two orders of rounding to bf16


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_singular_values_end_near_one(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    found = orthogonalize(x, 5)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.25
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    near = left @ right
    assert ((found * near).sum() / found.norm() / near.norm()).item() > 0.97, "the same singular vectors"
    assert torch.equal(orthogonalize(torch.zeros(shape), 5), torch.zeros(shape))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["optimizer.momentum=1.0"], "optimizer.momentum=1.0 never forgets; use a number below 1"),
        (["optimizer.newton_schulz_steps=0"], "optimizer.newton_schulz_steps=0"),
        (["optimizer.matrix_rate=0"], "optimizer.matrix_rate=0.0 would not learn; use a number above 0"),
        (["optimizer.update_scale=adam"], 'optimizer.update_scale="adam" is unknown; use rms, spectral or original'),
        (["optimizer.fused.qkv=3"], "optimizer.fused.qkv=3"),
        (["optimizer.fused.qkv=[3, 0]"], "optimizer.fused.qkv=[3, 0] is no list of rows; write it like [64, 32, 32]"),
        (["optimizer.fused.up=[96, 96]"], "is for a model of one's own"),
        (["optimizer.qk_clip=-1"], "optimizer.qk_clip=-1"),
        (["optimizer.matrix_function=polar"], "names no function; write python:my_optimizer.py:name"),
        (["optimizer.qk_clip=10", "model.qk_norm=true"], "has nothing to clip with model.qk_norm=true"),
        (["optimizer.options.momentum=0.9"], "mean nothing to AdamW and Muon"),
        (["layout=dp=2,zero=1,offload=true"], "offload=true is for AdamW, not for optimizer.kind=muon"),
        (["optimizer.kind=adamw", "optimizer.momentum=0.9"], "momentum=0.9 means nothing to optimizer.kind=adamw"),
        (["optimizer.kind=sgd", "optimizer.nesterov=false"], "use optimizer.kind=muon or optimizer.options"),
    ],
)
def test_what_cannot_work_is_refused(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        muon("dp=2", *settings)
    assert sentence in str(refusal.value)


def test_a_run_file_keeps_it() -> None:
    run = muon("dp=2", "optimizer.per_head=true", "optimizer.momentum=0.9")
    assert build_run(__import__("tomllib").loads(dump_run(run))) == run


def test_a_wrong_name_names_muon() -> None:
    with pytest.raises(UserError, match="muon"):
        check_optimizer(small_run("dp=1", "optimizer.kind=muom"))
