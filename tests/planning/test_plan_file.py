"""plan.toml: what is written is read again, and it is a run file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.plan import dump_plan, load_plan
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
