"""Flat tensors that are adjacent in memory, taken as one: launch and tail are much of the time of a short kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

Item = TypeVar("Item")


def follows(before: Tensor, after: Tensor) -> bool:
    same = before.dtype == after.dtype and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return same and before.storage_offset() + before.numel() == after.storage_offset()


def together(before: Tensor, after: Tensor) -> Tensor:
    """Of two of which the second follows the first."""
    # A view over both: the optimizer's update and the norm run as one kernel over what lies together.
    return before.as_strided((before.numel() + after.numel(),), (1,))


def in_runs(
    items: Iterable[Item], is_followed: Callable[[Item, Item], bool], merge: Callable[[Item, Item], Item]
) -> list[Item]:
    """As few as they can be, in their order."""
    runs: list[Item] = []
    for item in items:
        if runs and is_followed(runs[-1], item):
            runs[-1] = merge(runs[-1], item)
        else:
            runs.append(item)
    return runs
