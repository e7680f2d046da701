"""Plans of models of one's own: memory as ranks measure it, arithmetic as counted by hand, layouts that train."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuboid
from cuboid import EXPERT, PARTIAL, Batch, Model, RoutedExperts, Routing, Tokens
from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.model.custom import counted_labels
from cuboid.model.segment_costs import SegmentCosts
from cuboid.planning.choose import predict
from cuboid.planning.collectives import predicted_ledger
from cuboid.planning.plan import dump_plan, load_plan
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import PythonModelSpec, SegmentRun
from cuboid.spec.run import build_run
from cuboid.spec.sharding import Split
from cuboid.training.communication import summarize
from tests.matrix import crossed

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {
    "state_space": ("model.options.hidden=96", "training.sequence=32"),
    "vision_transformer": ("model.options.hidden=96",),
    "own_attention": ("model.options.hidden=128", "training.sequence=64"),
    "mixture": ("model.options.hidden=96", "training.sequence=128"),
}
LAYOUTS = [
    "dp=1,micro_batch=4",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "dp=1,recompute=full",
    "pp=4,micro_batch=2",
    "dp=2,tp=2,pp=2",
    "dp=4,zero=1",
    "dp=1,recompute=selective",
    "tp=2,recompute=selective",
    "pp=2,recompute=full,recompute_layers=1",
    "pp=2,schedule=interleaved,vpp=2",
    "pp=2,schedule=zb1p",
    "pp=2,schedule=zbv",
    "dp=2,pp=2,zero=1,schedule=zb1p",
    "dp=2,pp=2,zero=2,schedule=zbv",
]
EXPERT_LAYOUTS = [
    "dp=1",
    "dp=2,ep=2",
    "dp=2,ep=2,zero=1",
    "dp=2,ep=2,zero=2",
    "dp=2,ep=2,zero=3",
    "dp=2,ep=2,zero=2,micro_batch=8",  # one micro-batch: nobody adds to the gradients of experts
    "dp=4,ep=2,zero=1",
    "dp=2,tp=2,ep=4",
    "dp=2,tp=2,ep=2,zero=2",
    "ep=2,pp=2,dp=2",
    "dp=2,ep=2,recompute=full",
    "dp=2,ep=2,recompute=selective",
    "dp=2,ep=2,pp=2,schedule=zb1p",
    "tp=2,ep=2,pp=2,schedule=zbv",
]

USUAL = [
    ("state_space", "pp=2,schedule=zbv"),
    ("vision_transformer", "dp=2,pp=2,zero=1,schedule=zb1p"),
    ("own_attention", "tp=2,recompute=selective"),
    ("mixture", "dp=2,tp=2,ep=4"),
]
"""What is measured in every run of the tests."""


def own(name: str) -> str:
    return f"python:{EXAMPLES / name}.py:build"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in USUAL else pytest.mark.thorough)
        for name in SIZES
        for layout in (EXPERT_LAYOUTS if name == "mixture" else LAYOUTS)
    ],
)
def test_memory_is_what_ranks_measure(pool: Pool, name: str, layout: str) -> None:
    table = {"model": own(name), "layout": layout}
    run = build_run(table, ["training.global_batch=16", "training.device=cpu", *SIZES[name]])
    ranks = run.layout.world_size
    measured = pool.run("tests.planning.own_model_jobs:measured_peak", (run,), ranks=ranks)
    question = Question(
        model=run.model,
        cluster=load_cluster(f"cpux{ranks}"),
        global_batch=16,
        sequence=run.training.sequence,
        precision="float32",
    )
    predicted = predict(question, run.layout).totals
    for rank, seen in enumerate(measured):
        assert predicted[rank // (ranks // run.layout.pp)] == pytest.approx(seen, rel=0.05), rank


class Two(nn.Module):
    """Two matmuls with a ReLU between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


class Looks(Two):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return super().forward(x, batch) if x.sum() > 0 else x


class Embedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, hidden)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.tokens(batch["tokens"])
        return x


class Head(nn.Module):
    def __init__(self, hidden: int, field: str) -> None:
        super().__init__()
        self.output, self.field = nn.Linear(hidden, 11), field

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        labels = batch[self.field].flatten()
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), labels, reduction="sum")


def build(hidden: int = 16, block: type[nn.Module] = Two, field: str = "labels") -> Model:
    return Model(
        embedding=lambda: Embedding(hidden),
        block=lambda layer: block(hidden),
        layers=4,
        head=lambda: Head(hidden, field),
        flow=("batch", "sequence", hidden),
        count=counted_labels,
    )


def test_arithmetic_and_bytes_are_those_counted_by_hand() -> None:
    run = SegmentRun(tensor=1, micro_batch=2, sequence=8, precision="float32")
    costs = build().costs("layers.1", run)
    tokens, hidden = 2 * 8, 16
    matmuls = 2 * 2 * tokens * 3 * hidden * hidden
    assert sum(flops for flops, _ in costs.forward) == matmuls
    assert sum(flops for flops, _ in costs.backward) == 2 * matmuls
    assert costs.parameters == 6 * hidden**2
    assert costs.flow == 4 * tokens * hidden
    # The input, and what ReLU gave, which it and the second matmul need.
    assert costs.kept == 4 * tokens * (hidden + 3 * hidden)
    # Input, both sides of ReLU, which are alive at once.
    assert costs.forward_peak == 4 * tokens * (hidden + 2 * 3 * hidden)
    again = build().costs("layers.1", replace(run, recompute="full"))
    assert again.kept == 4 * tokens * hidden
    # Up to what ReLU gave: nobody needs the second matmul again.
    assert again.repeated == matmuls / 2 and again.flops == costs.flops == 3 * matmuls
    split = build().costs("layers.1", replace(run, splits_backward=True, adds_in_place=True))
    assert sum(flops for flops, _ in split.weight) == matmuls
    # Of each matmul its input and the gradient of its output.
    assert split.postponed == 4 * tokens * (hidden + 3 * hidden + 3 * hidden + hidden)


class Normed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def test_a_gpu_keeps_less_of_norms_than_a_cpu() -> None:
    """As measured on an H200: RMSNorm is one kernel there, which keeps its input and a float32 for each row."""
    run = SegmentRun(tensor=1, micro_batch=2, sequence=8, precision="bf16", on_gpu=True)
    tokens, hidden = 2 * 8, 16
    assert build(block=Normed).costs("layers.1", run).kept == tokens * (2 * hidden + 4)
    # On a CPU the input in float32, the normed one, and the numbers of the rows.
    assert build(block=Normed).costs("layers.1", replace(run, on_gpu=False)).kept >= tokens * (4 * 2 * hidden + 4)


class Scores(nn.Module):
    """Nothing but what every token says of every other."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return (x @ (x * self.key).transpose(1, 2)).softmax(-1) @ x


def test_a_gpu_needs_a_further_tensor_in_the_backward_of_softmax() -> None:
    """Torch's kernel first multiplies gradient and output (SoftMax.cu)."""
    run = SegmentRun(tensor=1, micro_batch=2, sequence=256, precision="bf16")
    cpu, gpu = (build(block=Scores).costs("layers.1", replace(run, on_gpu=on_gpu)) for on_gpu in (False, True))
    assert gpu.backward_peak - cpu.backward_peak == 2 * 2 * 256 * 256
    assert (gpu.kept, gpu.forward_peak) == (cpu.kept, cpu.forward_peak)


def test_costs_of_large_micro_batches_are_estimated_from_small_ones() -> None:
    model = build()
    for prefix in model.prefixes:
        run = SegmentRun(tensor=1, micro_batch=16, sequence=8, precision="float32")
        estimate, real = (find(prefix, run) for find in (model.estimated_costs, model.costs))
        assert (estimate.forward, estimate.backward, estimate.kept) == (real.forward, real.backward, real.kept)
        assert estimate.backward_peak == pytest.approx(real.backward_peak, rel=0.1)


def test_the_best_plan_fits_and_can_be_trained(tmp_path: Path) -> None:
    plan = cuboid.plan(own("vision_transformer"), "h100x8", global_batch=64, sequence=16, top=3)
    assert plan.layout.world_size == 8 and plan.peak < plan.question.limit
    assert plan.seconds == min(plan.seconds, *(other.step_seconds * 1.005 for other in plan.alternatives))
    (tmp_path / "plan.toml").write_text(dump_plan(plan))
    again = load_plan(tmp_path / "plan.toml")
    assert (again.layout, again.seconds, again.peak) == (plan.layout, plan.seconds, pytest.approx(plan.peak))
    fixed = cuboid.plan(own("vision_transformer"), "h100x8", global_batch=64, sequence=16, fixed={"tp": 2, "pp": 2})
    assert (fixed.layout.tp, fixed.layout.pp, fixed.layout.dp) == (2, 2, 2)


def test_what_needs_too_much_is_refused_with_the_least_it_needs() -> None:
    question = Question(
        model=cuboid.make_run({"model": own("own_attention")}).model,
        cluster=load_cluster("cpux2"),
        global_batch=4,
        sequence=16,
        precision="float32",
        memory_limit=1e5,
        fixed={"micro_batch": 1},
    )
    from cuboid.planning.choose import plans

    with pytest.raises(UserError, match=r"does not fit cpux2: dp=1,tp=2,.* needs least"):
        plans(question)


def test_modules_that_cannot_be_run_without_contents_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"layers\.0 cannot be planned: on tensors without contents it fails"):
        build(block=Looks).costs("layers.0", SegmentRun(1, 1, 8, "float32"))
    with pytest.raises(UserError, match="head asks for 'targets' of a batch that has 'tokens' or 'labels'"):
        build(field="targets").costs("head", SegmentRun(1, 1, 8, "float32"))


def test_a_utilization_is_flops_over_the_peak() -> None:
    plan = cuboid.plan(own("own_attention"), "h100x1", global_batch=4, sequence=64)
    assert 0 < plan.utilization < 1 and math.isfinite(plan.seconds)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *crossed(
            ("encoder_decoder", "sliding_window"),
            ("dp=2,tp=2,pp=2,zero=1", "tp=2,pp=2,recompute=selective", "dp=2,zero=3"),
        ),
        ("mixture", "dp=2,tp=2,ep=4"),
        ("mixture", "dp=2,ep=2,pp=2,zero=1,recompute=selective"),
    ],
)
def test_collectives_are_those_that_ranks_count(tmp_path: Path, name: str, layout: str) -> None:
    table = {"model": own(name), "layout": layout, "output": {"folder": str(tmp_path), "count_communication": True}}
    cuboid.train(table, "training.steps=1", "training.global_batch=4", "training.sequence=16", quiet=True)
    found = summarize(cuboid.make_run(table, "training.global_batch=4", "training.sequence=16"))
    assert found.ranks == cuboid.make_run(table).layout.world_size and found.rows and not found.unforeseen


def test_layers_that_print_alike_and_compute_differently_cost_differently() -> None:
    model = cuboid.make_run({"model": own("sliding_window")}).model
    assert isinstance(model, PythonModelSpec)
    run = SegmentRun(tensor=1, micro_batch=1, sequence=64, precision="float32")
    first, other, last = (model.built.costs(f"layers.{layer}", run) for layer in (0, 1, 3))
    assert first is other and first.kept != last.kept


def test_a_plan_is_explained_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = cuboid.plan(own("own_attention"), "h100x4", global_batch=8, sequence=16, fixed={"tp": 2, "pp": 2})
    (tmp_path / "plan.toml").write_text(dump_plan(plan))
    assert main(["explain", str(tmp_path / "plan.toml")]) == 0
    told = capsys.readouterr().out
    assert "tp over nvlink" in told and "Rivals" in told
    assert main(["simulate", str(tmp_path / "plan.toml"), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["makespan_seconds"] <= plan.seconds and seen["bubble"] == plan.bubble > 0
    assert main(["report", str(tmp_path / "plan.toml"), "-o", str(tmp_path / "plan.html")]) == 0
    assert f'"step_seconds":{plan.seconds}' in (tmp_path / "plan.html").read_text()
    assert main(["export", str(tmp_path / "plan.toml"), "--to", "megatron"]) == 2
    assert "is one's own, which megatron does not have" in capsys.readouterr().err


def mixture_costs(**options: Any) -> SegmentCosts:
    model = cuboid.make_run({"model": own("mixture")}).model
    assert isinstance(model, PythonModelSpec)
    run = SegmentRun(**{"tensor": 1, "micro_batch": 2, "sequence": 16, "precision": "float32", **options})
    costs: SegmentCosts = model.built.costs("layers.1", run)
    return costs


@pytest.mark.parametrize("ep", [1, 4])
def test_only_the_experts_that_tokens_use_compute(ep: int) -> None:
    costs = mixture_costs(expert=ep)
    tokens, hidden, experts, top_k = 2 * 16, 64, 8, 2
    assert costs.routed == 2 * experts // ep * hidden**2
    assert costs.parameters - costs.routed == 4 * hidden**2 + experts * hidden + 2 * hidden
    matmuls = 2 * tokens * hidden * (4 * hidden + experts + 2 * top_k * hidden)
    combined = 2 * tokens * top_k * hidden
    attention = 2 * 2 * 2 * 16 * 16 * hidden
    assert sum(flops for flops, _ in costs.forward) == matmuls + combined + attention


def test_experts_are_one_kernel_on_a_gpu() -> None:
    cpu, gpu = (mixture_costs(precision="bf16", on_gpu=on_gpu) for on_gpu in (False, True))
    assert cpu.flops == gpu.flops and len(gpu.forward) < len(cpu.forward) - 2 * 7
    later = mixture_costs(precision="bf16", on_gpu=True, splits_backward=True)
    linears = 3 * (64 * 4 + 2 * 2 * 64) * 64 * 2 * 2 * 16
    assert later.flops == gpu.flops and sum(flops for flops, _ in later.weight) == linears / 3


def test_rows_go_to_experts_and_back() -> None:
    costs, rows = mixture_costs(tensor=2, expert=4, micro_batch=1), 4 * (16 // 2 * 2) * 64
    travels = [("ep", "all-to-all", 8 * 8), ("ep", "all-to-all", rows), ("ep", "all-to-all", rows)]
    assert [made for made in costs.forward_collectives if made[0] == "ep"] == travels
    assert [made for made in costs.backward_collectives if made[0] == "ep"] == travels[1:]
    assert ("tp", "all-gather", 4 * 16 * 64) in costs.forward_collectives
    assert ("tp", "all-gather", 4 * 16 * 64) in costs.backward_collectives


class Looped(RoutedExperts):
    """A router of its own, and experts one after another."""

    sharding: Mapping[str, Split] = {"router.weight": PARTIAL, "inner": EXPERT}

    def __init__(self, hidden: int) -> None:
        super().__init__(4)
        self.router = nn.Linear(hidden, 4, bias=False)
        self.inner = nn.Parameter(torch.randn(4, hidden, hidden))

    def route(self, x: Tensor, tokens: Tokens) -> Routing:
        scores, chosen = self.router(x).sigmoid().max(-1, keepdim=True)
        return Routing(chosen, scores)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = zip(rows.split(counts.tolist()), self.inner, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        y: Tensor = super().forward(x)
        return y


def test_experts_may_ask_how_many_rows_they_have() -> None:
    costs = build(block=Looped).costs("layers.0", SegmentRun(1, 2, 8, "float32", expert=2))
    assert costs.routed == 2 * 16**2 and costs.parameters - costs.routed == 4 * 16
    rows = 2 * 8
    assert sum(flops for flops, _ in costs.forward) == 2 * rows * (16 * 16 + 4 * 16 + 16)


@pytest.fixture
def catalog_model(tmp_path: Path) -> Callable[[str], dict[str, object]]:
    """A model of the catalog as one of one's own."""
    (tmp_path / "same.py").write_text("from cuboid import family as build\n")
    return lambda name: {"python": str(tmp_path / "same.py:build"), "options": {"model": name}}


@pytest.mark.parametrize("layout", ["dp=2,tp=2,ep=4,zero=1", "tp=2,ep=2,pp=2,recompute=selective"])
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_a_family_communicates_as_the_catalogs_model(
    catalog_model: Callable[[str], dict[str, object]], name: str, layout: str
) -> None:
    tables = ({"model": model, "layout": f"{layout},sequence_parallel=false"} for model in (name, catalog_model(name)))
    theirs, ours = (build_run(table, ["training.global_batch=4", "training.sequence=16"]) for table in tables)
    for rank in range(theirs.layout.world_size):
        assert predicted_ledger(ours, rank).entries == predicted_ledger(theirs, rank).entries


def test_a_family_with_experts_is_planned_as_the_catalogs_model(
    catalog_model: Callable[[str], dict[str, object]],
) -> None:
    layout = "dp=16,tp=2,pp=2,ep=8,zero=1,sequence_parallel=false"
    theirs, ours = (
        predict(
            Question(
                model=build_run({"model": model, "layout": layout}, ["training.global_batch=64"]).model,
                cluster=load_cluster("h100x64"),
                global_batch=64,
                sequence=2048,
            ),
            Layout.parse(layout),
        )
        for model in ("mixtral-8x7b", catalog_model("mixtral-8x7b"))
    )
    for kind in ("weights", "optimizer"):
        assert [row[kind] for row in ours.memory] == pytest.approx([row[kind] for row in theirs.memory], rel=1e-3)
    assert ours.totals == pytest.approx(theirs.totals, rel=0.05)
    # The counts of rows travel before the rows, a latency that the catalog's formula has not.
    assert theirs.parts["expert"] < ours.parts["expert"] < 1.2 * theirs.parts["expert"]
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.25)


def test_a_layout_of_ones_own_model_says_nothing_of_sequence_parallelism(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [own("mixture"), "h100x8", "--layout", "dp=4,tp=2,ep=4"]
    for command in (["explain", *asked, "--global-batch", "16", "--seq", "32"], ["map", *asked]):
        assert main(command) == 0
        assert "dp=4,tp=2,pp=1,ep=4,sequence_parallel=false" in capsys.readouterr().out


def test_a_plan_with_experts_is_explained_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {"ep": 4, "tp": 2, "pp": 1, "zero": 1, "micro_batch": 2, "recompute": "none"}
    plan = cuboid.plan(own("mixture"), "h100x8", global_batch=16, sequence=32, fixed=fixed)
    assert (plan.layout.dp, plan.layout.ep) == (4, 4) and plan.parts["expert"] > 0
    (tmp_path / "plan.toml").write_text(dump_plan(plan))
    assert main(["explain", str(tmp_path / "plan.toml")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ep over nvlink" in told and "of them of experts" in told
    for command in (["simulate"], ["report", "-o", str(tmp_path / "plan.html")]):
        assert main([command[0], str(tmp_path / "plan.toml"), *command[1:]]) == 0
