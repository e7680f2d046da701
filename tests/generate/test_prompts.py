"""Text comes whole, whatever the tokens cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.data.tokenizer import byte_tokenizer
from cuboid.errors import UserError
from cuboid.generate.batch import Event
from cuboid.generate.detokenizer import Reader, Words
from cuboid.generate.prompts import Prompt, Results, Text, Texts, make_prompt, read_prompts
from cuboid.spec.generation import SamplingSpec

BYTES = Words(json.dumps(byte_tokenizer()), (256,))


def events(text: str, ending: str, number: int = 0) -> list[Event]:
    tokens = [*text.encode()]
    return [Event(number, token, "" if place + 1 < len(tokens) else ending) for place, token in enumerate(tokens)]


def test_a_character_is_said_when_all_its_bytes_are_there() -> None:
    reader, grown = Reader(BYTES), []
    for token in "a€𝄞ß".encode():
        reader.add([token])
        grown.append(reader.text)
    assert grown == ["a", "a", "a", "a€", "a€", "a€", "a€", "a€𝄞", "a€𝄞", "a€𝄞ß"]
    reader.add("€".encode()[:2])
    assert reader.text == "a€𝄞ß"
    assert reader.finish().startswith("a€𝄞ß\N{REPLACEMENT CHARACTER}")


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text = Text(Prompt(0, "", (1,)), BYTES, ("\n\n", "END"))
    shown = [text.add(event) for event in events("one\ntwo EN three\n\n", "stop")]
    assert "".join(shown) == text.text == "one\ntwo EN three"
    assert shown[0] == shown[1] == ""
    unended = Text(Prompt(0, "", (1,)), BYTES, ("END",))
    for event in events("the EN", "length"):
        unended.add(event)
    assert unended.text == "the EN"


@pytest.mark.parametrize(("text", "stops"), [("abc END", True), ("abc EN", False), ("END abc def ghi jkl mno", False)])
def test_a_stop_string_is_seen_when_it_ends(text: str, stops: bool) -> None:
    assert BYTES.stops([*text.encode()], ("END",)) is stops


def test_texts_are_shown_in_the_order_of_prompts() -> None:
    prompts = [Prompt(number, str(number), (1,)) for number in range(3)]
    shown: list[tuple[int, str, bool]] = []
    kept: list[int] = []
    texts = Texts(
        prompts,
        BYTES,
        (),
        lambda prompt, new, whole: shown.append((prompt.number, new, whole)),
        lambda row: kept.append(row["index"]),
    )
    texts.hear(events("zwei", "end", 2))
    texts.hear(events("ei", "", 1))
    texts.hear(events("no", "length", 0))
    texts.hear(events("ns", "end", 1))
    assert kept == [2, 0, 1]
    assert shown == [
        (0, "n", False),
        (0, "o", True),
        (1, "ei", False),
        (1, "n", False),
        (1, "s", True),
        (2, "zwei", True),
    ]


@pytest.mark.parametrize(
    "line", ['{"prompt": "\\u0000"}', '{"prompt": "\\ud800"}', '{"tokens": ["a"]}', "[" * 10_000, "9" * 5000, "null"]
)
def test_lines_that_are_no_prompts_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"line 1 of prompts=.*prompts\.jsonl is no prompt; write"):
        read_prompts(path, BYTES, 257)


def test_half_a_character_is_no_prompt_and_a_nul_is_a_byte() -> None:
    """As the command line brings bytes that are no UTF-8."""
    for half in ("\udc80", "a\ud800"):
        with pytest.raises(UserError, match=r"half a character|cannot encode"):
            make_prompt(0, half, BYTES, 257, "--prompt")
        with pytest.raises(UserError, match="stop"):
            SamplingSpec(max_tokens=1, stop=(half,))
    assert make_prompt(0, "a\0b", BYTES, 257, "--prompt").tokens == (97, 0, 98)


@pytest.mark.parametrize("row", ["[]", "1", '{"made_with": []}', '{"made_with": {}, "index": "a"}', "\0"])
def test_a_file_that_holds_no_results_is_not_continued(tmp_path: Path, row: str) -> None:
    path = tmp_path / "done.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(UserError, match="holds something other than results; name another file"):
        Results(path, [Prompt(0, "a", (97,))], {})
    with pytest.raises(UserError):
        Results(path, [Prompt(0, "a", (97,))], {"seed": 1})
    assert path.read_text() == row + "\n"
