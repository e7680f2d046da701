"""From a Hugging Face model to a tuned one: the commands of docs/finetune.md, run as they stand there."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cuboid.cli.main import main
from cuboid.data.source import Shuffled, make_source
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import load_run
from tests.checkpoint.pretrained import SIZES
from tests.data.corpora import train_tokenizer

ROOT = Path(__file__).parents[2]
SHORT = ["training.sequence=32", "training.steps=10", "training.global_batch=4", "learning_rate.peak=0.02"]
PAIRS = [(f"{first} + {second} =", f" {first + second}") for first in range(12) for second in range(6)]


def commands() -> list[list[str]]:
    page = (ROOT / "docs/finetune.md").read_text()
    found = [line.split() for line in re.findall(r"^\$ cuboid (.*)$", page, flags=re.MULTILINE)]
    return [words for words in found if words[0] != "generate"]  # whose prompts are the reader's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model under the name the page uses, prompts and completions, and what the commands make of them."""
    folder = tmp_path_factory.mktemp("tune")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(train_tokenizer(folder / "tokenizer.json", 300)), eos_token="<|endoftext|>"
    )
    tokens = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model("qwen3", **SIZES | tokens | {"tie_word_embeddings": True})
    torch.manual_seed(0)
    for each in (AutoModelForCausalLM.from_config(config), tokenizer):
        each.save_pretrained(folder / "Qwen3-0.6B")
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    for arguments in commands():
        short = [word for field in SHORT for word in ("--set", field)] if arguments[0] == "import" else []
        with chdir(folder):
            assert main([*arguments, *short]) == 0
    return folder


def test_the_loss_falls(folder: Path) -> None:
    assert [arguments[0] for arguments in commands()] == ["import", "data", "train", "export"]
    rows = [json.loads(line) for line in (folder / "runs/tune/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert all(0 < row["labelled_tokens"] < row["tokens"] for row in rows)


def test_completions_are_labelled_and_prompts_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run = load_run("tune.toml")
    tokenizer = AutoTokenizer.from_pretrained("Qwen3-0.6B")
    stream: list[tuple[int, int]] = []
    for prompt, completion in PAIRS:
        asked, answered = (tokenizer(text)["input_ids"] for text in (prompt, completion))
        stream += [(token, IGNORED) for token in asked]
        stream += [(token, token) for token in (*answered, tokenizer.eos_token_id)]
    source = make_source(run)
    assert isinstance(source, Shuffled)
    for index in range(source.corpus.size):
        tokens, labels = source.corpus.sample(index)
        first = index * run.training.sequence
        window = stream[first : first + run.training.sequence + 1]
        assert tokens.tolist() == [token for token, _ in window[:-1]]
        assert labels.tolist() == [label for _, label in window[1:]]


def test_what_is_exported_is_the_tuned_model_with_its_tokenizer(folder: Path) -> None:
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("Qwen3-0.6B", "tuned"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned")
    assert after.config.eos_token_id == tokenizer.eos_token_id
    text = "".join(prompt + completion + "<|endoftext|>" for prompt, completion in PAIRS[:9])
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = [model(tokens, labels=tokens).loss.item() for model in (before, after)]
    assert losses[1] < losses[0]
