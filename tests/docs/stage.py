"""The files that pages speak of and a reader would have: small ones under the names the pages use."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from tests.docs.pages import ROOT

RUN = """model = "tiny-llama"
layout = "dp=2"

[training]
steps = 4
global_batch = 8
sequence = 32
"""
TEXTS = [f"A text of number {number}: " + "words and words, " * number for number in range(40)]


def _demo(path: Path) -> None:
    path.parent.mkdir()
    text = (ROOT / "examples/demo.toml").read_text()
    path.write_text(text.replace("global_batch = 16", "global_batch = 8").replace("sequence = 128", "sequence = 32"))


def _run(path: Path) -> None:
    path.write_text(RUN)


def _corpus(path: Path) -> None:
    path.mkdir()
    (path / "text.txt").write_text("\n".join(TEXTS))


def _lines(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))


def _parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)


def _tokenizer(path: Path) -> None:
    from tests.data.corpora import train_tokenizer

    train_tokenizer(path, 259)


def _pairs(path: Path) -> None:
    rows = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(99)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prompts(path: Path) -> None:
    path.write_text('{"prompt": "1 + 1 ="}\n{"prompt": "2 + 1 ="}\n')


def _pretrained(path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from tests.checkpoint.pretrained import SIZES
    from tests.data.corpora import train_tokenizer

    file = train_tokenizer(path.parent / "pretrained.json", 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>")
    tokens = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES | tokens | {"max_position_embeddings": 512})
    for each in (AutoModelForCausalLM.from_config(config), tokenizer):
        each.save_pretrained(path)


def _probed(path: Path) -> None:
    """A machine described by a file, as a probe leaves one."""
    path.write_text('accelerator = "h100"\nnodes = 1\nmemory_gib = 78.5\n')


FILES: dict[str, Callable[[Path], None]] = {
    "examples/demo.toml": _demo,
    " run.toml": _run,
    "corpus/": _corpus,
    "more.jsonl.gz": _lines,
    "rows.parquet": _parquet,
    "tokenizer.json": _tokenizer,
    "pairs.jsonl": _pairs,
    "prompts.jsonl": _prompts,
    "hf:Qwen3-0.6B": _pretrained,
    " here.toml": _probed,
}
"""What a command mentions -> who makes it."""


def prepare(folder: Path, commands: list[str]) -> None:
    """Every file that the commands use and none of them writes."""
    for mention, make in FILES.items():
        users = [words for words in commands if mention in words]
        if users and f"-o{mention}" not in users[0] and f"-o {mention.strip()}" not in users[0]:
            make(folder / mention.strip().removeprefix("hf:"))
