"""Likelihoods: those of transformers in float64 on any layout, cut into windows and questions as they should be."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from transformers import AutoModelForCausalLM

from cuboid.cli.main import main
from cuboid.data.opened import open_source, split_documents
from cuboid.data.tokenizer import byte_tokenizer
from cuboid.errors import UserError
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Question, choice_requests, judge, read_tokens, some_tokens, windows
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run, build_run
from cuboid.training.run_folder import prepare_folder
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.test_equality import spec
from tests.training.cases import short_run, train_rank

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


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for name in ("web", "code"):
        text = "".join(f"{json.dumps({'text': f'{name} document {number} of many'})}\n" for number in range(200))
        (folder / f"{name}.jsonl").write_text(text)
        assert main(["data", "build", str(folder / f"{name}.jsonl"), "-o", str(folder / name)]) == 0
    return folder


def trained(folder: Path, *fields: str) -> Run:
    """A run of two steps with its checkpoint."""
    run = short_run("dp=1", str(folder), "training.steps=2", "checkpoint.every=2", *fields)
    prepare_folder(run)
    train_rank(0, run)
    return run


def test_what_a_run_held_out_is_measured_and_what_it_trained_on_is_said(
    tmp_path: Path, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = str(stores / "web")
    run = trained(tmp_path / "run", f"data.source={web}", "data.validation_fraction=0.1")
    common = ["evaluate", str(tmp_path / "run"), "--device", "cpu", "--json"]
    assert main([*common, "--data", "held-out"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    said = json.loads(shown.out)
    held = read_tokens("held-out", None, BYTES, 257, run)
    assert held.trained_on is said["trained_on"] is False
    assert said["tokens"] == len(held.tokens) - 1
    numbers = [int(found) for found in re.findall(r"document (\d+) of", BYTES.decode(held.tokens))]
    split = split_documents(200, 0.1, web)
    assert numbers == [number for first, last in split.held_out for number in range(first, last)], "these and no others"

    shutil.copytree(web, tmp_path / "moved")
    for same in (web, str(tmp_path / "moved")):
        assert main([*common, "--data", same]) == 0
        shown = capsys.readouterr()
        assert f"warning: the model was trained on data={same}, so this says how well it remembers" in shown.err
        assert json.loads(shown.out)["trained_on"] is True
    assert read_tokens(str(stores / "code"), None, BYTES, 257, run).trained_on is False
    assert read_tokens(web, None, BYTES, 257, None).trained_on is None, "nobody knows of a model from elsewhere"


def test_data_that_changed_since_is_not_what_was_held_out(
    tmp_path: Path, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stores / "web", tmp_path / "mine")
    trained(tmp_path / "run", f"data.source={tmp_path / 'mine'}", "data.validation_fraction=0.1")
    shutil.rmtree(tmp_path / "mine")
    shutil.copytree(stores / "code", tmp_path / "mine")
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu", "--data", "held-out", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"data=held-out is not what the run held out: data.source={tmp_path / 'mine'} holds other" in said.err


def test_held_out_data_of_a_mixture_and_of_a_source_of_its_own(tmp_path: Path, stores: Path) -> None:
    web, code = str(stores / "web"), str(stores / "code")
    fields = ["data.validation_fraction=0.1"]
    table = {"model": "tiny-llama", "data": {"mixture": {web: 3.0, code: 1.0}}}
    mixed = read_tokens("held-out", 100, BYTES, 257, build_run(table, fields))
    parts = [BYTES.decode(part) for part in (mixed.tokens[:75], mixed.tokens[75:])]
    assert len(mixed.tokens) == 100 and parts[0].startswith("web document") and parts[1].startswith("code document")
    own = build_run({"model": "tiny-llama"}, [f"data.source={web}", f"data.validation={code}"])
    assert BYTES.decode(read_tokens("held-out", 9, BYTES, 257, own).tokens) == "code docu"
    with pytest.raises(UserError, match="data=held-out needs a run that held data out"):
        read_tokens("held-out", 9, BYTES, 257, build_run({"model": "tiny-llama"}))


def test_tokens_that_the_data_does_not_hold_are_refused(
    tmp_path: Path, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT)
    common = ["evaluate", str(tmp_path / "run"), "--device", "cpu", "--json"]
    held = len(open_source(str(stores / "web")).tokens.tokens)
    for data, count in ((str(stores / "web"), held), (str(tmp_path / "text.txt"), len(TEXT))):
        for asked in ("1e11", str(count + 1)):
            assert main([*common, "--data", data, "--tokens", asked]) == 2
            sentence = (
                f"tokens={int(float(asked)):,} is more than the {count:,} of data={data}; use --tokens {count} or"
            )
            assert sentence in capsys.readouterr().err
        assert main([*common, "--data", data, "--tokens", str(count)]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == count - 1
    for asked, sentence in (("2.5", "no number of tokens; use --tokens 20000"), ("inf", "no number to compute with")):
        assert main([*common, "--data", data, "--tokens", asked]) == 2
        assert sentence in capsys.readouterr().err


def test_tokens_that_memory_does_not_hold_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"tokens=10,000,000,000,000 take about 1e\+06 GB of memory, and .* are free; use"
    ):
        some_tokens(range(10), 10**13, 10**14)
