"""fp8 under layouts: close to float32, known bytes on the wire, and ZeRO 3 gathers it without rounding twice."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.spec.run import Run
from tests.parallel.cases import small_run


def fp8_run(layout: str, *overrides: str, model: str = "tiny-llama", scaling: str = "tensor") -> Run:
    fields = ("training.precision=fp8", f"training.fp8_scaling={scaling}", "training.sequence=32")
    return small_run(layout, *fields, *overrides, model=model)


@pytest.mark.parametrize(
    ("layout", "scaling"),
    [
        ("dp=1", "row"),
        ("dp=2,tp=2,pp=2", "tensor"),
        ("dp=2,pp=2,zero=3,schedule=zbv", "row"),
        ("pp=2,schedule=zb1p", "tensor"),
        ("cp=2,tp=2,recompute=selective", "tensor"),
    ],
)
def test_fp8_stays_close_to_float32(pool: Pool, layout: str, scaling: str) -> None:
    coarse = fp8_run(layout, scaling=scaling)
    exact = small_run(layout, "training.precision=float32", "training.sequence=32")
    ranks = exact.layout.world_size
    expected = pool.run("tests.parallel.precision_jobs:steps", (exact,), ranks=ranks)[0]
    results = pool.run("tests.parallel.precision_jobs:steps", (coarse,), ranks=ranks)
    assert all(result == results[0] for result in results), "every rank knows the same"
    for (loss, norm, *_), (exact_loss, exact_norm, *_) in zip(results[0], expected, strict=True):
        assert loss == pytest.approx(exact_loss, rel=5e-3)
        assert norm == pytest.approx(exact_norm, rel=5e-2)
        assert loss != exact_loss


@pytest.mark.parametrize(("layout", "model"), [("dp=2,tp=2,zero=3", "tiny-llama"), ("dp=3,zero=3", "tiny-mixtral")])
def test_zero_3_gathers_in_8_bits_what_products_would_have_rounded(pool: Pool, layout: str, model: str) -> None:
    """The same bits as with parameters gathered in bf16, and the bytes that the planner counts."""
    run = fp8_run(layout, model=model)
    ranks = run.layout.world_size
    narrow = pool.run("tests.parallel.precision_jobs:steps", (run,), ranks=ranks)
    wide = pool.run("tests.parallel.precision_jobs:steps_gathered_wide", (run,), ranks=ranks)
    assert narrow == wide
    for lines in pool.run("tests.parallel.cases:unforeseen", (run,), ranks=ranks):
        assert not lines, lines
