"""Conversations are written by the tokenizer's own chat template, as transformers writes them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cuboid.cli.main import main
from cuboid.data.chat import FILE, ChatTemplate, Renderer, find_template
from cuboid.data.store import open_store
from cuboid.data.tokenizer import byte_tokenizer
from cuboid.errors import UserError

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}[INST] {{ message['content'] | trim }} [/INST]
{%- elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "hi "},
    {"role": "assistant", "content": "HELLO"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "CIAO"},
    {"role": "user", "content": "still there?"},
]


def tokenizer(folder: Path, template: object = None, **config: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    told = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": template} if template else told))
    return folder


@pytest.mark.parametrize("template", [CHATML, INSTRUCT])
def test_it_is_the_text_of_transformers(tmp_path: Path, template: str) -> None:
    folder = tokenizer(tmp_path / "model", template)
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|endoftext|>"
    )
    oracle.chat_template = template
    found = find_template(str(folder))
    assert found is not None
    turns = found.turns(MESSAGES, "row 1")
    assert "".join(turns) == oracle.apply_chat_template(MESSAGES[:4], tokenize=False)
    assert turns[0] == oracle.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    assert [turn.strip()[:5] for turn in turns[1::2]] == ["HELLO", "CIAO" + turns[3].strip()[4]]


def test_where_templates_stand(tmp_path: Path) -> None:
    assert find_template("byte") is None
    assert find_template(str(tokenizer(tmp_path / "none"))) is None
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
    found = find_template(str(tokenizer(tmp_path / "several", several) / "tokenizer.json"))
    assert found is not None and found.source == CHATML
    beside = tokenizer(tmp_path / "beside", "another")
    (beside / FILE).write_text(CHATML)
    found = find_template(str(beside))
    assert found is not None and (found.source, found.where) == (CHATML, str(beside / FILE))


def test_the_command_learns_what_the_assistant_says_and_makes_up_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, store = tmp_path / "chat.jsonl", tmp_path / "store"
    rows.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    build = ["data", "build", str(rows), "--completions", "-o", str(store), "--tokenizer"]
    for without in ("byte", str(tokenizer(tmp_path / "without"))):
        assert main([*build, without]) == 2
        assert "row 1 has messages, and the tokenizer has no chat template; use rows with" in capsys.readouterr().err
        assert not store.exists()
    assert main([*build, str(tokenizer(tmp_path / "with", CHATML))]) == 0
    text = bytes(token for token in open_store(store).tokens.tokens.tolist() if token < 256).decode("latin-1")
    assert text.count("im_start") == 4 and "still there" not in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        LOOP,
        f"{{% if messages[0].content == 'hi ' %}}{LOOP}{{% endif %}}",
        "{% if messages[0].content == 'hi ' %}{{ 'x' * 10**10 }}{% endif %}",
    ],
)
def test_a_template_that_does_not_end_is_refused(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cuboid.data.chat.SECONDS", 2.0)
    rows = tmp_path / "chat.jsonl"
    rows.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    build = ["data", "build", str(rows), "--completions", "-o", str(tmp_path / "store")]
    assert main([*build, "--tokenizer", str(tokenizer(tmp_path / "model", template))]) == 2
    assert "takes for ever, or all memory, on these messages; use rows with" in capsys.readouterr().err
    assert not list(tmp_path.glob("store*"))


def test_templates_that_cannot_be_one(tmp_path: Path) -> None:
    assert find_template(str(tokenizer(tmp_path / "named", [{"name": ["default"], "template": CHATML}]))) is None
    with pytest.raises(UserError, match="has 1,000,000 characters, more than the 262,144 one may have; use rows with"):
        find_template(str(tokenizer(tmp_path / "long", "x" * 1_000_000)))
    with Renderer(ChatTemplate("mine", "{% for m in messages %}{{ m.content }}{% endfor %}", ())) as renderer:
        assert renderer.turns(MESSAGES[1:2], "row 1") == ("", "HELLO")
        with pytest.raises(UserError, match="row 2: mine takes for ever, or all memory, on these messages"):
            renderer.turns([{"role": "assistant", "content": "x" * 17_000_000}], "row 2")
        assert renderer.turns(MESSAGES[1:2], "row 3") == ("", "HELLO"), "one row that is refused ends nothing"


def test_conversations_without_an_answer_are_counted_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "chat.jsonl"
    unanswered = json.dumps({"messages": MESSAGES[:1]}) + "\n"
    rows.write_text(unanswered + json.dumps({"messages": MESSAGES}) + "\n" + unanswered)
    build = ["data", "build", str(rows), "--completions", "--tokenizer", str(tokenizer(tmp_path / "model", CHATML))]
    assert main([*build, "-o", str(tmp_path / "store")]) == 0
    assert "2 rows without an answer to learn were skipped" in capsys.readouterr().out
    rows.write_text(unanswered)
    assert main([*build, "-o", str(tmp_path / "none")]) == 2
    assert "holds no answer to learn; name rows with a completion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no!') }}", "row 1: mine refuses these messages: no!; use rows with prompt"),
        ("{{ messages.__class__.__mro__ }}", "row 1: mine refuses these messages: access to attribute"),
        ("{% for %}", "mine is no template: "),
        ("{{ messages[-1].content }}", "row 1: mine writes earlier messages anew when message 2 follows"),
    ],
)
def test_a_template_that_does_not_serve(template: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        ChatTemplate("mine", template, ()).turns(MESSAGES, "row 1")
    assert sentence in str(caught.value)
