"""The few lines under a plan name every dimension that is used, with its price."""

from collections.abc import Callable

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.plan import WORDS, amount, as_alternative, losses, reasons
from cuboid.planning.question import Question
from cuboid.spec.layout import Layout


def lines(question: Question, layout: str) -> str:
    return "\n".join(reasons(predict(question, Layout.parse(layout))))


def test_each_dimension_has_its_line(ask: Callable[..., Question]) -> None:
    question = ask("deepseek-v3", "h100x256", global_batch=256, sequence=4096)
    text = lines(question, "dp=8,tp=2,pp=8,cp=2,ep=16,zero=1,schedule=interleaved,vpp=2,recompute=full")
    for start in (
        "tp=2 splits every layer and stays within",
        "pp=8 (interleaved, 2 stages a rank)",
        "cp=2 (ring) leaves 2048",
    ):
        assert start in text
    for part in ("ep=16 spreads the experts", "dp=8 replicas of", "share the optimizer state", "full recomputation"):
        assert part in text


def test_what_is_not_used_is_not_mentioned(ask: Callable[..., Question]) -> None:
    text = lines(ask("llama3-8b", "h100x8", global_batch=16, sequence=2048), "dp=8,zero=3")
    assert "tp=" not in text
    assert "pp=" not in text
    assert "share all states (zero=3)" in text
    assert "no recomputation: pipeline rank 0 is the fullest" in text


def test_a_group_that_leaves_the_node_is_told(ask: Callable[..., Question]) -> None:
    text = lines(ask("llama3-70b", "h100x32", global_batch=16, sequence=2048), "dp=2,tp=16,pp=1,zero=1")
    assert "tp=16 splits every layer and leaves the 8 accelerators" in text


@pytest.mark.parametrize(("stage", "words"), [(0, "nothing"), (1, "the optimizer state"), (2, "state and gradients")])
def test_what_replicas_share(ask: Callable[..., Question], stage: int, words: str) -> None:
    assert words in lines(ask("llama3-8b", "h100x8"), f"dp=8,zero={stage}")


def test_losses_are_the_largest_first() -> None:
    mine = dict.fromkeys(WORDS, 1.0)
    other = {**mine, "bubble": 3.0, "tensor": 2.0, "compute": 0.5, "data": 1.1}
    assert losses(mine, other) == "+2 s waiting for other stages, +1 s tensor-parallel collectives"
    assert losses(mine, other, count=1) == "+2 s waiting for other stages"
    assert losses(mine, mine) == ""


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1.026e12, "1.026 trillion"),
        (174.6e9, "174.6 billion"),
        (427456, "427.5 thousand"),
        (3e6, "3 million"),
        (12, "12"),
    ],
)
def test_amounts_have_units(count: float, shown: str) -> None:
    assert amount(count) == shown


def test_an_alternative_keeps_what_is_compared(ask: Callable[..., Question]) -> None:
    plan = predict(ask("llama3-8b", "h100x8"), Layout.parse("dp=4,tp=2,zero=1"))
    other = as_alternative(plan)
    assert other.layout == "dp=4,tp=2,pp=1,zero=1"
    assert other.step_seconds == plan.seconds
    assert sum(other.parts.values()) == pytest.approx(plan.seconds)
    assert other.memory_gib == pytest.approx(plan.peak / 2**30, abs=1e-3)
