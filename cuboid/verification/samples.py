"""Samples of a run, one at a time, as the reference of a proof computes with them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cuboid.data.corpus import Fields, Sample
from cuboid.data.source import Source
from cuboid.kernels.precision import wide
from cuboid.model.batch import IGNORED, Further, MicroBatch, further
from cuboid.model.custom import WholeModel
from cuboid.model.dropout import NUMBERS, token_keys
from cuboid.model.rope import PositionTable
from cuboid.model.transformer import Transformer, summed_loss
from cuboid.spec.run import Run


class Samples:
    """The summed loss and z-loss of one sample, those of prediction layers, and how many losses that is."""

    def __init__(
        self, run: Run, model: Transformer | WholeModel, source: Source, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._run, self._model, self._source = run, model, source
        self._dtype, self._device = dtype, device
        self._table = PositionTable(run.model, run.training.sequence, dtype, device)

    def counted(self, place: int) -> int:
        sample = self._source.at(place)
        if isinstance(self._model, WholeModel):
            return int(self._model.model.count(self._fields(sample)))
        assert not isinstance(sample, dict)
        return int((sample[1] != IGNORED).sum())

    def counted_further(self, place: int, length: int, depth: int) -> int:
        return int((self._further(place, length, depth).labels != IGNORED).sum())

    def _further(self, place: int, length: int, depth: int) -> Further:
        """What the prediction layer of some depth reads and predicts."""
        sample = self._source.at(place)
        assert not isinstance(sample, dict)
        tokens, labels = (each.unsqueeze(0) for each in sample)
        documents = self._source.documents_at(place).unsqueeze(0)
        return further(MicroBatch(tokens, labels, documents, length if length < tokens.shape[1] else 0), depth)

    def loss(self, place: int, length: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`length`: tokens after which the sample is cut."""
        sample = self._source.at(place)
        nothing = torch.zeros((), device=self._device)
        if isinstance(self._model, WholeModel):
            fields = {**self._fields(sample), NUMBERS: torch.tensor([place], device=self._device)}
            loss: Tensor = self._model(fields)
            return loss.to(wide(self._dtype)), nothing, []
        assert not isinstance(sample, dict)
        run = self._run
        whole = run.training.sequence
        ids = torch.zeros(1, whole, dtype=torch.int64)
        if run.data.uses_documents:
            ids = self._source.documents_at(place).unsqueeze(0)
        positions = self._table.of(torch.arange(whole), ids, run.data, length if length < whole else 0)
        if run.training.dropout:
            keys = token_keys(range(place, place + 1), torch.arange(whole, device=self._device))
            positions = replace(positions, dropout=keys)
        tokens, labels = (each.unsqueeze(0).to(self._device) for each in sample)
        x = self._model.hidden_states(tokens, positions)
        depths = range(1, run.model.prediction_layers + 1)
        found = [Further(*(each.to(self._device) for each in self._further(place, length, depth))) for depth in depths]
        others = self._model.prediction_losses(x, found, positions) if found else []
        if not run.training.z_loss:
            return self._model.head.loss(x, labels), nothing, others
        logits, labels = self._model.head(x), labels.flatten()
        counted = logits[labels != IGNORED].to(wide(self._dtype))
        return summed_loss(logits, labels), counted.logsumexp(1).square().sum(), others

    def _fields(self, sample: Sample | Fields) -> Fields:
        given = sample if isinstance(sample, dict) else dict(zip(("tokens", "labels"), sample, strict=True))
        fields = {name: value.unsqueeze(0).to(self._device) for name, value in given.items()}
        return {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in fields.items()}
