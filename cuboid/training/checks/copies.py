"""Copies: what several ranks keep under one name has the same bits, whatever the layout makes equal; and the weights
that a pass computes with are those that the optimizer's shards keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Segment
from cuboid.parallel.zero import Unit
from cuboid.training.checks.check import Looks, from_all, sampled_places, wrap
from cuboid.training.checks.turns import Look
from cuboid.training.checks.words import DRIFTED, Located, module_of
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations

Run = Callable[[Tensor, RankBatch], Tensor]


class Copies(Looks):
    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._before: set[str] = set()
        """What differed when the step began."""
        self._look: Look | None = None
        self._seen: dict[str, list[tuple[str, Tensor]]] = {}
        """By unit: of each of its shards, whether sampled weights are others than those that are computed with."""
        self._alone: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    def begin(self, look: Look) -> None:
        self._seen, self._look = {}, look
        # Copies that differ when a step begins are not its doing.
        there = deviations(self._engine, self._optimizer) if look.is_whole else []
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
                and self._look is not None
                and self._look.sees(unit)
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
        found = from_all(engine, found)
        for each in deviations(engine, optimizer, None if self._look is None else self._look.sees, self._alone):
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
