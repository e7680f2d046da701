"""Data: each micro-batch has the samples of its place in the global order, on every rank that computes with it, and
over all replicas every sample comes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import Source
from cuboid.model.batch import IGNORED, MicroBatch
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.spec.ranks import coordinates
from cuboid.spec.sharding import places_of
from cuboid.spec.training import Batch
from cuboid.training.checks.check import found_by_all, wrap
from cuboid.training.checks.gather_rows import RowGather
from cuboid.training.checks.hypotheses import UNKNOWN
from cuboid.training.checks.located import Located
from cuboid.training.checks.passes import Current
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult


class Data:
    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine, self._source = engine, source
        self._current, self._row_gather = Current(), RowGather(engine)
        self._numbers: list[int] = []
        self._used: dict[tuple[str, int], Tensor] = {}
        """Tokens that are embedded and labels that are predicted, by micro-batch."""
        self._undo: list[Callable[[], None]] = []
        self._batch: Batch = 0

    def begin(self, sampled: SampledStep) -> None:
        engine = self._engine
        self._numbers, self._used, self._batch = [], {}, engine.course.batch(sampled.step - 1)
        self._undo += self._current.attach(engine)
        of = engine.batches.of

        def made(batch: MicroBatch, *more: Any) -> RankBatch:
            self._numbers += list(batch.numbers or ())
            return of(batch, *more)

        self._undo.append(wrap(engine.batches, "of", made))
        for stage in engine.pipeline.stages.values():
            for segment in stage.segments:
                if segment.name in ("embedding", "head"):
                    self._undo.append(wrap(segment, "run", partial(self._run, segment.name, segment.run)))

    def _run(self, name: str, plain: Callable[[Tensor, RankBatch], Tensor], x: Tensor, batch: RankBatch) -> Tensor:
        used = batch.tokens if name == "embedding" else batch.labels
        self._used.setdefault((name, self._current()), used)
        return plain(x, batch)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def see_gradients(self, result: StepResult) -> None:
        """Nothing."""

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        if engine.run.islands.count > 1:  # batches come from the other islands then
            return []
        numbers = torch.tensor(self._numbers, dtype=torch.float64)
        row = torch.stack((torch.tensor(len(self._numbers)), numbers.sum(), numbers.square().sum())).double()
        gathered = self._row_gather.gather({"numbers": row}, 3)
        numbers_of = [rows["numbers"] for rows in gathered]
        return found_by_all(engine, [*self._wrong_samples(step), *self._wrong_numbers(numbers_of, step)])

    def _wrong_samples(self, step: int) -> Iterator[Located]:
        run, here = self._engine.run, self._engine.groups.coordinates
        expected = self._expected(here.dp)
        for (name, index), used in sorted(self._used.items(), key=lambda item: item[0][1]):
            field = "tokens" if name == "embedding" else "labels"
            if index < len(expected) and torch.equal(used.cpu(), expected[index][field]):
                continue
            cause = self._where(field, index, used.cpu(), expected)
            place = step, index + 1, self._engine.groups.world.index
            where = "forward" if name == "embedding" else "loss"
            yield Located(field, name, where, *place, 1.0, 0.0, cause)  # type: ignore[arg-type]
            return
        if not self._used and run.layout.pp == 1:
            yield Located("tokens", "embedding", "forward", step, None, None, 1.0, 0.0, "no micro-batch was computed")

    def _where(self, field: str, index: int, used: Tensor, expected: list[dict[str, Tensor]]) -> str:
        for other, own in enumerate(expected):
            if other != index and torch.equal(used, own[field]):
                return f"it is that of micro-batch {other + 1}: repeated, or out of order"
        for replica in range(self._engine.run.layout.dp):
            if replica != self._engine.groups.coordinates.dp:
                for other, own in enumerate(self._expected(replica)):
                    if torch.equal(used, own[field]):
                        return f"it is micro-batch {other + 1} of dp rank {replica}: ranks see the same data"
        if field == "tokens":
            return UNKNOWN
        after, labels = expected[index]["tokens"][:, 1:], used[:, :-1]
        if torch.equal(labels.where(labels != IGNORED, after), after):
            return "labels are the next of the tokens that this rank holds: shifted after the split of the sequence"
        return f"{UNKNOWN}; labels of other tokens, or others"

    def _expected(self, replica: int) -> list[dict[str, Tensor]]:
        """As this rank should see the micro-batches of a replica: its chunks of every sequence."""
        engine, cp = self._engine, self._engine.run.layout.cp
        found = []
        for batch in micro_batches(self._source, engine.run, self._batch, replica, torch.device("cpu")):
            both = {"tokens": batch.tokens, "labels": batch.labels}
            if cp > 1:
                parts = places_of(engine.groups.coordinates.cp, cp, batch.tokens.shape[1])
                places = torch.cat([torch.arange(part.start, part.stop) for part in parts])
                both = {name: x[:, places] for name, x in both.items()}
            found.append(both)
        return found

    def _wrong_numbers(self, rows: list[Tensor], step: int) -> Iterator[Located]:
        """Counts, sums and sums of squares of the places in the global order."""
        run = self._engine.run
        every = torch.tensor(run.training.places(self._batch), dtype=torch.float64)
        right = torch.stack((torch.tensor(float(len(every))), every.sum(), every.square().sum())).double()
        places = [coordinates(rank, run.layout) for rank in range(len(rows))]
        total = sum(row for row, place in zip(rows, places, strict=True) if place.pp == place.cp == place.tp == 0)
        assert isinstance(total, Tensor)
        if bool(((total - right).abs() > 1e-9 * right.abs()).any()):
            cause = "samples are repeated or missing over dp: the replicas' batches are not the global one"
            yield Located("tokens", "embedding", "forward", step, None, None, 1.0, 0.0, cause)
