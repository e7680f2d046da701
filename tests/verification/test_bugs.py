"""Public bugs, put back into the engine: `verify` finds them, and names module, pass and cause. A sample of the
catalogue; `benchmarks/bugs.py` tries all of it."""

from __future__ import annotations

from typing import Any

import pytest

from cuboid.cli.verify import _show, _show_chain
from cuboid.launch.pool import Pool
from tests.verification.bugs.bug import CATALOGUE
from tests.verification.bugs.catalogue import score, verdict_with

SAMPLE = [
    ("gradients-not-summed-dp", "float64"),  # reduction
    ("output-not-summed", "float64"),  # forward
    ("documents-ignored-by-ring", "float64"),  # forward, of attention
    ("gradient-summed-twice", "bf16"),  # input gradient
    ("weight-gradients-lost", "float64"),  # weight gradient
    ("norm-counts-replicated", "bf16"),  # the norm
    ("stale-weights-zero1", "float64"),  # the update
    ("heads-come-back-in-another-order", "bf16"),  # forward, a permutation
    ("decay-twice", "float64"),  # the update, beside decay
    ("summed-with-other-slices", "float64"),  # padding that is not zero
    ("post-norms-with-another-epsilon", "float64"),  # forward, a factor of each token
    ("rope-in-bf16", "float64"),  # forward, rounded
    ("windows-with-the-theta-of-other-layers", "bf16"),  # forward, angles
    ("predictions-with-the-labels-of-the-model", "float64"),  # input gradient, of two losses
    ("step-count-of-one-rank", "bf16"),  # the update, of one rank
    ("qk-clip-by-own-tokens", "float64"),  # the update, of rows
    ("average-on-one-replica", "float64"),  # copies of what nobody records
]


def verdict_of(pool: Pool, name: str, precision: str) -> dict[str, Any]:
    return verdict_with(lambda job, given, ranks: pool.run(job, given, ranks=ranks)[0], name, precision)


@pytest.mark.parametrize(("name", "precision"), SAMPLE)
def test_a_bug_is_found_and_its_place_and_cause_are_named(
    pool: Pool, name: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = verdict_of(pool, name, precision)
    assert all(score(name, verdict).values()), verdict["located"]
    _show(verdict)
    told = capsys.readouterr().out
    assert "NOT equal" in told
    assert f"module         {verdict['located']['module']}" in told
    assert f"likely cause   {verdict['located']['cause']}" in told


@pytest.mark.parametrize("name", ["tensor-shard-of-rank-0-is-saved", "moments-not-restored", "data-begins-again"])
def test_a_bug_of_saving_or_loading_is_located(pool: Pool, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = verdict_of(pool, name, "float64")
    assert all(score(name, verdict).values()), verdict["located"]
    _show_chain(verdict)
    assert f"likely cause   {verdict['located']['cause']}" in capsys.readouterr().out


def test_every_bug_has_a_public_source_and_a_run() -> None:
    assert len(CATALOGUE) >= 40
    for bug in CATALOGUE.values():
        assert bug.source.startswith("https://")
        assert bug.run(bug.precisions[0]).layout.world_size > 1
    sources = {"/".join(bug.source.split("/")[2:5]) for bug in CATALOGUE.values()}
    assert len(sources) >= 4
