"""Tasks of lm-evaluation-harness on a model of ours: the harness's own scoring finds what ours finds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.generate.evaluation import choice_requests, read_questions, windows
from cuboid.generate.target import find_target
from cuboid.launch.generation import start_scoring
from cuboid.launch.harness import CuboidModel, sampling_of
from cuboid.spec.generation import GenerationSpec, SamplingSpec, parse_layout
from tests.checkpoint.pretrained import save_pretrained

QUESTIONS = [
    {"prompt": f"{number} + 1 =", "choices": [f" {number + 1}", " no", f" {number}{number}"], "answer": number % 3}
    for number in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_pretrained(tmp_path_factory.mktemp('models') / 'llama', 'llama')}"


def asked(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_a_task_of_ones_own_has_the_accuracy_of_our_choices(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], thorough: bool
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "sums.yaml").write_text(f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    words = ["evaluate", model, "--tokenizer", "byte", "--device", "cpu"]
    assert main([*words, "--choices", str(data), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    harness = [*words, "--tasks", str(tmp_path), "--harness"]
    assert main([*harness, "sums", "--json"]) == 0
    theirs = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["sums"]
    assert theirs["acc,none"] == pytest.approx(ours["accuracy"], abs=1e-12)
    assert theirs["acc_norm,none"] == pytest.approx(ours["accuracy_by_byte"], abs=1e-12)
    assert main([*harness, "sums", "--limit", "3"]) == 0
    assert "sums: acc 0." in capsys.readouterr().out
    if thorough:  # it looks for the name among all that the harness brings
        assert main([*harness, "sum"]) == 2
        assert "harness=sum is no task that lm_eval knows" in capsys.readouterr().err


def test_likelihoods_are_ours_on_another_layout(model: str, tmp_path: Path) -> None:
    target = find_target(model, "byte")
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS[:2]))
    requests = choice_requests(read_questions(path), target.words)
    alone = GenerationSpec(model=target.model, layout=parse_layout("dp=1"), weights=model, slots=6, length=16)
    expected = [score.likelihood for score in start_scoring(alone, requests)]
    pairs = [asked(question["prompt"], choice) for question in QUESTIONS[:2] for choice in question["choices"]]
    found = CuboidModel(target, parse_layout("tp=2"), device="cpu").loglikelihood(pairs)
    assert [likelihood for likelihood, _ in found] == pytest.approx(expected, abs=1e-5)


def test_text_longer_than_the_context_is_rolled_through_it(model: str) -> None:
    target = find_target(model, "byte")
    ours = CuboidModel(target, parse_layout("dp=1"), device="cpu", precision="float64")
    text = "Nothing is dropped silently. " * 6
    (end,) = target.words.ends
    spec = GenerationSpec(
        model=target.model, layout=parse_layout("dp=1"), weights=model, precision="float64", slots=4, length=64
    )
    short = start_scoring(spec, windows([end, *text[:64].encode()], 64))
    assert ours.loglikelihood_rolling([asked(text[:64])]) == pytest.approx([short[0].likelihood], abs=1e-9)
    (rolled,) = ours.loglikelihood_rolling([asked(text)])
    assert -math.inf < rolled < short[0].likelihood
    assert ours.loglikelihood([asked("", text[:64])])[0][0] == pytest.approx(short[0].likelihood, abs=1e-9)
    (long,) = ours.loglikelihood([asked(text, " end")])
    (cut,) = ours.loglikelihood([asked(text[-61:], " end")])
    assert long == pytest.approx(cut, abs=1e-9), "what fits into the context is its end"


def test_answers_end_where_a_task_says(model: str) -> None:
    ours = CuboidModel(find_target(model, "byte"), parse_layout("dp=1"), device="cpu")
    (whole,) = ours.generate_until([asked("ab", {"until": [], "max_gen_toks": 12})])
    stop = whole[3:5]
    first, second = ours.generate_until(
        [asked("ab", {"until": [stop], "max_gen_toks": 12}), asked("x" * 99, {"until": "\n", "max_gen_toks": 12})]
    )
    assert first == whole[: whole.index(stop)]
    assert len(second) <= 12
    assert sampling_of({"do_sample": True, "top_k": 5}) == SamplingSpec(max_tokens=256, temperature=1.0, top_k=5)
    assert sampling_of({"do_sample": False, "temperature": 0.7}).temperature == 0
    with pytest.raises(UserError, match="generation_kwargs has num_beams; use until"):
        sampling_of({"num_beams": 4})


def test_without_the_package_one_sentence_says_what_to_install(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", model, "--tokenizer", "byte", "--harness", "hellaswag"]) == 2
    assert "pip install 'cuboid[harness]'" in capsys.readouterr().err
