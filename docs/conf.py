"""How Sphinx builds the site: `make docs`. The pages are plain Markdown, readable where they lie; the reference of
commands and keys is written from the code as the build begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from reference import write_reference  # noqa: E402

import cuboid  # noqa: E402

project = "Cuboid"
version = release = cuboid.__version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Cuboid"
html_copy_source = False
html_show_copyright = False
templates_path: list[str] = []
# Headings can be linked to as on any forge: operations.md#many-nodes; a link that leads nowhere is a warning, and
# `make docs` takes warnings for errors.
myst_heading_anchors = 3
highlight_language = "none"


def setup(application: Any) -> None:
    write_reference(Path(__file__).parent / "reference")
