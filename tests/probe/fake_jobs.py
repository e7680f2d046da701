"""What compiled blocks of a tensor rank keep for their backward pass, beside others or with fake collectives in their
place."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run


def kept_by_blocks(rank: int, run: Run) -> list[tuple[int, ...]]:
    """The shapes, parameters among them."""
    device = torch.device("cpu")
    engine = build_engine(run, rank, device)
    batches = micro_batches(make_source(run), run, 0, engine.groups.coordinates.dp, device)
    share = engine.batches.of(batches[0])
    x = share.tokens
    for stage in engine.pipeline.stages.values():
        x = stage.forward(x, share)
    kept, seen, nodes = [], set(), [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if node.name().startswith("CompiledFunction"):
            kept += [tuple(tensor.shape) for tensor in node.saved_tensors]  # type: ignore[attr-defined]
    return sorted(kept)


def kept_alone(rank: int, run: Run) -> list[tuple[int, ...]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.layout.world_size)
    try:
        return kept_by_blocks(rank, run)
    finally:
        dist.destroy_process_group()
