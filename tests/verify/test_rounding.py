"""In bf16 a layout passes, and a bug does not: what rounding does is told from what is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

from cuboid.cli.verify import verification_run
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from cuboid.verify.compare import compare_rounded
from cuboid.verify.reference import Trace, reference_trace
from cuboid.verify.rounding import MULTIPLE, UNIT

SMALL = tuple(
    f"{'training' if key in ('sequence', 'global_batch') else 'model'}.{key}={value}"
    for key, value in {
        "layers": 2, "hidden": 32, "ffn": 48, "vocab": 64, "sequence": 8, "global_batch": 4
    }.items()
)  # fmt: skip
"""Few products: processors without instructions for bf16 take their time."""


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
    verdict = compare_rounded(run, copy.deepcopy(traces[0]), *traces)
    assert verdict.passed and verdict.gradient_error == 0
    exact = compare_rounded(run, copy.deepcopy(traces[1]), *traces)
    assert exact.passed and 0 < exact.gradient_error <= exact.tolerances["gradient"] / MULTIPLE * 1.0001
    assert min(exact.tolerances.values()) >= MULTIPLE * UNIT


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
    verdict = compare_rounded(run, observed, *traces)
    assert not verdict.passed
    assert not getattr(verdict, f"{kind}_error") <= verdict.tolerances[kind]


def test_bugs_planted_in_ranks_are_found_and_sound_ranks_pass(pool: Pool) -> None:
    def verdict(job: str, layout: str) -> dict[str, object]:
        run = small_run(layout)
        found = pool.run(f"tests.verify.rounding_jobs:{job}", (run,), ranks=run.layout.world_size)[0]
        assert isinstance(found, dict)
        return found

    for layout in ("dp=2", "tp=2", "dp=2,pp=2,zero=3"):
        sound = verdict("sound", layout)
        assert sound["passed"], sound
    mixture = verification_run("tp=2,ep=2", "tiny-qwen3-moe", ("model.layers=2",), dtype="bf16", seed=1)
    assert mixture.training.steps == 1, "the next would send tokens elsewhere"
    (routed, _) = pool.run("tests.verify.rounding_jobs:sound", (mixture,), ranks=2)
    assert routed["passed"] and routed["router_error"] is not None
    missing = verdict("without_the_sum_of_gradients", "dp=2")
    assert not missing["passed"] and missing["gradient_error"] > 0.3  # type: ignore[operator]
    doubled = verdict("with_one_gradient_doubled", "dp=2")
    assert not doubled["passed"] and doubled["worst_gradient"] == "layers.1.feed_forward.down.weight"
    assert not verdict("with_the_rounding_of_few_bits", "tp=2")["passed"]
