"""Questions: what may be searched, what is fixed, what an accelerator has."""

from collections.abc import Callable

import pytest

from cuboid.errors import UserError
from cuboid.planning.choose import predict
from cuboid.planning.question import MEMORY_FRACTION, PRECISIONS, Question, parse_fixed
from cuboid.spec.layout import Layout
from tests.planning.conftest import MIXED


def test_the_limit_is_95_percent_unless_asked(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x8")
    assert question.limit == pytest.approx(MEMORY_FRACTION * 79.2 * 2**30)
    assert ask("llama3-8b", "h100x8", memory_limit=1e9).limit == 1e9


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_a_cost(ask: Callable[..., Question], precision: str) -> None:
    question = ask("llama3-8b", "h100x8", precision=precision)
    assert question.cost_precision in ("bf16", "fp8", "float32")
    assert question.cost_precision == ("bf16" if precision == "fp16" else precision)


def test_what_the_engine_cannot_train_is_told_by_name(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x8")
    assert question.untrainable(Layout.parse("dp=2,tp=2,pp=2,zero=3")) == ""
    mixture = ask(MIXED)
    told = mixture.untrainable(Layout())
    assert told == "" or "small-mixture" in told


def test_a_layout_is_judged_whatever_the_batch(ask: Callable[..., Question]) -> None:
    """The judgement must not fail for reasons of the batch or the sequence."""
    question = ask("gpt2", "h100x8", sequence=1024)
    assert question.untrainable(Layout.parse("dp=2,tp=4,micro_batch=3")) == ""


def test_unknown_engines_are_named(ask: Callable[..., Question]) -> None:
    with pytest.raises(UserError, match="engine=megatrn is unknown; use megatron"):
        _ = ask("llama3-8b", "h100x8", engine="megatrn").profile


def test_processes_on_cpus_need_no_device_context(ask: Callable[..., Question]) -> None:
    assert ask("tiny-llama", "cpux2").profile.fixed < ask("tiny-llama", "h100x2").profile.fixed


def test_other_engines_have_other_costs(ask: Callable[..., Question]) -> None:
    names = ("cuboid", "megatron", "nanotron", "torchtitan", "fsdp", "nemo", "megatron-deepspeed")
    profiles = [ask("llama3-8b", "h100x8", engine=name).profile for name in names]
    assert [profile.name for profile in profiles] == list(names)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (["tp"], "layout part 'tp' is not key=value"),
        (["tp=x"], "tp=x has the wrong type"),
        (["tq=2"], "unknown key tq; did you mean tp"),
        (["schedule=1f1b", "schedule=zbv"], "layout names schedule twice"),
    ],
)
def test_bad_fixes_are_one_sentence(parts: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_fixed(parts)


def test_fp16_keeps_whole_master_weights(ask: Callable[..., Question]) -> None:
    bf16, fp16 = (
        ask("llama3-8b", "h100x8", precision=precision).profile.optimizer_bytes for precision in ("bf16", "fp16")
    )
    assert fp16 == bf16 + 2 == 12


def test_gradients_summed_in_bf16_are_half_as_wide(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x8", gradient_sums="bf16")
    assert (question.profile.gradient_bytes, question.profile.gradient_wire) == (2.0, 2.0)
    layout = Layout.parse("dp=8,zero=1")
    narrow, wide = predict(question, layout), predict(ask("llama3-8b", "h100x8"), layout)
    assert narrow.memory[0]["gradients"] < 0.6 * wide.memory[0]["gradients"]
    assert narrow.seconds < wide.seconds
    with pytest.raises(UserError, match="gradient_sums=bf16 is counted for engine=cuboid"):
        ask("llama3-8b", "h100x8", precision="float32", gradient_sums="bf16")
