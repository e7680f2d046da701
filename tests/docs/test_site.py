"""The site builds without a warning, needs no network, and its reference tells of every command and every key."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cuboid.cli.main import VERBS
from cuboid.spec.coding import field_types
from cuboid.spec.run import Run
from tests.cli.command import environment
from tests.docs.pages import parse
from tests.report.browser import chromium

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as `make docs` builds them: a broken link, or a page that no list names, is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(folder / "doctrees")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder / "html")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


class Fetched(HTMLParser):
    """What a browser would fetch for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.found.append(given.get("href") or "")


def test_every_page_is_built_and_asks_no_network(site: Path) -> None:
    for source in DOCS.rglob("*.md"):
        page = site / source.relative_to(DOCS).with_suffix(".html")
        reader = Fetched()
        reader.feed(page.read_text(encoding="utf-8"))
        assert len(reader.found) > 3
        for address in reader.found:
            assert not re.match("(https?:)?//", address), (page.name, address)
            assert not address or (page.parent / address.partition("?")[0]).exists(), (page.name, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text(encoding="utf-8")), style.name


def sections(cls: type) -> Iterator[tuple[str, type]]:
    for key, hint in field_types(cls).items():
        if key != "plan":
            yield key, hint


def test_the_reference_has_every_command_and_every_key_with_its_meaning(site: Path) -> None:
    commands = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
    for verb in VERBS:
        told = commands.partition(f"\n## cuboid {verb}\n")[2].partition("\n## ")[0]
        examples = re.findall(r"(?:^\$|;) cuboid ([^;\n]*)", told, re.MULTILINE)
        assert examples and "| `--json` |" in told, verb
        for example in examples:
            parse(shlex.split(example))
    keys = (DOCS / "reference/keys.md").read_text(encoding="utf-8")
    for section, cls in sections(Run):
        told = keys.partition(f"\n## [{section}]\n")[2].partition("\n## ")[0]
        for key in field_types(cls):
            assert f"| `{key}` | " in told, (section, key)
    lines = [line for line in keys.splitlines() if line.startswith("| `")]
    assert not [line for line in lines if line.endswith("|  |")], "a key without a meaning"


@pytest.mark.browser
def test_pages_show_their_figures_in_a_browser(site: Path) -> None:
    """From the disk, without a word to anybody."""
    loaded = "new Promise((done) => document.readyState === 'complete' ? done(1) : addEventListener('load', done))"
    with chromium() as tab:
        for name in ("index.html", "dimensions/pipeline.html", "reports.html"):
            tab.send("Page.navigate", url=(site / name).as_uri())
            tab.value(loaded)
            assert tab.value("document.images.length") > 0, name
            assert tab.value("[...document.images].every((image) => image.naturalWidth > 50)"), name
        assert all(address.startswith(("file:", "data:")) for address in tab.requests), tab.requests
        assert not tab.complaints
