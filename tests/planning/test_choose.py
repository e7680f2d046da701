"""Plans: objectives, limits, warnings, and what is said when there is none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cuboid.cost.estimate import doubt, record_of
from cuboid.errors import UserError
from cuboid.planning.choose import _alike, _best_size, _within, cheapest, fewest, plans, predict, warnings
from cuboid.planning.export.engines import FIXED
from cuboid.planning.plan import amount, losses
from cuboid.planning.question import Question, every_size, parse_fixed, parse_memory, resized, resized_cluster, sizes
from cuboid.planning.score import score
from cuboid.planning.search import search
from cuboid.planning.space import Space
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec

GIB = 2**30


def test_plans_are_ordered_fit_and_can_be_trained(ask: Callable[..., Question]) -> None:
    question = ask("llama3-70b", "h100x128", global_batch=256, sequence=4096)
    found = plans(question, top=5)
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)
    assert len({str(plan.layout) for plan in found}) == 5
    for plan in found:
        assert plan.memory_fraction <= 0.95
        assert plan.layout.world_size == 128
        assert not question.untrainable(plan.layout)
        assert predict(question, plan.layout).seconds == pytest.approx(plan.seconds)
    assert found[0].reasons
    assert len(found[0].alternatives) >= 2


def test_what_is_shown_beside_the_best_are_other_strategies(ask: Callable[..., Question]) -> None:
    best, *others = plans(ask("llama3-8b", "h100x64", global_batch=512, sequence=8192), top=5)
    used = [(plan.layout.tp > 1, plan.layout.pp > 1, plan.layout.zero == 3) for plan in (best, *others)]
    assert len(set(used)) >= 3
    assert [entry.layout for entry in best.alternatives] == [str(plan.layout) for plan in others]


def test_less_memory_is_asked_for_and_given(ask: Callable[..., Question]) -> None:
    free = plans(ask("llama3-70b", "h100x128", global_batch=256, sequence=4096))[0]
    limit = 0.8 * free.peak
    tight = plans(ask("llama3-70b", "h100x128", global_batch=256, sequence=4096, memory_limit=limit))[0]
    assert tight.peak <= limit
    assert tight.seconds >= free.seconds * (1 - 1e-9)


def test_the_memory_objective_holds_least(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x16", global_batch=32, sequence=2048)
    least, fastest = plans(question, objective="memory")[0], plans(question)[0]
    assert least.peak < fastest.peak
    assert least.seconds > fastest.seconds


def test_the_cheapest_plan_wastes_least(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x64", global_batch=64, sequence=4096)
    cheap, fast = cheapest(question)[0], plans(question)[0]
    assert cheap.layout.world_size <= 64
    assert cheap.seconds * cheap.layout.world_size <= fast.seconds * 64 * (1 + 1e-9)


def test_the_fewest_accelerators_that_meet_a_deadline(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x128", global_batch=128, sequence=4096)
    found = fewest(question, tokens=1e11, days=10)[0]
    days = 1e11 / (128 * 4096) * found.seconds / 86400
    assert days <= 10
    assert found.layout.world_size < 128
    with pytest.raises(UserError, match=r"days=0.01 is too short .* use days="):
        fewest(question, tokens=1e11, days=0.01)


def test_parts_compared_together_are_as_each_for_itself(ask: Callable[..., Question]) -> None:
    question = ask(cluster="h100x24", global_batch=48)
    best = {}
    for size in every_size(question.cluster):
        for seconds in search(resized(question, size), size, keep=1).seconds.tolist():
            best[size] = seconds
    assert len(best) > 5
    cheap = min(best, key=lambda size: size * best[size])
    assert _best_size(_alike(replace(question, priced=True), list(best))) == pytest.approx((cheap * best[cheap], cheap))
    soon = min(best, key=lambda size: best[size])
    assert _best_size(_alike(question, list(best))) == pytest.approx((best[soon], soon))
    limit = sorted(best.values())[len(best) // 2] * (1 + 1e-9)
    within = [size for size in sorted(best) if len(search(resized(question, size), size, keep=1, slowest=limit).space)]
    assert 0 < len(within) < len(best)
    assert [size for size, _ in _within(question, sorted(best), limit)] == within


def test_mixtures_are_planned_and_trained(ask: Callable[..., Question]) -> None:
    plan = plans(ask("qwen3-30b-a3b", "h100x32", global_batch=64, sequence=4096))[0]
    assert not any("cannot train this plan yet" in warning for warning in plan.warnings)


def test_context_parallelism_is_planned_when_asked(ask: Callable[..., Question]) -> None:
    sizes = {"global_batch": 16, "sequence": 65536}
    assert ask("llama3-8b", "h100x64", **sizes).explores in (frozenset(), frozenset({"cp"}))
    assert ask("llama3-8b", "h100x64", beyond_engine=True, **sizes).explores == {"cp"}
    assert ask("llama3-8b", "h100x64", engine="megatron", **sizes).explores == {"cp"}
    assert plans(ask("llama3-8b", "h100x64", fixed={"cp": 4}, **sizes))[0].layout.cp == 4


def test_a_prediction_above_every_record_is_doubted(ask: Callable[..., Question]) -> None:
    record = record_of("a100-80g", "bf16")
    assert record is not None
    assert doubt("a100-80g", "bf16", record.utilization - 0.01) == ""
    assert "above the best ever published" in doubt("a100-80g", "bf16", 0.75)
    assert record_of("h200", "bf16") == record_of("h100-80g", "bf16")
    assert record_of("gb300", "fp8") != record_of("b200", "fp8")
    assert record_of("h100-80g-pcie", "bf16") is not None
    assert record_of("tpu-v4", "bf16") is None
    assert doubt("cpu", "float32", 2.0) == ""
    plan = predict(ask("llama3-8b", "h100x8"), Layout.parse("dp=8,zero=1"))
    assert not any("published" in warning for warning in warnings(plan))


@pytest.mark.parametrize(
    ("model", "cluster", "more", "sentence"),
    [
        ("gpt3-175b", "a100x8", {"global_batch": 64}, r"is too small .* would hold \d+.*; it takes \d+ accelerators"),
        (
            "tiny-llama",
            "h100x1024",
            {"global_batch": 100, "fixed": {"cp": 1}},
            r"global_batch=100 divides over no layout .* use global_b",
        ),
        ("llama3-8b", "h100x8", {"fixed": {"tp": 3}}, r"tp=3 does not divide heads=32; use tp=2 or tp=4"),
        ("llama3-8b", "h100x8", {"fixed": {"ep": 2}}, r"ep=2 needs experts and llama3-8b has none"),
        ("llama3-8b", "h100x8", {"fixed": {"dp": 3}}, r"dp=3 fits no layout of 8 accelerators"),
        ("llama3-8b", "h100x8", {"fixed": {"micro_batch": 3}}, r"no layout of h100x8 divides global_batch=8"),
        ("llama3-8b", "a100-40gx8", {"fixed": {"dp": 8, "tp": 1, "pp": 1, "zero": 0}}, r"too small .* any larger one"),
    ],
)
def test_no_plan_is_one_sentence_that_says_what_works(
    ask: Callable[..., Question], model: str, cluster: str, more: dict[str, Any], sentence: str
) -> None:
    question = ask(model, cluster, **more)
    with pytest.raises(UserError, match=sentence):
        plans(question)


@pytest.mark.parametrize(
    ("target", "fixed", "sentence"),
    [
        ("megatron", "schedule=zbv", "schedule=zbv is not in megatron; use schedule=1f1b or schedule=interleaved"),
        ("megatron", "zero=2,pp=4", "zero=2 with pp=4 is not in megatron; use zero=0 or zero=1"),
        ("deepspeed", "tp=2,pp=2", "tp=2 with pp=2 is not in deepspeed; use tp=1"),
        ("deepspeed", "recompute=selective", "recompute=selective is not in deepspeed; use recompute=none or recomp"),
        ("nanotron", "tp=16", "tp=16 is not in nanotron; use tp=1, tp=2, tp=4 or tp=8"),
        ("torchtitan", "cp_method=ring,cp=2", "cp_method=ring with cp=2 is not in torchtitan; use cp_method=allgather"),
        (
            "megatron",
            "pp=2,schedule=zbv,zero=2",
            "schedule=zbv,zero=2 with pp=2 is not in megatron; use schedule=1f1b,z",
        ),
    ],
)
def test_a_target_that_lacks_what_was_decided_is_not_a_cluster_too_small(
    ask: Callable[..., Question], target: str, fixed: str, sentence: str
) -> None:
    decided = FIXED[target] | parse_fixed([fixed])
    with pytest.raises(UserError) as error:
        plans(ask("llama3-8b", "h100x64", global_batch=64, engine=target, target=target, fixed=decided))
    assert str(error.value).startswith(sentence)


def test_the_nearest_batch_and_the_larger_cluster_do_work(ask: Callable[..., Question]) -> None:
    assert plans(ask("tiny-llama", "h100x1024", global_batch=96))
    with pytest.raises(UserError, match=r"as a100x(\d+)") as error:
        plans(ask("gpt3-175b", "a100x8", global_batch=64))
    larger = str(error.value).rsplit("as ", 1)[1]
    assert plans(ask("gpt3-175b", larger, global_batch=64))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"precision": "fp9"}, "unknown precision=fp9"),
        ({"precision": "fp8"}, "precision=fp8 is not in a100-80g"),
        ({"global_batch": 0}, "global_batch=0 is not positive"),
        ({"fixed": {"tp": 0}}, "tp=0 is not positive"),
        ({"fixed": {"schedule": "1f1b", "vpp": 2}}, "vpp=2 needs an interleaved schedule"),
    ],
)
def test_bad_questions_are_refused(ask: Callable[..., Question], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ask(**more)


def test_learned_positions_limit_the_sequence(ask: Callable[..., Question]) -> None:
    with pytest.raises(UserError, match="seq=4096 is longer than max_positions=1024"):
        ask("gpt2", sequence=4096)


def test_memory_limits_are_read_in_gib_or_percent() -> None:
    assert parse_memory("60", 80 * GIB) == 60 * GIB
    assert parse_memory("60GiB", 80 * GIB) == 60 * GIB
    assert parse_memory("50%", 80 * GIB) == 40 * GIB
    for text in ("much", "0", "90", "nan"):
        with pytest.raises(UserError):
            parse_memory(text, 80 * GIB)


def test_fixed_fields_are_read() -> None:
    assert parse_fixed(["tp=8", "pp=4,zero=1"]) == {"tp": 8, "pp": 4, "zero": 1}
    with pytest.raises(UserError, match="names tp twice"):
        parse_fixed(["tp=8", "tp=4"])


def test_sizes_of_a_cluster() -> None:
    cluster = load_cluster("h100x64")
    assert sizes(cluster) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert resized_cluster(cluster, 32) == load_cluster("h100x32")
    assert resized_cluster(cluster, 4) == load_cluster("h100x4")
    assert resized_cluster(cluster, 128) == load_cluster("h100x128")


def test_words() -> None:
    assert amount(174.6e9) == "174.6 billion"
    assert amount(12) == "12"
    lost = losses({"compute": 1.0, "bubble": 0.5}, {"compute": 1.5, "bubble": 0.25})
    assert lost == "+0.5 s computing"


def test_too_small_names_what_the_user_fixed_and_not_what_the_engine_does(ask: Callable[..., Question]) -> None:
    fixed = {**FIXED["deepspeed"], "tp": 1}
    question = ask("deepseek-v2", "h100x8", sequence=4096, engine="deepspeed", target="deepspeed", fixed=fixed)
    with pytest.raises(UserError, match=r"too small for deepseek-v2 in deepspeed with tp=1 at global_batch=8 and"):
        plans(question)


def test_one_micro_batch_on_unequal_stages_is_in_time() -> None:
    """The closed form, by which parts of a cluster are looked at, must not be much longer than the simulation: 13
    layers and a head on five ranks."""
    model = ModelSpec(name="any", hidden=512, layers=13, heads=8, kv_heads=2, ffn=2048, vocab=50_000)
    question = Question(model=model, cluster=load_cluster("mi300xx24"), global_batch=24, sequence=512)
    five = plans(resized(question, 5), top=1)[0]
    assert (five.layout.pp, five.layout.micro_batch, five.layout.schedule) == (5, 24, "zb1p")
    closed = float(score(five.question, Space.of([five.layout], five.question)).seconds[0])
    assert 0.98 < closed / five.seconds < 1.05
    found = fewest(question, tokens=1e9, days=1.0001 * five.days(1e9), top=1)[0]
    assert found.layout.world_size <= 5
