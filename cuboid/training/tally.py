"""Bytes of tensors alive on a CPU, which has no allocator that counts them: every operation's results are followed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tally(TorchDispatchMode):
    """While it is entered, counts what is made and not yet gone, beside what `others` says it holds."""

    def __init__(self, known: set[int], others: Callable[[], int]) -> None:
        """`known`: addresses of storages that `others` counts; a unit's grow and shrink without an operation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._others = others
        self._alive: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0
        self.beside = 0
        """Of the peak, what was made meanwhile."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        given = {storage._cdata for storage in _storages((arguments, options))}
        for storage in _storages(result):
            if storage._cdata not in given:  # a view of something, data read from a file say, is not made here
                self._follow(storage)
        total = self._bytes + self._others()
        if total > self.peak:
            self.peak, self.beside = total, self._bytes
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        self._alive[key] = storage.nbytes()
        self._bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
