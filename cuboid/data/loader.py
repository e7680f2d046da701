"""The micro-batches of one data-parallel replica at one step."""

from __future__ import annotations

import torch

from cuboid.data.order import sample_at
from cuboid.data.source import Source
from cuboid.parallel.pipeline import MicroBatch
from cuboid.spec.run import Run


def micro_batches(source: Source, run: Run, step: int, replica: int, device: torch.device) -> list[MicroBatch]:
    """Replica r takes the r-th run of consecutive positions in the global batch."""
    share = run.training.global_batch // run.layout.dp
    first = step * run.training.global_batch + replica * share
    samples = [source.sample(sample_at(first + place, source.size, run.training.seed)) for place in range(share)]
    width = run.layout.micro_batch
    batches = []
    for start in range(0, share, width):
        tokens, labels = zip(*samples[start : start + width], strict=True)
        batches.append(MicroBatch(torch.stack(tokens).to(device), torch.stack(labels).to(device)))
    return batches
