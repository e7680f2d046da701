"""The page as a file: well-formed, alone, and with no way out of its data for text that came from a run file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

from cuboid.report.page import SCRIPTS, collect, embedded, page
from cuboid.report.source import open_source
from tests.report.cases import make_run, row, write_rows

EVIL = '</script><script>alert(1)</script><!-- @@DATA@@ & " \u2028'


class Reader(HTMLParser):
    """Which elements there are, how they nest, and what the data element holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "path"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_the_page_holds_the_data_and_asks_for_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [row(1), row(2)])
    data = collect(open_source(tmp_path), False)
    text = page(data)
    reader = read(text)
    assert json.loads(reader.scripts[0]) == data and len(reader.scripts) == 2
    addresses = [value for _, found in reader.seen for name in ("src", "href", "action") if (value := found.get(name))]
    assert addresses == ["data:,", "#main"]
    policy = next(found["content"] for tag, found in reader.seen if found.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'") and "connect-src" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), "text stays text"
    assert "@@" not in text


def test_every_script_is_there_and_every_section_is_drawn_by_one_of_them() -> None:
    folder = resources.files("cuboid.report") / "page"
    names = {entry.name.removesuffix(".js") for entry in folder.iterdir() if entry.name.endswith(".js")}
    assert names == {*SCRIPTS, "live"}
    script = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    for name in re.findall(r"\bdraw[A-Z]\w*", script):
        assert re.search(rf"function {name}\(|const {name} =", script), f"{name} is called and not defined"


def test_no_text_of_a_run_breaks_out(tmp_path: Path) -> None:
    make_run(tmp_path / "runs</script>")
    failure = {"time": EVIL, "reason": EVIL, "checkpoint": 0, "restarted": False}
    write_rows(tmp_path / "runs</script>" / "failures.jsonl", [failure])
    write_rows(tmp_path / "runs</script>" / "metrics.jsonl", [row(1)])
    data = {**collect(open_source(tmp_path / "runs</script>"), False), "title": EVIL}
    reader = read(page(data))
    assert len(reader.scripts) == 2 and json.loads(reader.scripts[0]) == data
    assert data["curves"]["events"][0]["text"].startswith(EVIL)
    assert "<" not in embedded(data)
