"""Text comes whole, whatever the tokens cut."""

from __future__ import annotations

import json

import pytest

from cuboid.data.tokenizer import byte_tokenizer
from cuboid.generate.batch import Event
from cuboid.generate.detokenizer import Reader, Words
from cuboid.generate.prompts import Prompt, Text, Texts

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
