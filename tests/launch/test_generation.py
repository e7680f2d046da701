"""The ranks of a generation: one needs no process of its own, and nobody else may have started it."""

from __future__ import annotations

import multiprocessing

import pytest

from cuboid.errors import UserError
from cuboid.generate.batch import Event, Request
from cuboid.generate.detokenizer import Words
from cuboid.launch.generation import start_generation, start_scoring
from cuboid.spec.generation import GenerationSpec, SamplingSpec
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

REQUESTS = [Request(7, (1, 2, 3), 4), Request(3, (5,), 2), Request(5, (9, 8, 7, 6, 5), 3)]


def spec(chunk: int = 512, layout: str = "dp=1") -> GenerationSpec:
    model = load_model("tiny-llama")
    return GenerationSpec(
        model=model, layout=Layout.parse(layout), weights="", slots=2, length=32, device="cpu", chunk=chunk
    )


def test_every_request_gets_its_tokens_in_this_very_process() -> None:
    texts: dict[int, list[int]] = {}

    def heard(events: list[Event]) -> None:
        for event in events:
            texts.setdefault(event.number, []).append(event.token)

    before = set(multiprocessing.active_children())
    start_generation(spec(), REQUESTS, SamplingSpec(max_tokens=4), Words(), heard)
    assert {number: len(tokens) for number, tokens in texts.items()} == {7: 4, 3: 2, 5: 3}
    assert set(multiprocessing.active_children()) == before


def test_scores_come_in_the_order_of_requests_and_add_up_over_chunks() -> None:
    requests = [Request(each.number, each.tokens, labels=(4,) * len(each.tokens)) for each in REQUESTS]
    whole = start_scoring(spec(), requests)
    assert [score.number for score in whole] == [7, 3, 5]
    assert [score.tokens for score in whole] == [3, 1, 5]
    for score, in_parts in zip(whole, start_scoring(spec(chunk=2), requests), strict=True):
        assert in_parts.likelihood == pytest.approx(score.likelihood, rel=1e-5)
        assert (in_parts.tokens, in_parts.likeliest) == (score.tokens, score.likeliest)


def test_a_rank_of_torchrun_is_told_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^torchrun or Slurm started this process as a rank, and generation"):
        start_generation(spec(), REQUESTS, SamplingSpec(max_tokens=4), Words(), lambda events: None)
