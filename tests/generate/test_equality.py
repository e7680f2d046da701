"""Text is that of `transformers` on the same weights, and the same on every layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cuboid.checkpoint.huggingface.folder import model_of
from cuboid.generate.batch import Request
from cuboid.generate.detokenizer import Words
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec, cache_bytes, parse_layout
from cuboid.spec.partition import partition
from cuboid.spec.ranks import coordinates
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.jobs import together

LENGTH, SLOTS, ROOM, END = 40, 3, 8, 256
EVERYWHERE = ("dp=1", "tp=2,pp=2,dp=2", "cp=2")
ONE_BY_ONE = ("tp=2", "pp=2")
LAYOUTS = {
    "llama": (*EVERYWHERE, *ONE_BY_ONE),
    "qwen3": EVERYWHERE,
    "gpt2": EVERYWHERE,
    "mixtral": (*EVERYWHERE, "dp=2,ep=2"),
    "deepseek-v3": ("dp=1", "tp=2,pp=2,dp=2,ep=4", "cp=2,ep=2"),
    "mistral": EVERYWHERE,
    "gemma2": EVERYWHERE,
    "gemma3": EVERYWHERE,
    "olmo3": EVERYWHERE,
    "gpt-oss": (*EVERYWHERE, "dp=2,ep=2"),
}
MORE = {
    "llama": ("tp=4", "pp=4", "cp=4", "cp=2,tp=2,pp=2"),
    "qwen3": (*ONE_BY_ONE, "tp=4,dp=2", "cp=2,pp=4"),
    "gpt2": (*ONE_BY_ONE, "tp=4,pp=2", "cp=2,tp=4"),
    "mixtral": (*ONE_BY_ONE, "tp=2,ep=2,dp=2", "cp=2,tp=2,ep=4,pp=2", "tp=4,ep=4"),
    "deepseek-v3": ("tp=4", "pp=4,dp=2,ep=2", "cp=4,pp=2"),
    "mistral": ("cp=4", "tp=4"),
    "gemma2": ("cp=4", "tp=4,pp=2"),
    "gemma3": ("cp=4,pp=2", "tp=4"),
    "olmo3": ("cp=4", "tp=4,pp=2"),
    "gpt-oss": ("cp=4", "tp=4,ep=4", "cp=2,tp=2,ep=4,pp=2"),
}
"""Tried with --thorough."""
BY_OTHERS = ("mistral", "olmo3", "gemma3")
"""Families whose parts another one has."""
SAMPLED = SamplingSpec(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7)


def prompts() -> list[tuple[int, ...]]:
    """Of different lengths, more than there are slots, some longer than a chunk."""
    generator = random.Random(1)
    return [tuple(generator.randrange(256) for _ in range(length)) for length in (1, 17, 5, 20, 9, 2, 11)]


def spec(folder: Path, layout: str, **changes: Any) -> GenerationSpec:
    fields: dict[str, Any] = {"slots": SLOTS, "length": LENGTH, "chunk": 9, "device": "cpu"}
    model = model_of(folder)
    return GenerationSpec(model=model, layout=parse_layout(layout), weights=f"hf:{folder}", **fields | changes)


def requests(room: int = ROOM) -> list[Request]:
    return [Request(number, prompt, room) for number, prompt in enumerate(prompts())]


def theirs(folder: Path, room: int = ROOM) -> dict[int, list[int]]:
    """Every prompt alone: nothing of it depends on what they do to fill a batch up."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for number, prompt in enumerate(prompts()):
        given = torch.tensor([prompt])
        options = {"max_new_tokens": room, "do_sample": False, "pad_token_id": END, "eos_token_id": END}
        written = model.generate(given, attention_mask=torch.ones_like(given), **options)
        found[number] = written[0, len(prompt) :].tolist()
    return found


def their_logits(folder: Path) -> dict[int, torch.Tensor]:
    """For the token after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return {number: model(torch.tensor([prompt])).logits[0, -1] for number, prompt in enumerate(prompts())}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.thorough] * (case in BY_OTHERS)) for case in LAYOUTS]
)
def test_greedy_text_is_theirs_and_sampled_text_one_on_every_layout(
    pool: Pool, tmp_path: Path, thorough: bool, case: str
) -> None:
    folder = save_pretrained(tmp_path / "model", case)
    expected, sampled = theirs(folder), None
    logits = their_logits(folder)
    words = Words(ends=(END,))
    for layout in (*LAYOUTS[case], *(MORE[case] if thorough else ())):
        asked = spec(folder, layout)
        ways = [(SamplingSpec(), words), (SAMPLED, words)]
        results = pool.run("tests.generate.jobs:texts", (asked, requests(), ways), ranks=asked.layout.world_size)
        greedy, drawn = together(results)
        assert greedy == expected, layout
        sampled = sampled or drawn
        assert drawn == sampled, layout
        ours = {number: row for _, _, found in results for number, row in found.items()}
        assert ours.keys() == logits.keys()
        for number, row in ours.items():
            torch.testing.assert_close(row, logits[number], rtol=0, atol=1e-5, msg=layout)
        stages = partition(asked.model, asked.layout.pp, LENGTH)
        for rank, (_, held, _) in enumerate(results):
            layers = stages[coordinates(rank, asked.layout).pp]
            assert held == cache_bytes(asked.model, asked.layout, layers, SLOTS, LENGTH, 4), "as the planner says"
    assert sampled != expected
