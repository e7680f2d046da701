"""Jobs for the tests of the vocabulary-parallel loss: what each rank gets of logits whose columns are split."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from cuboid.model.linear import CappedLinear, ColumnLinear
from cuboid.model.split_backward import Deferral
from cuboid.parallel import cross_entropy
from cuboid.parallel.groups import Group
from cuboid.spec.sharding import COLUMN, vocabulary_rows
from tests.parallel.collective_jobs import world

TOKENS, HIDDEN = 6, 4
LABELS = torch.tensor([0, 8, -100, 3, 1, 5])


def whole(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of the head, and its weight: the same on every rank."""
    generator = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    return x, 30 * torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64)


def split(rank: int, vocabulary: int, fused: bool, coefficient: float, cap: float) -> tuple[float, float, torch.Tensor]:
    """The loss, the z-loss, and the gradient of this rank's rows of the weight without those that pad it."""
    z_loss = cross_entropy.ZLoss(coefficient, torch.float64, torch.device("cpu")) if coefficient else None
    group = world(None, local=False) if dist.is_initialized() else Group((0,), 0)  # of one rank
    x, weight = whole(vocabulary)
    first, rows = vocabulary_rows(vocabulary, group.size, rank)
    own = torch.zeros(-(-vocabulary // group.size), HIDDEN, dtype=torch.float64)
    own[:rows] = weight[first : first + rows]
    own.requires_grad_()
    if fused:
        head = nn.Module()
        head.norm, head.output, head.cap = nn.Identity(), nn.Module(), cap
        head.output.weight = nn.Parameter(own.detach())
        own = head.output.weight
        with torch.compiler.set_stance("default", force_backend="eager"):
            # As traced for the compiler: making kernels takes long.
            loss = cross_entropy.fused_cross_entropy(head, x, LABELS, vocabulary, group, None, Deferral(), z_loss)  # type: ignore[arg-type]
    else:
        output = CappedLinear(HIDDEN, len(own), COLUMN, cap) if cap else ColumnLinear(HIDDEN, len(own), False)
        output.weight = nn.Parameter(own.detach())
        own = output.weight
        loss = cross_entropy.split_cross_entropy(output(x), LABELS, vocabulary, group, z_loss)
    (2 * loss).backward()
    assert own.grad is not None
    assert not own.grad[rows:].any(), "what pads the vocabulary has no gradient"
    return loss.item(), z_loss.summed.item() if z_loss else 0.0, own.grad[:rows]
