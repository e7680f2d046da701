"""What nodes do next, planned beside the coordinator, which hears of nodes meanwhile: a plan may take seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from cuboid.resilience.replan import Choice

Nodes: TypeAlias = tuple[str, ...]
Arranged: TypeAlias = tuple[Choice, Nodes]
"""How nodes are used, and which of them, in the order of their ranks."""
SOON = 0.1
"""Seconds in which what needs no planning is there."""


class Planned:
    """Answers of a slow function, one at a time; the last one is kept."""

    def __init__(self, arrange: Callable[[Nodes], Arranged]) -> None:
        self._arrange = arrange
        self._thread: threading.Thread | None = None
        self._answer: tuple[Nodes, Arranged | Exception] | None = None

    def __call__(self, nodes: Nodes) -> Arranged | None:
        """None: not yet; ask again. What the function raises is raised here."""
        if self._thread is None and (self._answer is None or self._answer[0] != nodes):
            self._thread = threading.Thread(target=self._find, args=(nodes,), daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(SOON)
            if self._thread.is_alive():
                return None
            self._thread = None
        assert self._answer is not None
        asked, found = self._answer
        if asked != nodes:  # that of other nodes, which were there when it began
            return None
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _find(self, nodes: Nodes) -> None:
        try:
            self._answer = nodes, self._arrange(nodes)
        except Exception as error:
            self._answer = nodes, error
