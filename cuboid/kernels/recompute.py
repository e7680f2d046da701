"""Activation recomputation: what the backward pass needs is computed again instead of kept.

full: only a block's input is kept. selective: the results of matmuls and attention are kept, the cheap rest
(norms, rotations, activation functions) is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cuboid.spec.layout import Recompute

SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.amax.default,  # peaks of what is rounded to 8 bits: small, and a pass over memory each
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
}
"""What selective recomputation keeps the results of. Who defines an operation that is dear adds it here."""


def _policy(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class Memory:
    """What the host found out in one forward pass, in order; recomputation need not ask the device again."""

    current: Memory | None = None

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._place: int | None = None
        """Of the next value; None in the forward pass itself."""

    @contextmanager
    def during(self, again: bool) -> Iterator[None]:
        self._place, Memory.current = 0 if again else None, self
        try:
            yield
        finally:
            Memory.current = None

    def take(self, find: Callable[[], Any]) -> Any:
        if self._place is None:
            self._values.append(find())
            return self._values[-1]
        self._place += 1
        return self._values[self._place - 1]


T = TypeVar("T")


def remembered(find: Callable[[], T]) -> T:
    """What `find` returns, or returned at this place of the forward pass that is being recomputed."""
    memory = Memory.current
    result: T = find() if memory is None else memory.take(find)
    return result


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(selective: bool) -> Contexts:
    """For the forward pass and for its recomputation."""
    memory = Memory()
    if not selective:
        return memory.during(again=False), memory.during(again=True)
    # torch keeps what the policy names and recomputes the rest; `Memory` keeps what the host read from the device.
    kept, found = create_selective_checkpoint_contexts(_policy)
    return _both(memory.during(again=False), kept), _both(memory.during(again=True), found)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def with_recompute(run: Callable[..., Tensor], kind: Recompute, traced: bool = False) -> Callable[..., Tensor]:
    """`traced`: by the compiler, which knows only what torch itself makes of a policy."""
    if kind == "none":
        return run
    contexts: Callable[[], Any] = partial(_contexts, kind == "selective")
    if traced:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
    # Nothing in a block draws random numbers, so no state of a generator needs to be kept.
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
