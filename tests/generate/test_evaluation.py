"""Likelihoods: those of transformers in float64 on any layout, cut into windows and questions as they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from transformers import AutoModelForCausalLM

from cuboid.cli.main import main
from cuboid.data.tokenizer import byte_tokenizer
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Question, choice_requests, judge, windows
from cuboid.launch.pool import Pool
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.test_equality import spec

TEXT = "Nothing is dropped silently. " * 9
BYTES = Words(json.dumps(byte_tokenizer()), (256,))


def test_every_token_but_the_first_is_asked_for_once() -> None:
    tokens = list(range(50))
    for sequence, overlap in ((16, 0), (16, 5), (49, 0), (100, 0), (1, 3)):
        requests = windows(tokens, sequence, overlap)
        assert [label for request in requests for label in request.labels] == tokens[1:]
        for request in requests:
            assert request.tokens[-len(request.labels) :] == tuple(label - 1 for label in request.labels)
            assert len(request.tokens) <= sequence + overlap


def test_a_choice_is_what_follows_the_prompt() -> None:
    questions = [Question("2 + 2 =", (" 4", " 55"), 0), Question("x", ("yz", ""), 0)]
    requests = choice_requests(questions[:1], BYTES)
    assert [bytes(request.labels) for request in requests] == [b" 4", b" 55"]
    assert bytes(requests[1].tokens) == b"2 + 2 = 5"
    found = judge([Question("", ("a", "bbb"), 0), Question("", ("a", "bbb"), 1)], [-2.0, -3.0, -2.0, -3.0])
    assert (found.right, found.right_by_byte, found.chosen) == (1, 1, (0, 0))


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,pp=2", "dp=2,cp=2"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_perplexity_is_that_of_transformers(pool: Pool, tmp_path: Path, case: str, layout: str) -> None:
    folder = save_pretrained(tmp_path / "model", case)
    tokens = [*TEXT.encode()]
    asked = spec(folder, layout, precision="float64", length=32)
    job = (asked, windows(tokens, 32))
    results = pool.run("tests.generate.jobs:scored", job, ranks=asked.layout.world_size)
    scores = [score for rank in results for score in rank]
    assert sum(score.tokens for score in scores) == len(tokens) - 1
    ours = math.exp(-sum(score.likelihood for score in scores) / (len(tokens) - 1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    total = 0.0
    for start in range(0, len(tokens) - 1, 32):
        window = torch.tensor(tokens[start : start + 33])
        with torch.no_grad():
            logits = model(window[None, :-1], use_cache=False).logits[0].double()
        total += functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert ours == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-6)


def test_the_command_says_perplexity_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_pretrained(tmp_path / "model", "gpt2")
    (tmp_path / "text.txt").write_text(TEXT)
    common = ["evaluate", f"hf:{folder}", "--tokenizer", "byte", "--device", "cpu", "--json"]
    assert main([*common, "--data", str(tmp_path / "text.txt"), "--sequence", "32"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == said["bytes"] == len(TEXT) - 1
    assert said["perplexity"] == pytest.approx(math.exp(said["loss"]))
    assert said["bits_per_byte"] == pytest.approx(said["loss"] / math.log(2))
    (tmp_path / "questions.jsonl").write_text('{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}\n')
    assert main([*common, "--choices", str(tmp_path / "questions.jsonl")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["accuracy"] == float(said["chosen"] == [0])
    refused = {
        ("--data", "nowhere"): "data.source=nowhere does not exist",
        ("--data", "python-stdlib", "--sequence", "65"): "more than max_positions=64",
        (): "evaluate needs one thing to measure",
        ("--choices", str(tmp_path / "text.txt")): "line 1 of choices=",
    }
    for arguments, sentence in refused.items():
        assert main([*common, *arguments]) == 2
        assert sentence in capsys.readouterr().err
