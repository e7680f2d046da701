"""JSON that every program reads: a number that is not finite is null there, for JSON has no word for it."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, ascii_only: bool = True) -> str:
    """On one line."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=ascii_only)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, ensure_ascii=ascii_only)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
