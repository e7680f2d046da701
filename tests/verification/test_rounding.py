"""In bf16 a layout passes, and a bug does not: what rounding does is told from what is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cuboid.cli.verify import verification_run
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from cuboid.verification.compare import compare_rounded
from cuboid.verification.reference import Trace, reference_trace
from cuboid.verification.rounding import DECIDED, MULTIPLE, ROUNDOFF, TENSOR_ROUNDOFF, decided, moved, walked

SMALL = tuple(
    f"{'training' if key in ('sequence', 'global_batch') else 'model'}.{key}={value}"
    for key, value in {
        "layers": 2, "hidden": 32, "ffn": 48, "vocab": 64, "sequence": 8, "global_batch": 4
    }.items()
)  # fmt: skip
"""Few matmuls: processors without instructions for bf16 take their time."""


def small_run(layout: str, *more: str) -> Run:
    return verification_run(layout, overrides=(*SMALL, *more), steps=2, dtype="bf16")


@pytest.fixture(scope="module")
def run() -> Run:
    return small_run("dp=1")


@pytest.fixture(scope="module")
def traces(run: Run) -> tuple[Trace, Trace]:
    return reference_trace(run), reference_trace(run, precision="float32")


def test_another_order_of_the_same_samples_passes(run: Run, traces: tuple[Trace, Trace]) -> None:
    """What the bound is made for, without any layout: float32 itself is as far from bf16 as the spread says."""
    verdict = compare_rounded(run, copy.deepcopy(traces[0]), traces[:1], traces[1])
    assert verdict.passed and verdict.gradient_error == 0
    exact = compare_rounded(run, copy.deepcopy(traces[1]), traces[:1], traces[1])
    assert exact.passed and 0 < exact.gradient_error <= exact.tolerances["gradient"] / MULTIPLE * 1.0001
    assert min(exact.tolerances.values()) >= MULTIPLE * ROUNDOFF


def scaled(kind: str, name: str, factor: float) -> Callable[[Trace], None]:
    def scale(trace: Trace) -> None:
        step = getattr(trace, kind)[1]
        step[name] = step[name] * factor

    return scale


@pytest.mark.parametrize(
    ("kind", "disturb"),
    [
        ("gradient", scaled("gradients", "layers.0.attention.query.weight", 2.0)),
        ("gradient", scaled("gradients", "head.norm.weight", 0.5)),
        ("gradient", scaled("gradients", "embedding.tokens.weight", -1.0)),
        ("gradient", scaled("gradients", "embedding.tokens.weight", math.nan)),
        ("gradient", lambda trace: trace.gradients[0].pop("head.norm.weight")),
        ("gradient_norm", lambda trace: trace.gradient_norms.__setitem__(0, trace.gradient_norms[0] * math.sqrt(2))),
        ("loss", lambda trace: trace.losses.__setitem__(1, trace.losses[1] * 1.05)),
        ("parameter", lambda trace: trace.parameters.__setitem__(1, trace.parameters[0])),
    ],
)
def test_every_kind_of_difference_is_seen(
    run: Run, traces: tuple[Trace, Trace], kind: str, disturb: Callable[[Trace], object]
) -> None:
    observed = copy.deepcopy(traces[0])
    disturb(observed)
    verdict = compare_rounded(run, observed, traces[:1], traces[1])
    assert not verdict.passed
    assert not getattr(verdict, f"{kind}_error") <= verdict.tolerances[kind]


def test_bugs_planted_in_ranks_are_found_and_sound_ranks_pass(pool: Pool) -> None:
    def verdict(job: str, layout: str) -> dict[str, object]:
        run = small_run(layout)
        found = pool.run(f"tests.verification.rounding_jobs:{job}", (run,), ranks=run.layout.world_size)[0]
        assert isinstance(found, dict)
        return found

    for layout in ("dp=2", "tp=2", "dp=2,pp=2,zero=3"):
        sound = verdict("sound", layout)
        assert sound["passed"], sound
    mixture = verification_run("tp=2,ep=2", "tiny-qwen3-moe", ("model.layers=2",), dtype="bf16", seed=1)
    assert mixture.training.steps == 1, "the next would send tokens elsewhere"
    (routed, _) = pool.run("tests.verification.rounding_jobs:sound", (mixture,), ranks=2)
    assert routed["passed"] and routed["router_error"] is not None
    missing = verdict("without_the_sum_of_gradients", "dp=2")
    assert not missing["passed"] and missing["gradient_error"] > 0.3  # type: ignore[operator]
    doubled = verdict("with_one_gradient_doubled", "dp=2")
    assert not doubled["passed"] and doubled["worst_gradient"] == "layers.1.feed_forward.down.weight"
    assert not verdict("with_the_rounding_of_few_bits", "dp=2")["passed"]


@pytest.mark.parametrize(("model", "precision"), [("tiny-llama", "bf16"), ("tiny-gpt2", "fp8")])
def test_sums_that_nccl_rounds_at_every_hop_pass_and_a_sum_that_forgets_a_rank_does_not(
    pool: Pool, model: str, precision: str
) -> None:
    few = ("model.layers=2", "training.global_batch=2", "training.sequence=16")
    wide = () if precision == "bf16" else ("model.hidden=128", "model.ffn=128")
    run = verification_run("tp=8", model, (*few, *wide), steps=2, dtype=precision)
    job = "tests.verification.rounding_jobs:with_sums_as_nccl_rounds_them"
    sound = pool.run(job, (run,), ranks=8)[0]
    assert sound["passed"], sound
    bug = pool.run(job, (run, 1), ranks=8)[0]
    assert not bug["passed"] and bug["gradient_error"] > bug["tolerances"]["gradient"], bug


def test_one_process_that_sums_hop_by_hop_rounds_more_with_more_hops() -> None:
    """And computes the same: in float32 the parts add up to the whole."""
    few = ("model.layers=2", "training.global_batch=2", "training.sequence=16")
    run = verification_run("tp=8", "tiny-qwen3", few, steps=1, dtype="bf16")
    exact = reference_trace(run, precision="float32")
    in_parts = reference_trace(run, precision="float32", hops=8)
    for name, gradient in exact.gradients[0].items():
        assert torch.allclose(in_parts.gradients[0][name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max())

    def spread(hops: int) -> float:
        rounded = reference_trace(run, hops=hops).gradients[0]["embedding.tokens.weight"]
        return float((rounded - exact.gradients[0]["embedding.tokens.weight"]).norm())

    assert spread(32) > 1.2 * spread(1)


def adam(gradients: list[Tensor]) -> list[dict[str, Tensor]]:
    parameter = torch.zeros_like(gradients[0], requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    parameters = []
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        parameters.append({"p": parameter.detach().clone()})
    return parameters


def test_gradients_off_by_a_share_move_each_parameter_by_less_than_twice_that_share_of_its_way() -> None:
    """What parameters are allowed is derived from this. No multiple of the share of their distance holds: some come
    back to where they began."""
    random = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(100_000, generator=random, dtype=torch.float64)

    gradients = [drawn().exp() * drawn().sign() for _ in range(3)]
    share = TENSOR_ROUNDOFF["fp8"]
    exact, rounded = adam(gradients), adam([gradient * (1 + share * drawn().sign()) for gradient in gradients])
    start, every = {"p": torch.zeros_like(gradients[0])}, [{"p": torch.ones_like(gradients[0], dtype=torch.bool)}] * 3
    seen, true, ways = moved(rounded, start, every), moved(exact, start, every), walked(exact, start, every)
    for one, other, way in zip(seen, true, ways, strict=True):
        assert ((one["p"] - other["p"]).abs() <= 2 * share * way["p"]).all()
    assert ((seen[2]["p"] - true[2]["p"]).abs() > 100 * share * true[2]["p"].abs()).any()


def test_rows_that_nobody_looked_up_do_not_hide_the_rounding_of_the_others() -> None:
    true, expected = torch.zeros(1024, 4), torch.zeros(1024, 4)
    true[0] = torch.tensor([1.0, -1.0, 100.0, -100.0])
    expected[0] = true[0] + torch.tensor([1.0, -1.0, 1.0, -1.0])
    (among,) = decided([[{"table": expected}]], [{"table": true}])
    assert among["table"].nonzero().tolist() == [[0, 2], [0, 3]] and DECIDED < 100


def test_fp8_after_steps_of_adam(pool: Pool) -> None:
    """Elements that go there and back differ by much of the distance that is left, and are sound. An update that one
    of two ranks leaves out is found still, though by the parameters alone."""
    run = verification_run("tp=2", "tiny-gpt2", ("model.layers=2",), steps=3, dtype="fp8")
    sound = pool.run("tests.verification.rounding_jobs:sound", (run,), ranks=2)[0]
    assert sound["passed"], sound
    bug = pool.run("tests.verification.rounding_jobs:with_an_update_left_out_by_one_rank", (run,), ranks=2)[0]
    assert bug["parameter_error"] > bug["tolerances"]["parameter"] and not bug["passed"], bug
    assert bug["gradient_error"] <= bug["tolerances"]["gradient"]
