"""The worked examples of the literature come out of the explanation, by formulae that can be checked by hand."""

from collections.abc import Callable

import pytest

from cuboid.planning.explain import after_zero, decision_lines, explain, framework, memory_lines, rank_held, sections
from cuboid.planning.plan import GIB
from cuboid.planning.question import Question
from cuboid.planning.traffic import sent
from cuboid.spec.layout import Layout


@pytest.fixture
def gpt3(ask: Callable[..., Question]) -> Question:
    return ask("gpt3-175b", "a100-80gx1024", global_batch=1536, sequence=2048)


def test_175b_on_1024_a100(gpt3: Question) -> None:
    layout = Layout.parse("dp=8,tp=8,pp=16")
    found = explain(gpt3, layout)
    lines = "\n".join(line for part in sections(found).values() for line in part)
    assert "2.7 GB of weights + 2.7 GB of gradients + 16.4 GB of optimizer state" in lines
    assert "tp=8 × pp=16 = 128 accelerators hold one replica" in lines
    assert "so dp=8" in lines
    assert found.framework.layer_fits
    assert not found.framework.node_fits
    assert set(found.plan.layers) == {6}
    assert {entry.dimension: entry.tier.name for entry in found.moved} == {
        "tp": "nvlink3",
        "pp": "infiniband-hdr",
        "embedding": "infiniband-hdr",
        "data": "infiniband-hdr",
        "world": "infiniband-hdr",
    }
    # It says whether its own choice beats the example, and by how much.
    assert found.best.seconds < found.plan.seconds
    change = found.best.seconds / found.plan.seconds - 1
    assert f"takes {found.best.seconds:.4g} s ({change:+.1%})" in lines


def test_1t_on_4096_a100(ask: Callable[..., Question]) -> None:
    question = ask("gpt-1t", "a100-40gx4096", global_batch=4096, sequence=2048)
    layout = Layout.parse("dp=8,tp=8,pp=64")
    found = framework(question, layout)
    assert not found.layer_fits
    assert not found.node_fits
    assert found.states == pytest.approx(16e12, rel=0.02)
    assert (found.replica, found.replicas) == (512, 8)
    first, second, third, _ = decision_lines(found, layout, question.cluster.name)
    assert "does not fit, so tensor parallelism must split it" in first
    assert "16.13 TB of states" in second
    assert "8 × pp=64 = 512" in third


def test_512_gpus_at_8_8_8(ask: Callable[..., Question]) -> None:
    question = ask("gpt3-175b", "a100-80gx512", global_batch=2048, sequence=2048)
    found = explain(question, Layout.parse("dp=8,tp=8,pp=8"))
    assert found.framework.replica == 64
    assert set(found.plan.layers) == {12}
    assert found.plan.peak < question.limit


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("model", "layout"),
    [("mixtral-8x7b", "dp=4,tp=2,pp=4,ep=8"), ("mixtral-8x7b", "dp=8,pp=4,ep=4"), ("llama3-8b", "dp=4,tp=2,pp=4")],
)
def test_states_by_formula_are_those_of_the_memory(
    ask: Callable[..., Question], model: str, layout: str, zero: int
) -> None:
    """Of the fullest rank, not of the one with most parameters; experts are split over their own ranks."""
    found = explain(ask(model, "h100x32", global_batch=64, sequence=4096), Layout.parse(f"{layout},zero={zero}"))
    plan, engine = found.plan, found.plan.question.profile
    fullest = plan.totals.index(plan.peak)
    for name, each, stage in (("weights", engine.weight_bytes, 3), ("optimizer", engine.optimizer_bytes, 1)):
        count, formula = after_zero(plan.layout, rank_held(plan, fullest), stage)
        assert plan.memory[fullest][name] == pytest.approx(each * count, rel=1e-6)
        assert f"{name}: {each:g} bytes × {formula} = " in "\n".join(memory_lines(found))


def test_the_textbook_and_the_engine_are_told_apart(gpt3: Question) -> None:
    layout = Layout.parse("dp=8,tp=8,pp=16")
    assert gpt3.profile.gradient_bytes == 4
    *_, states = decision_lines(framework(gpt3, layout), layout, "cluster")
    assert "2, 2 and 12 bytes" in states
    assert states.endswith("; this engine keeps 2, 4 and 10 bytes, which the memory below is made of")


def test_bytes_by_hand(gpt3: Question) -> None:
    moved = {entry.dimension: entry for entry in explain(gpt3, Layout.parse("dp=8,tp=8,pp=16")).moved}
    activation = 2 * 2048 * 12288
    layers = [part for part in moved["tp"].parts if part.what.startswith("layer")]
    assert sum(map(sent, layers)) == pytest.approx(192 * 6 * 4 * 2 * 7 / 8 * activation)
    assert moved["pp"].bytes == pytest.approx(192 * 2 * activation / 8)


@pytest.mark.parametrize(
    ("text", "per_parameter"),
    [("zero=0", 8.0), ("zero=1", 6.0), ("zero=2", 192 * 4.0 + 2), ("zero=3", 192 * 8.0)],
)
def test_traffic_between_replicas_by_zero_stage(gpt3: Question, text: str, per_parameter: float) -> None:
    found = explain(gpt3, Layout.parse(f"dp=8,tp=8,pp=16,{text}"), rivals=1)
    moved = {entry.dimension: entry for entry in found.moved}["shard" if "zero=0" not in text else "data"]
    held = max(row["weights"] for row in explain(gpt3, Layout.parse("dp=8,tp=8,pp=16")).plan.memory)
    parameters = held / gpt3.profile.weight_bytes
    # The cost model splits learned positions, which every tensor rank holds whole.
    assert moved.bytes == pytest.approx(per_parameter * parameters * 7 / 8, rel=0.02)


def test_a_layout_over_the_limit_is_said_to_be(ask: Callable[..., Question]) -> None:
    question = ask("gpt3-175b", "a100-40gx64", global_batch=64, sequence=2048)
    found = explain(question, Layout.parse("dp=1,tp=8,pp=8"))
    text = "\n".join(line for part in sections(found).values() for line in part)
    plan = found.plan
    assert f"{(plan.peak - plan.question.limit) / GIB:.1f} GiB over the limit" in text
    assert f"{plan.peak / GIB - plan.question.cluster.memory_gib:.1f} GiB too many: this plan does not fit" in text


def test_one_rank_talks_to_nobody(ask: Callable[..., Question]) -> None:
    found = explain(ask("tiny-llama", "cpux1", sequence=64), Layout())
    parts = sections(found)
    assert parts["Traffic"] == ["one rank talks to nobody"]
    assert parts["Time"][0] == "no pipeline, no bubble"


def test_context_and_experts_have_traffic(ask: Callable[..., Question]) -> None:
    question = ask("deepseek-v3", "h100x256", global_batch=256, sequence=4096)
    layout = Layout.parse("dp=8,tp=2,pp=8,cp=2,ep=16,zero=1")
    found = explain(question, layout, rivals=1)
    assert [entry.dimension for entry in found.moved] == [
        "tp",
        "sequence",
        "cp",
        "ep",
        "pp",
        "data",
        "shard",
        "expert_shard",
        "world",
    ]
    assert all(entry.bytes > 0 and entry.seconds > 0 for entry in found.moved)


def test_what_is_faster_says_what_is_lost_here(ask: Callable[..., Question]) -> None:
    found = explain(ask("llama3.2-1b", "h100x8", global_batch=48, sequence=8192), Layout.parse("dp=1,tp=8"))
    faster = [line for line in sections(found)["Rivals"][1:] if "(-" in line]
    assert faster and all(" s tensor-parallel collectives" in line and line.endswith(" here") for line in faster)
