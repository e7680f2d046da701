"""Copies: what the layout keeps on several ranks under one name has the same bits on all of them, and the weights that
a pass computes with are those of the optimizer's shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Segment
from cuboid.parallel.zero import Unit
from cuboid.training.checks.check import CheckDefaults, found_by_all, sampled_places, wrap
from cuboid.training.checks.hypotheses import DRIFTED
from cuboid.training.checks.located import Located, module_of
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations

Run = Callable[[Tensor, RankBatch], Tensor]


class Copies(CheckDefaults):
    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._before: set[str] = set()
        """What differed when the step began."""
        self._sampled_step: SampledStep | None = None
        self._seen: dict[str, list[tuple[str, Tensor]]] = {}
        """By unit: for each shard, whether its sampled weights differ from those that the pass computes with."""
        self._alone: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    def begin(self, sampled: SampledStep) -> None:
        self._seen, self._sampled_step = {}, sampled
        # Copies that differ before the step are not an error of this step.
        there = deviations(self._engine, self._optimizer) if sampled.covers_all else []
        self._before = {each.name for each in there}
        for stage in self._engine.pipeline.stages.values():
            for segment in stage.segments:
                self._undo.append(wrap(segment, "run", partial(self._run, segment, segment.run)))

    def _run(
        self, segment: Segment, plain: Callable[[Tensor, RankBatch], Tensor], x: Tensor, batch: RankBatch
    ) -> Tensor:
        for unit in segment.units:
            if (
                unit.name not in self._seen
                and unit.gathers_exactly
                and self._sampled_step is not None
                and self._sampled_step.includes(unit)
            ):
                self._seen[unit.name] = list(_others(unit))
        return plain(x, batch)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        found, rank = [], engine.groups.world.index
        seen = [each for shards in self._seen.values() for each in shards]
        wrong = torch.stack([differ for _, differ in seen]).tolist() if seen else []
        for (name, _), differs in zip(seen, wrong, strict=True):
            if differs:
                cause = "weights that were gathered are not those that the shards keep: stale by one step, or of others"
                found.append(Located(name, module_of(name), "weights", step, None, rank, 1.0, 0.0, cause))
        found = found_by_all(engine, found)
        includes = None if self._sampled_step is None else self._sampled_step.includes
        for each in deviations(engine, optimizer, includes, self._alone):
            module = module_of(each.name.partition(" ")[0])
            cause, where = f"{DRIFTED}: {each}", "weights" if each.name in self._before else "update"
            found.append(Located(each.name, module, where, step, None, each.ranks[0], 1.0, 0.0, cause))  # type: ignore[arg-type]
        return found


def _others(unit: Unit) -> list[tuple[str, Tensor]]:
    found = []
    for shard in unit.optimizer_shards():
        kept = shard.kept if shard.weight is None else shard.weight
        used = unit.parameters[shard.part.name].detach().flatten()
        places = [sampled_places(shard.stop - shard.start, x.device) for x in (used, kept)]
        differ = used[places[0] + shard.start] != kept.flatten()[places[1]].to(used.device)
        found.append((shard.part.name, differ.any()))
    return found
