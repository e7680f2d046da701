"""Imports between rooms follow the table of CONTRIBUTING.md: only upwards in it, so that no two rooms form a cycle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
WITHOUT_TORCH = ROOMS[: ROOMS.index("kernels")]
TRACES = "cuboid/telemetry/profiler_regions.py"
"""Names for a profiler's trace, which is torch's."""


def imports(path: Path) -> list[str]:
    """The modules a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / "cuboid" / room).rglob("*.py"))


def test_the_table_names_every_room() -> None:
    assert sorted(ROOMS) == sorted(path.parent.name for path in (ROOT / "cuboid").glob("*/__init__.py"))


def test_rooms_import_only_rooms_above_them_in_the_table() -> None:
    wrong = []
    for place, room in enumerate(ROOMS):
        for path in files(room):
            for module in imports(path):
                _, _, other = module.partition("cuboid.")
                other = other.partition(".")[0]
                if other in ROOMS[place + 1 :]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_rooms_that_plan_import_no_torch() -> None:
    wrong = []
    for room in WITHOUT_TORCH:
        for path in files(room):
            if str(path.relative_to(ROOT)) != TRACES and any(m.split(".")[0] == "torch" for m in imports(path)):
                wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, wrong


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/draw_walk.py"])
def test_files_that_answer_questions_exist(page: str) -> None:
    named = set(re.findall(r"[`\"](\w+/\w+\.py)[`\"]", (ROOT / page).read_text(encoding="utf-8")))
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "cuboid" / name).exists()]
    assert len(named) > 20 and not missing, missing
