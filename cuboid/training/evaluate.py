"""The loss on held-out data: every rank calls it, every rank gets the same number."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cuboid.model.batch import MicroBatch
from cuboid.parallel.collectives import all_reduce
from cuboid.parallel.parallelize import Engine


def evaluate(
    engine: Engine, batches: Iterable[list[MicroBatch]], stops: Callable[[], bool] = lambda: False
) -> float | None:
    """Sum of token losses / labelled tokens, over all batches and replicas; no state changes. None if `stops`, asked
    after each batch and of the same mind on all ranks, cut it short."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    tokens = torch.zeros((), dtype=torch.float64, device=engine.device)
    for micro_batches in batches:
        shares = [engine.batches.of(batch) for batch in micro_batches]
        summed = engine.pipeline.evaluate(shares)
        if engine.holds_loss:
            loss += summed
            tokens += sum(int(share.counted) for share in shares)
        if stops():
            return None
    total, count = all_reduce(torch.stack((loss, tokens)), engine.groups.world).tolist()
    if engine.ledger is not None:
        engine.ledger.take()  # what it exchanged is no part of a step
    return total / count if count else float("nan")
