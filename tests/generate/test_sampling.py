"""How a token is chosen, against the processors of transformers and against counting."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cuboid.generate.sampling import choose, uniform
from cuboid.spec.generation import SamplingSpec

MANY = 20000


def frequencies(logits: torch.Tensor, sampling: SamplingSpec, text: list[int]) -> torch.Tensor:
    numbers = [uniform(sampling.seed, 3, place) for place in range(MANY)]
    chosen = choose(logits.expand(MANY, -1), sampling, numbers, [text] * MANY)
    return torch.tensor(chosen).bincount(minlength=logits.shape[0]) / MANY


def test_tokens_are_drawn_as_often_as_transformers_would() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(40)
    text = [1, 5, 5, 39]
    ways = {
        (): SamplingSpec(temperature=1.0),
        (TemperatureLogitsWarper(0.5),): SamplingSpec(temperature=0.5),
        (TopKLogitsWarper(5),): SamplingSpec(temperature=1.0, top_k=5),
        (TopPLogitsWarper(0.7),): SamplingSpec(temperature=1.0, top_p=0.7),
        (MinPLogitsWarper(0.1),): SamplingSpec(temperature=1.0, min_p=0.1),
        (
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ): SamplingSpec(repetition_penalty=1.5, temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    }
    for processors, sampling in ways.items():
        theirs = LogitsProcessorList(processors)(torch.tensor([text]), logits.clone()[None]).softmax(-1)[0]
        ours = frequencies(logits, sampling, text)
        assert torch.equal(ours[theirs == 0], torch.zeros(int((theirs == 0).sum()))), sampling
        assert (ours - theirs).abs().max() < 0.015, sampling


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    assert choose(logits, SamplingSpec(), [0.0, 0.0], [[], []]) == [1, 0]
    assert choose(logits, SamplingSpec(repetition_penalty=2.0), [0.0, 0.0], [[1], [0]]) == [3, 1]


def test_random_numbers_depend_on_seed_prompt_and_place_alone() -> None:
    drawn = {uniform(seed, prompt, place) for seed in range(5) for prompt in range(5) for place in range(400)}
    assert len(drawn) == 10000
    assert 0 <= min(drawn) < 0.001
    assert 0.999 < max(drawn) < 1
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.01
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
