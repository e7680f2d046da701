"""Every command in the pages: run where it can be, read by the program's parser where it needs what is not here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run
from tests.docs.pages import COMMAND, PAGES, ROOT, Block, Command, blocks, options, outside, parse, saved_files
from tests.docs.stage import prepare

FIRST = ROOT / "README.md"
"""What newcomers do first is done in every run of the tests; with --thorough all other pages are."""
TUTORIAL = ROOT / "docs/tutorial.md"
"""Followed in processes of its own: `test_tutorial.py`."""
SHORTER = {"import": ["training.sequence=32", "training.steps=4", "training.global_batch=4"]}
"""What would take hours with a real model is said once, in the run file that this command writes."""
VARIES = re.compile(r"^(step |loss |goodput )")
"""Lines whose numbers depend on the machine."""


def console(page: Path) -> list[Command]:
    return [command for block in blocks(page) if block.language == "console" for command in block.commands]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_stands_where_it_is_checked(page: Path) -> None:
    strays = [line for line in outside(page) if COMMAND.match(line) and line.startswith(("    ", "$"))]
    assert not strays, "a command outside of a block that a test looks at"
    for block in blocks(page):
        if block.language != "console" and any(COMMAND.match(line) for line in block.lines):
            assert block.is_marked or (block.language == "text" and _is_output(block)), block.lines


def _is_output(block: Block) -> bool:
    return not any(line.startswith(("$ ", "cuboid ")) for line in block.lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_not_run_are_read_by_the_parser(page: Path) -> None:
    for block in blocks(page):
        for command in block.commands if block.is_marked else []:
            program = command.words.split()[0]
            if program == "cuboid":
                parse(command.arguments)
            elif program == "make":
                assert re.search(rf"^{command.words.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for verb, rest in re.findall(r"`cuboid ([a-z-]+)([^`]*)`", page.read_text(encoding="utf-8")):
        unknown = {*re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)} - options(verb)
        assert not unknown, f"cuboid {verb} {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_piece_of_a_run_file_is_one(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            table = tomllib.loads("\n".join(block.lines))
            if not {"hidden", "base"} & table.keys():  # that is a model's file
                build_run({"model": "tiny-llama", **table}, [])


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.thorough] if page != FIRST else [])
        for page in PAGES
        if page != TUTORIAL and console(page)
    ],
)
def test_commands_of_a_page(
    page: Path, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, in the order of the page; what a page shows below a command is what it prints."""
    monkeypatch.chdir(tmp_path)
    commands = console(page)
    for name, text in saved_files(page):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    prepare(tmp_path, [command.words for command in commands])
    for command in commands:
        assert command.words.startswith("cuboid "), command.words
        more = [word for field in SHORTER.get(command.arguments[0], []) for word in ("--set", field)]
        status = main([*command.arguments, *more])
        printed = capsys.readouterr()
        assert status == 0, f"{command.words}: {printed.err}"
        lines = {line.rstrip() for line in printed.out.splitlines()}
        for line in command.shown:
            if line.strip() not in ("", "…") and not VARIES.match(line):
                assert line.rstrip() in lines, f"{command.words} does not print {line!r}, but {printed.out}"
