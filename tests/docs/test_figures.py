"""The figures in the pages are those the program draws today, and each can be read by a machine too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn() -> Iterator[dict[str, str]]:
    """What `python docs/figures.py docs/figures` would write."""
    sys.path.insert(0, str(DOCS))
    try:
        from figures import figures

        yield figures()
    finally:
        sys.path.remove(str(DOCS))


def test_the_figures_are_what_the_program_draws(drawn: dict[str, str]) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "figures").glob("*.svg")}
    assert kept.keys() == drawn.keys()
    old = [name for name, text in drawn.items() if kept[name] != text]
    assert not old, f"{old} show what is no longer so; run python docs/figures.py docs/figures and look at them"


def test_every_figure_is_used_and_is_a_picture(drawn: dict[str, str]) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and root.attrib["viewBox"]
        assert f"figures/{name})" in pages, f"no page shows {name}"


def test_every_picture_is_shown() -> None:
    """They are taken by the test that opens reports in a browser; Sphinx finds pages whose picture is not there."""
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for path in (DOCS / "pictures").iterdir():
        assert f"pictures/{path.name})" in pages, f"no page shows {path.name}"


def test_a_figure_shows_what_ranks_hold_and_send(drawn: dict[str, str]) -> None:
    """Sixteen cards of two squares, and a ring of eight arrows in each of two groups."""
    text = drawn["context.svg"]
    assert text.count(">rank ") == 16 and text.count("marker-end") == 16
    assert "5,376 sends of keys and values, and their gradients: 2 bytes × 8,192 tokens × 2,048" in text
