"""The micro-batches of one data-parallel replica: those of a training step, and those of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cuboid.data.assignment import Assignment, assignment
from cuboid.data.corpus import Fields
from cuboid.data.source import Source, check_whole
from cuboid.kernels.pinned_memory import to_device
from cuboid.model.batch import MicroBatch
from cuboid.spec.run import Run
from cuboid.spec.training import Batch


def micro_batches(source: Source, run: Run, batch: Batch, replica: int, device: torch.device) -> list[MicroBatch]:
    """Of a training step; batches that were omitted are counted too."""
    return _micro_batches(source, run, run.training.places(batch), replica, device, _cut(run, batch))


def assigned(source: Source, run: Run, batch: Batch) -> Assignment | None:
    """How the sequences of a training step are assigned; None: in their order."""
    if run.data.assignment == "order":
        return None
    return assignment(source, run, run.training.places(batch), _cut(run, batch))


def _cut(run: Run, batch: Batch) -> int:
    """Islands, which take parts of batches, cut nothing."""
    length = run.training.lengths.at(batch) if isinstance(batch, int) else run.training.sequence
    return length if length < run.training.sequence else 0


def _micro_batches(
    source: Source, run: Run, places: Sequence[int], replica: int, device: torch.device, cut: int = 0
) -> list[MicroBatch]:
    """Of positions in the global order. In this order, each replica takes a run of them."""
    check_whole(source)  # once for all of them: on a shared file system it takes longer than to read
    wanted, width = run.layout.sequences_of(replica, len(places)), run.layout.micro_batch_of(replica)
    taken: Sequence[Sequence[int]] = [places[at : at + width] for at in wanted[::width]]
    if run.data.assignment == "work":
        taken = assignment(source, run, places, cut).replicas[replica]
    batches = []
    for own in taken:
        samples = [source.at(place) for place in own]
        if isinstance(samples[0], dict):
            batches.append(_own_batch([sample for sample in samples if isinstance(sample, dict)], device, own))
            continue
        tokens, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
        documents = torch.zeros(tokens.shape, dtype=torch.int64) if cut else None
        if run.data.uses_documents or run.model.prediction_layers:
            documents = torch.stack([source.documents_at(place) for place in own])
        batches.append(MicroBatch(to_device(tokens, device), to_device(labels, device), documents, cut, None, own))
    return batches


def _own_batch(samples: list[Fields], device: torch.device, places: Sequence[int]) -> MicroBatch:
    fields = {name: to_device(torch.stack([sample[name] for sample in samples]), device) for name in samples[0]}
    tokens = fields.get("tokens", next(iter(fields.values())))
    return MicroBatch(tokens, fields.get("labels", tokens), fields=fields, numbers=places)


def evaluation_batches(
    source: Source, length: int, run: Run, replica: int, device: torch.device
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of this replica, one global batch after another: the same on every call, whatever the layout.

    `source` and `length` come from `make_validation_source`. No sample comes twice: what the last global batch has too
    many counts for nothing, so that the sum of losses over tokens with labels is exact."""
    size = run.training.global_batch
    for batch in range(min(run.evaluation.batches, -(-length // size))):
        yield _micro_batches(source, run, range(batch * size, (batch + 1) * size), replica, device)
