"""What torch.compile does for a rank: one graph per block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.kernels.compiler import tell_compiler
from cuboid.kernels.recompute import with_recompute
from cuboid.model.rope import Positions
from cuboid.model.transformer import Block
from cuboid.spec.layout import Recompute
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run


def is_compiled(run: Run, device: torch.device) -> bool:
    # Modules of one's own are compiled when that is asked for.
    wanted = run.training.compile == "on" or (device.type == "cuda" and not isinstance(run.model, PythonModelSpec))
    return wanted and not run.training.compiles_nothing


class _Recomputed(nn.Module):
    """A block, or its attention, with recomputation in the compiled region, where the compiler sees what is kept."""

    def __init__(self, block: Block, run: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._run = with_recompute(run, "selective", traced=True)

    def forward(self, x: Tensor, positions: Positions) -> Any:
        return self._run(x, positions)


def compiled_block(
    block: Block, recompute: Recompute, whole: bool, options: dict[str, Any] | None
) -> Callable[..., Tensor]:
    """`whole`: the block computes alone, so one graph holds it all; else its collectives divide it. `options`: what the
    compiler is told besides."""
    tell_compiler()
    module = _Recomputed(block, block) if recompute == "selective" else block
    # Of operations in place, which blocks have none of.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    module.compile(fullgraph=whole, dynamic=False, options=options)
    # What a full recomputation keeps is the block's input: nothing for the compiler to decide.
    return with_recompute(module, recompute) if recompute == "full" else module


def compiled_attention(block: Block, whole: bool, options: dict[str, Any] | None) -> Callable[..., Tensor]:
    """Selective recomputation of a block with experts, in two: the compiler would have to stop at the experts, and
    gives up what it has to stop in while it recomputes."""
    tell_compiler()
    attend = _Recomputed(block, block.attend)
    attend.compile(fullgraph=whole, dynamic=False, options=options)
    feed_forward = with_recompute(block.feed_forward, "selective", marked=True)

    def run(x: Tensor, positions: Positions) -> Tensor:
        x, normed = attend(x, positions)
        return block.finish(x, feed_forward(normed, positions), positions)

    return run
