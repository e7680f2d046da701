"""Lists in the pages are those of the program: engines, and the signs of `simulate`."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files

from cuboid.schedule.simulate import IDLE
from cuboid.schedule.table import Kind
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/plan.md").read_text(encoding="utf-8")


def rows(heading: str) -> str:
    """The first column of the table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))


def test_every_engine_is_listed() -> None:
    profiles = tomllib.loads((files("cuboid.cost") / "data" / "engines.toml").read_text(encoding="utf-8"))
    assert set(re.findall(r"`([\w.-]+)`", rows("Engines"))) == {name for name in profiles if "@" not in name}


def test_every_sign_of_a_drawing_is_explained() -> None:
    signs = re.findall(r"`([^`]+)`", rows("See the pipeline"))
    assert {sign[0] for sign in signs} == {*(kind.value for kind in Kind), IDLE}
