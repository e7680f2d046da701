"""What commands print for programs is JSON by the standard."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

from cuboid.strict_json import json_text

CLI = Path(__file__).parents[2] / "cuboid/cli"


def test_what_is_not_finite_is_null() -> None:
    told = {"loss": math.nan, "rows": [(1.5, math.inf), {"deep": [-math.inf, "NaN", True, 3]}], 7: None}
    expected = {"loss": None, "rows": [[1.5, None], {"deep": [None, "NaN", True, 3]}], "7": None}
    assert json.loads(json_text(told)) == expected
    assert json_text({"loss": 1.5}) == json.dumps({"loss": 1.5})


def test_commands_print_no_other_json() -> None:
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "write_output"):
                assert not any("json.dump" in ast.unparse(each) for each in node.args), f"{path.name}:{node.lineno}"
