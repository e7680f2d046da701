"""One page that holds its data, its style and its script, and asks nobody for anything."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

SCRIPTS = (
    "core",
    "summary",
    "ranks",
    "timeline",
    "memory",
    "communication",
    "curves",
    "experts",
    "layers",
    "shares",
    "considered",
    "explorer",
    "main",
)


def page(data: dict[str, Any], live: bool = False) -> str:
    """`live`: the page asks the server that gave it for newer data."""
    script = "\n".join(_part(f"{name}.js") for name in (*SCRIPTS, *(["live"] if live else [])))
    parts = {
        "TITLE": escape(str(data["title"])),
        "CONNECT": "; connect-src 'self'" if live else "",
        "STYLE": _part("style.css"),
        "SCRIPT": script,
        "DATA": embedded(data),
    }
    shell = _part("page.html")
    # Split, not replaced in turn: what stands in the data is never taken for a place to fill.
    pieces = shell.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def embedded(data: dict[str, Any]) -> str:
    """JSON that no text in it can end: whatever could open or close a tag is written as an escape."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _part(name: str) -> str:
    return resources.files("cuboid.report").joinpath("page", name).read_text(encoding="utf-8")
