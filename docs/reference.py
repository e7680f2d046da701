"""Writes the reference of every command and of every key of a run file, from the commands and dataclasses themselves.

python docs/reference.py docs/reference      (`make docs` does it)
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import OptionInfo

from cuboid.cli.main import GROUPS, VERBS, module_of
from cuboid.spec.coding import field_types, unwrap_optional
from cuboid.spec.run import Run

SHORT = {"model": '`model = "tiny-llama"` is short for `base`.', "layout": "Also one string: `dp=2,tp=2,pp=2`."}
LEFT_OUT = ("plan",)
"""Written by the planner, not by people."""


def write_reference(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("commands.md", commands()), ("keys.md", keys())):
        # Sphinx builds anew what has changed on disk.
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text:
            (folder / name).write_text(text, encoding="utf-8")


def commands() -> str:
    """A section for each verb: what it does, its arguments and options."""
    parts = ["# Commands\n", "Written from the program itself; `cuboid COMMAND --help` says the same.\n"]
    parts += ["| to | command | what it does |\n|---|---|---|"]
    parts += [f"| {title} | [`{verb}`](#{verb}) | {VERBS[verb]} |" for title, verbs in GROUPS.items() for verb in verbs]
    parts += ["\n## Options that several commands have\n", "| option | commands |\n|---|---|", *_common()]
    for verb in VERBS:
        parts.append(f"\n({verb})=\n## cuboid {verb}\n\n{_description(verb)}\n")
        parts += ["| argument or option | meaning | default |\n|---|---|---|"]
        parts += [f"| {names} | {cell(meaning)} | {cell(default)} |" for names, meaning, default in _parameters(verb)]
    return "\n".join(parts) + "\n"


def _common() -> list[str]:
    """The options of three commands or more, each with its commands."""
    users: dict[str, list[str]] = {}
    for verb in VERBS:
        for names, _, _ in _parameters(verb):
            if names.startswith("`-"):
                users.setdefault(names, []).append(f"[{verb}](#{verb})")
    shared = sorted(((names, verbs) for names, verbs in users.items() if len(verbs) > 2), key=lambda row: -len(row[1]))
    return [f"| {names} | {'all' if len(verbs) == len(VERBS) else ', '.join(verbs)} |" for names, verbs in shared]


def function_of(verb: str) -> Any:
    """What runs when the verb is asked for."""
    return import_module(f"cuboid.cli.{module_of(verb)}").command


def _description(verb: str) -> str:
    paragraphs = inspect.cleandoc(function_of(verb).__doc__ or "").split("\n\n")
    told = [" ".join(part.split()) for part in paragraphs]
    examples = [line for part in told if part.startswith("Example: ") for line in part.split("Example: ") if line]
    words = [cell(part) for part in told if not part.startswith("Example: ")]
    return "\n\n".join([*words, "```text\n" + "\n".join(f"$ {line.strip()}" for line in examples) + "\n```"])


def _parameters(verb: str) -> Iterator[tuple[str, str, str]]:
    for name, parameter in inspect.signature(function_of(verb), eval_str=True).parameters.items():
        if parameter.annotation is typer.Context:
            continue
        if get_origin(parameter.annotation) is Annotated:
            (kind, given), default = get_args(parameter.annotation), parameter.default
            # In this form typer takes the first name for the default, and later back.
            declared = [name for name in (given.default, *(given.param_decls or ())) if isinstance(name, str)]
        else:
            kind, given, default = parameter.annotation, parameter.default, parameter.default.default
            declared = list(given.param_decls or ())
        kind, _ = unwrap_optional(kind)
        required = default in (inspect.Parameter.empty, ...)
        names = f"`{given.metavar or name.upper()}`"
        if isinstance(given, OptionInfo):
            plain = "--" + name.replace("_", "-")
            both = [plain, f"--no-{plain[2:]}"] if kind is bool else [plain]
            names = ", ".join(f"`{option}`" for option in declared or both)
        choices = get_args(kind) if get_origin(kind) is Literal else list(kind) if _is_enumeration(kind) else []
        meaning = given.help or ""
        if choices:
            meaning += " One of " + ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in choices) + "."
        shown = "" if required or isinstance(default, bool) or default in ("", None, []) else f"`{default}`"
        yield names, meaning, "must be given" if required else shown


def _is_enumeration(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def keys() -> str:
    """A section for each table of a run file, its keys with type, default and meaning."""
    parts = ["# Keys of a run file\n", f"{inspect.getdoc(Run)}\n"]
    parts.append("Any of them can be changed on the command line: `--set training.steps=20`. Written from the code.\n")
    for name, cls in _tables("", Run):
        if name:
            parts.append(f"\n## [{name}]\n\n{_told(cls)} {SHORT.get(name, '')}\n")
            parts.append("| key | type | default | meaning |\n|---|---|---|---|")
            parts += ["| " + " | ".join(row) + " |" for row in _rows(cls)]
    return "\n".join(parts) + "\n"


def _tables(name: str, cls: type) -> Iterator[tuple[str, type]]:
    yield name, cls
    for key, hint in field_types(cls).items():
        inner, _ = unwrap_optional(hint)
        inner = get_args(inner)[0] if get_origin(inner) is tuple else inner
        if is_dataclass(inner) and key not in LEFT_OUT:
            yield from _tables(f"{name}.{key}".lstrip("."), inner)  # type: ignore[arg-type]


def _told(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _rows(cls: type) -> Iterator[tuple[str, str, str, str]]:
    meanings, hints = field_meanings(cls), field_types(cls)
    for entry in fields(cls):  # type: ignore[arg-type]
        value = entry.default if entry.default is not MISSING else None
        if entry.default_factory is not MISSING:
            value = entry.default_factory()
        default = "" if value is None or is_dataclass(value) else f"`{_toml(value)}`"
        yield f"`{entry.name}`", _kind(hints[entry.name]), default, cell(meanings.get(entry.name, ""))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | dict):
        return json.dumps(value)
    return f'"{value}"' if isinstance(value, str) else str(value)


def _kind(hint: Any) -> str:
    inner, _ = unwrap_optional(hint)
    if get_origin(inner) is Literal:
        return ", ".join(f"`{option}`" for option in get_args(inner))
    if get_origin(inner) in (tuple, list):
        return "list"
    if is_dataclass(inner):
        return "table"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(inner, "table")


def field_meanings(cls: type) -> dict[str, str]:
    """Field -> the text that stands under it in the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for entry, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value) if isinstance(after.value, ast.Constant) else ""
            found[entry.target.id] = " ".join(str(text).split())
    return found


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write_reference(Path(sys.argv[1]))
