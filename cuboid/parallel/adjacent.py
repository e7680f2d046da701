"""Flat tensors that follow one another in memory, taken as one: much of the time of a short kernel is its beginning and
its end."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def follows(before: Tensor, after: Tensor) -> bool:
    same = before.dtype == after.dtype and before.untyped_storage()._cdata == after.untyped_storage()._cdata
    return same and before.storage_offset() + before.numel() == after.storage_offset()


def together(before: Tensor, after: Tensor) -> Tensor:
    """Of two of which the second follows the first."""
    return before.as_strided((before.numel() + after.numel(),), (1,))


def in_runs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As few as they can be, in their order."""
    runs: list[Tensor] = []
    for tensor in tensors:
        if runs and follows(runs[-1], tensor):
            runs[-1] = together(runs[-1], tensor)
        else:
            runs.append(tensor)
    return runs
