"""The blocks of the pages: which commands are there to be run, and which only to be read by the parser.

```console: lines that begin with `$ ` are run, one after another down the page; lines below one are what it prints.
```text whose first line begins with `# needs`: commands for machines that are not here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from cuboid.cli.main import VERBS, module_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("[!_]*.md"))]
PAGES += sorted(path for path in (ROOT / "docs").glob("*/*.md") if path.parent.name in ("dimensions", "lab"))
COMMAND = re.compile(r"^\s*(\$ |cuboid [a-z]|make [a-z]|torchrun |sbatch |python3? |\.venv/bin/|\.ci/)")
NEEDS = "# needs "


@dataclass(frozen=True)
class Command:
    """One line of a page, and what the page shows below it."""

    words: str
    shown: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """Without the program, and without the remark behind it."""
        return shlex.split(self.words, comments=True)[1:]


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    lines: tuple[str, ...]

    @property
    def is_marked(self) -> bool:
        """Whether it says that it needs what is not here."""
        return self.language == "text" and self.lines[:1] != () and self.lines[0].startswith(NEEDS)

    @property
    def commands(self) -> list[Command]:
        """Those of the block, without prompts."""
        found: list[tuple[str, list[str]]] = []
        for line in self.lines:
            if line.startswith("$ ") or (self.is_marked and not line.startswith(("#", "$"))):
                found.append((line.removeprefix("$ "), []))
            elif found and self.language == "console":
                found[-1][1].append(line)
        return [Command(words, tuple(shown)) for words, shown in found]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; their fences are no part of them."""
    found: list[Block] = []
    inside: list[str] | None = None
    language = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside, language = [], line[3:].strip()
        else:
            found.append(Block(page, language, tuple(inside)))
            inside = None
    assert inside is None, f"{page} ends within a block"
    return found


def outside(page: Path) -> Iterator[str]:
    """The lines of a page that stand in no fenced block."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def saved_files(page: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each block below a line that says: save this as `NAME`."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"Save this as `([^`]+)`[^\n]*\n\n```\w+\n(.*?)```", text, flags=re.DOTALL)


def parse(arguments: list[str]) -> None:
    """Let the program's own parser read a command, and do nothing more; raises what it finds wrong."""
    _parser(arguments[0])(arguments, standalone_mode=False)


def options(verb: str) -> set[str]:
    """Every option of a verb, as it is written."""
    group: Any = typer.main.get_command(_parser(verb))
    return {name for parameter in group.commands[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}


def _parser(verb: str) -> typer.Typer:
    assert verb in VERBS, f"cuboid {verb}"
    function = import_module(f"cuboid.cli.{module_of(verb)}").command

    @wraps(function)
    def nothing(*_: Any, **__: Any) -> None:
        return None

    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    application.callback()(lambda: None)
    application.command(verb)(nothing)
    return application
