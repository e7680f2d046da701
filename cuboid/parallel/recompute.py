"""Activation recomputation: what the backward pass needs is computed again instead of kept.

full: only a block's input is kept. selective: the results of matrix products and attention are kept, the cheap rest
(norms, rotations, activation functions) is computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cuboid.parallel.imagined  # noqa: F401, what `_DEAR` names
from cuboid.parallel.context import KEPT
from cuboid.spec.layout import Recompute

_DEAR = {
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
    # In a compiled block, which then keeps these sums and not the products they come of, tp times as large.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.cuboid.imagined_scatter.default,
    *KEPT,
}


def _policy(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def with_recompute(run: Callable[..., Tensor], kind: Recompute) -> Callable[..., Tensor]:
    if kind == "none":
        return run
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, run, **options)
