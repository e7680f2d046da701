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
from cuboid.generate.words import Words
from cuboid.launch.pool import Pool
from cuboid.plan.cache import cache_bytes
from cuboid.plan.partition import partition
from cuboid.spec.generation import GenerationSpec, SamplingSpec, parse_layout
from cuboid.spec.ranks import coordinates
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.jobs import together

LENGTH, SLOTS, ROOM, END = 40, 3, 12, 256
EVERYWHERE = ("dp=1", "tp=2", "pp=2", "tp=2,pp=2,dp=2", "cp=2")
LAYOUTS = {
    "llama": (*EVERYWHERE, "tp=4", "pp=4", "cp=2,tp=2,pp=2"),
    "qwen3": EVERYWHERE,
    "gpt2": EVERYWHERE,
    "mixtral": (*EVERYWHERE, "dp=2,ep=2", "tp=2,ep=2,dp=2", "cp=2,tp=2,ep=4,pp=2"),
    "deepseek-v3": ("dp=1", "tp=2,pp=2,dp=2,ep=4", "cp=2,ep=2"),
}
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
    """Every prompt alone: what a batch does to none of ours must not depend on what it does to theirs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for number, prompt in enumerate(prompts()):
        given = torch.tensor([prompt])
        options = {"max_new_tokens": room, "do_sample": False, "pad_token_id": END, "eos_token_id": END}
        written = model.generate(given, attention_mask=torch.ones_like(given), **options)
        found[number] = written[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("case", LAYOUTS)
def test_greedy_text_is_theirs_and_sampled_text_one_on_every_layout(pool: Pool, tmp_path: Path, case: str) -> None:
    folder = save_pretrained(tmp_path / "model", case)
    expected, sampled = theirs(folder), None
    words = Words(ends=(END,))
    for layout in LAYOUTS[case]:
        asked = spec(folder, layout)
        ways = [(SamplingSpec(), words), (SAMPLED, words)]
        results = pool.run("tests.generate.jobs:texts", (asked, requests(), ways), ranks=asked.layout.world_size)
        greedy, drawn = together(results)
        assert greedy == expected, layout
        sampled = sampled or drawn
        assert drawn == sampled, layout
        stages = partition(asked.model, asked.layout.pp, LENGTH)
        for rank, (_, held) in enumerate(results):
            layers = len(stages[coordinates(rank, asked.layout).pp])
            assert held == cache_bytes(asked.model, asked.layout, layers, SLOTS, LENGTH, 4), "as the planner says"
    assert sampled != expected
