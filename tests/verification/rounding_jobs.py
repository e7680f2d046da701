"""Bugs planted in ranks that are then verified in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

import torch

from cuboid.model.linear import Linear
from cuboid.parallel import collectives, grad_reduce, shm_collectives
from cuboid.parallel.collectives import Pending
from cuboid.parallel.zero import Unit
from cuboid.spec.run import Run
from cuboid.training.optimizer import Optimizer
from cuboid.verification.compare import compare_rounded, observed_trace, rounded_traces
from cuboid.verification.reference import known_trace


@contextmanager
def planted(owner: Any, name: str, bug: Any) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, bug)
    try:
        yield
    finally:
        setattr(owner, name, right)


def verdict(rank: int, run: Run, owner: Any, name: str, bug: Any) -> dict[str, Any] | None:
    """The bug is in what is observed, not in what that is compared with."""
    with planted(owner, name, bug):
        observed = observed_trace(run, rank)
    if observed is None:
        return None
    return asdict(compare_rounded(run, observed, rounded_traces(run), known_trace(run, "float32")))


def sound(rank: int, run: Run) -> dict[str, Any] | None:
    return verdict(rank, run, Unit, "finish_reduction", Unit.finish_reduction)


def without_the_sum_of_gradients(rank: int, run: Run) -> dict[str, Any] | None:
    """Each replica keeps its own."""
    return verdict(rank, run, grad_reduce, "start_all_reduce", lambda x, group: Pending(None, x))


def with_one_gradient_doubled(rank: int, run: Run) -> dict[str, Any] | None:
    """Of all replicas alike, so that only the comparison with one process can tell."""
    right = Unit.finish_reduction

    def wrong(self: Unit) -> None:
        right(self)
        for optimizer_shard in self.optimizer_shards():
            if optimizer_shard.part.name == "layers.1.feed_forward.down.weight":
                optimizer_shard.gradient.mul_(2)

    return verdict(rank, run, Unit, "finish_reduction", wrong)


def with_the_rounding_of_few_bits(rank: int, run: Run) -> dict[str, Any] | None:
    """Matmuls as if there were four bits less."""
    right = Linear.forward

    def coarse(self: Linear, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        return y + (y.detach().to(torch.float8_e4m3fn).to(y.dtype) - y.detach())

    return verdict(rank, run, Linear, "forward", coarse)


def with_an_update_left_out_by_one_rank(rank: int, run: Run) -> dict[str, Any] | None:
    """The second one, so that gradients hardly tell."""
    right, calls = Optimizer.step, count()

    def wrong(self: Optimizer, *arguments: Any) -> None:
        if (next(calls), rank) != (1, 1):
            right(self, *arguments)

    return verdict(rank, run, Optimizer, "step", wrong)


def _hop_by_hop(rows: torch.Tensor) -> torch.Tensor:
    """Each rank adds its own to what came and passes that on, in the precision of the message."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def with_sums_as_nccl_rounds_them(rank: int, run: Run, leaves_out: int = 0) -> dict[str, Any] | None:
    """`leaves_out`: how many ranks a sum forgets."""

    def ring(rows: torch.Tensor) -> torch.Tensor:
        return _hop_by_hop(rows[leaves_out:])

    with planted(shm_collectives, "sum_rows", ring):
        return verdict(rank, run, collectives, "sum_rows", ring)
