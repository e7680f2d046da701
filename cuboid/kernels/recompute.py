"""Activation recomputation: what the backward pass needs is computed again instead of kept.

full: only a block's input is kept. selective: the results of matmuls and attention are kept, the cheap rest
(norms, rotations, activation functions) is computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
    torch.ops.aten._scaled_grouped_mm_v2.default,
}
"""What selective recomputation keeps the results of. Who defines an operation that is dear adds it here."""


Keeps = Literal["nothing", "marked", "all"]
"""Of the results of `SAVED` operations: those within `keep_matmuls`, or all."""


def _policy(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class _Results(TorchDispatchMode):
    """Keeps results of a forward pass; in its recomputation, which runs the same operations in the same order, finds
    them. torch's own modes for policies do the same with several times the host's work an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.again = False
        self._kept: deque[Any] = deque()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if self.again and operation in SAVED:
            return self._kept.popleft()
        result = operation(*arguments, **(options or {}))
        if operation in SAVED:
            # Without the graph that autograd writes into the tensor it gets.
            self._kept.append(_detached(result))
        return result


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    return tuple(_detached(each) for each in result) if isinstance(result, tuple) else result


class Memory:
    """What one forward pass leaves for its recomputation, in order: what the host found out, so that the device need
    not be asked again, and results of operations."""

    current: Memory | None = None

    def __init__(self, keeps: Keeps) -> None:
        self.keeps = keeps
        self.results = _Results()
        self._values: list[Any] = []
        self._place: int | None = None
        """Of the next value; None in the forward pass itself."""

    @contextmanager
    def during(self, again: bool) -> Iterator[None]:
        self._place, Memory.current = 0 if again else None, self
        self.results.again = again
        try:
            with self.results if self.keeps == "all" else nullcontext():
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


def keep_matmuls(run: Callable[[], T]) -> T:
    """`run`, of which selective recomputation keeps the results of matmuls."""
    memory = Memory.current
    if memory is None or memory.keeps != "marked":
        return run()
    with memory.results:
        return run()


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(keeps: Keeps) -> Contexts:
    """For the forward pass and for its recomputation."""
    memory = Memory(keeps)
    return memory.during(again=False), memory.during(again=True)


def with_recompute(
    run: Callable[..., Tensor], kind: Recompute, traced: bool = False, marked: bool = False
) -> Callable[..., Tensor]:
    """`traced`: by the compiler, which knows only what torch itself makes of a policy. `marked`: selective
    recomputation keeps only what `keep_matmuls` runs; to look at every operation takes the host longer than to launch
    it."""
    if kind == "none":
        return run
    keeps: Keeps = "nothing" if kind == "full" else "marked" if marked else "all"
    contexts: Callable[[], Any] = partial(_contexts, keeps)
    if traced:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
    # Nothing in a block draws random numbers, so no state of a generator needs to be kept.
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
