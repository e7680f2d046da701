"""plan.toml: what is written is read again, and it is a run file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.plan import WORDS, amount, as_alternative, dump_plan, load_plan, losses, reasons
from cuboid.planning.question import Question
from cuboid.spec.layout import Layout
from cuboid.spec.run import check_supported, dump_run, load_run


def test_a_plan_comes_back_as_it_was(ask: Callable[..., Question], tmp_path: Path) -> None:
    plan = plans(ask("llama3-8b", "h100x64", global_batch=128, sequence=4096), top=3)[0]
    file = tmp_path / "plan.toml"
    file.write_text(dump_plan(plan))
    again = load_plan(file)
    assert again == plan
    assert dump_plan(again) == file.read_text()
    assert again.alternatives
    assert again.reasons


def test_a_plan_file_with_the_older_name_of_its_memory_is_read(ask: Callable[..., Question], tmp_path: Path) -> None:
    plan, file = predict(ask("gpt2", "a100x4"), Layout(dp=4)), tmp_path / "plan.toml"
    text = dump_plan(plan)
    assert "memory_fraction" in text
    file.write_text(text.replace("memory_fraction", "memory_share"))
    assert load_plan(file).memory_fraction == plan.memory_fraction


def test_a_plan_file_is_a_run_file(ask: Callable[..., Question], tmp_path: Path) -> None:
    plan = plans(ask("tiny-llama", "cpux8", global_batch=16, sequence=64, precision="float32"))[0]
    file = tmp_path / "plan.toml"
    file.write_text(dump_plan(plan))
    run = load_run(file, ["training.steps=3"])
    check_supported(run)
    assert run.layout == plan.layout
    assert (run.training.global_batch, run.training.sequence, run.training.steps) == (16, 64, 3)
    assert run.plan["cluster"] == "cpux8"
    assert load_run(_written(tmp_path / "again.toml", dump_run(run))) == run


def test_a_cluster_of_its_own_file_is_kept_whole(ask: Callable[..., Question], tmp_path: Path) -> None:
    question = ask("tiny-llama", "h100x8", global_batch=16, sequence=64)
    slower = replace(question.cluster, name="mine", memory_gib=20.0)
    plan = plans(replace(question, cluster=slower))[0]
    again = load_plan(_written(tmp_path / "plan.toml", dump_plan(plan)))
    assert again.question.cluster == slower


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_a_plan_is_trained_in_its_precision(ask: Callable[..., Question], precision: str) -> None:
    plan = plans(ask("llama3-8b", "h100x8", global_batch=16, sequence=4096, precision=precision))[0]
    assert plan.run.training.precision == precision
    assert not any("not in fp8" in warning for warning in plan.warnings)


def test_fp8_takes_less_time_and_memory_than_bf16(ask: Callable[..., Question]) -> None:
    layout = Layout.parse("dp=8,zero=3")
    wide, narrow = (
        predict(ask("llama3-8b", "h100x8", global_batch=8, sequence=8192, precision=precision), layout)
        for precision in ("bf16", "fp8")
    )
    assert narrow.tokens > 1.1 * wide.tokens
    for ours, theirs in zip(narrow.memory, wide.memory, strict=True):
        assert ours["activations"] < 0.9 * theirs["activations"]
        assert ours["optimizer"] == theirs["optimizer"]


def test_scales_of_fp8_are_counted_and_trained(ask: Callable[..., Question]) -> None:
    """A scale for each tensor is the fastest and gathers 8 bits; experts in fp8 save time; both are in the run file."""
    times = {}
    for scaling in ("tensor", "row", "block"):
        question = ask("llama3-8b", "h100x8", global_batch=8, sequence=8192, precision="fp8", fp8_scaling=scaling)
        plan = predict(question, Layout.parse("dp=8,zero=3"))
        times[scaling] = plan.seconds
        assert plan.run.training.fp8_scaling == scaling
    assert times["tensor"] < min(times["row"], times["block"])
    mixed = [
        predict(
            ask("qwen3-30b-a3b", "h100x8", global_batch=64, sequence=8192, precision="fp8", fp8_experts=experts),
            Layout.parse("dp=8,ep=8,zero=1,micro_batch=8"),
        )
        for experts in (False, True)
    ]
    assert mixed[1].seconds < mixed[0].seconds and mixed[1].run.training.fp8_experts
    for refused in ({"fp8_scaling": "block"}, {"fp8_scaling": "squares"}):
        with pytest.raises(UserError, match="fp8_scaling="):
            ask("llama3-8b", "b200x8", global_batch=8, sequence=8192, precision="fp8", **refused)
    with pytest.raises(UserError, match="needs experts"):
        ask("llama3-8b", "h100x8", global_batch=8, sequence=8192, precision="fp8", fp8_experts=True)


def test_what_fp8_cannot_multiply_is_trained_in_bf16(ask: Callable[..., Question]) -> None:
    plan = predict(ask("tiny-llama", "h100x8", global_batch=16, sequence=64, precision="fp8"), Layout(tp=8))
    assert plan.run.training.precision == "bf16"
    assert any("bf16, not in fp8: precision=fp8 needs" in warning for warning in plan.warnings)


def test_a_run_file_without_a_plan_is_refused(ask: Callable[..., Question], tmp_path: Path) -> None:
    file = _written(tmp_path / "run.toml", 'model = "tiny-llama"\n')
    with pytest.raises(UserError, match=r"has no \[plan\] section"):
        load_plan(file)
    plan = predict(ask("tiny-llama", "cpux2"), Layout(dp=2))
    cut = dump_plan(plan).replace('engine = "cuboid"\n', "")
    with pytest.raises(UserError, match=r"lacks plan\.engine"):
        load_plan(_written(file, cut))


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


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
