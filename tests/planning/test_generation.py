"""Plans for generation: what they hold is what is there, and what is asked for comes first."""

from __future__ import annotations

import json

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.planning.generation import GenerationPlan, GenerationQuestion, generation_plans, weight_bytes
from cuboid.spec.cluster import load_cluster
from cuboid.spec.generation import cache_bytes
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model


def ask(model: str, cluster: str, objective: str = "throughput", prompt: int = 1024) -> list[GenerationPlan]:
    question = GenerationQuestion(
        model=load_model(model),
        cluster=load_cluster(cluster),
        prompt_tokens=prompt,
        output_tokens=128,
        objective=objective,
    )
    return generation_plans(question, 100)


def test_the_first_plan_is_the_best_at_what_was_asked() -> None:
    by_throughput, by_latency = ask("llama3-70b", "h100x8"), ask("llama3-70b", "h100x8", "latency")
    best = by_throughput[0]
    assert best.tokens_per_second == max(plan.tokens_per_second for plan in by_throughput)
    assert by_latency[0].token_seconds == min(plan.token_seconds for plan in by_latency)
    assert by_latency[0].token_seconds < best.token_seconds
    assert by_latency[0].layout.tp > 1, "ranks that split matrices read a part of the weights each"
    assert best.tokens_per_second > 10 * by_latency[0].tokens_per_second


def test_memory_is_counted_and_never_exceeded() -> None:
    model = load_model("llama3-70b")
    whole = weight_bytes(model, Layout(), range(model.layers), True, True, 2)
    assert whole == 2 * model.parameters
    for plan in ask("llama3-70b", "h100x8"):
        assert plan.layout.world_size == 8
        assert plan.weight_bytes + plan.cache_bytes < 80 * 2**30
        each = cache_bytes(model, plan.layout, range(model.layers // plan.layout.pp), 1, 1152, 2)
        assert plan.cache_bytes >= plan.batch * each
    # 2 (keys and values) · 80 layers · 8 heads · 128 numbers · 2 bytes for each token
    assert cache_bytes(model, Layout(), range(80), 1, 1, 2) == 327_680
    latent = load_model("deepseek-v3")
    assert cache_bytes(latent, Layout(tp=8), range(61), 1, 1, 2) == 61 * (512 + 64) * 2, (
        "every tensor rank keeps the latents"
    )
    grouped = Layout(tp=16)
    assert cache_bytes(model, grouped, range(80), 1, 1, 2) == 327_680 // 8, "one head is the least a rank keeps"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="fits no layout of h100x1; use more accelerators"):
        ask("llama3-70b", "h100x1")
    with pytest.raises(UserError, match="more than max_positions=1024 of gpt2"):
        ask("gpt2", "h100x1")
    with pytest.raises(UserError, match="unknown objective=speed; use throughput or latency"):
        ask("llama3-8b", "h100x1", "speed")


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "mixtral-8x7b", "h100x8", "--for", "generate", "--prompt-tokens", "256", "--top", "3"]
    assert main([*arguments, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 3
    assert all(0 < plan["first_token_seconds"] < 10 and plan["sequences"] > 0 for plan in plans)
    assert main(arguments) == 0
    assert plans[0]["layout"] in capsys.readouterr().out
    assert main(["plan", "gpt2", "h100x1"]) == 2
    assert "a plan for training needs the batch; add --global-batch" in capsys.readouterr().err
