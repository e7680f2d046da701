"""Copies: what several ranks keep under one name has the same bits, whatever the layout makes equal."""

from __future__ import annotations

from cuboid.parallel.parallelize import Engine
from cuboid.training.checks.check import Looks
from cuboid.training.checks.words import Located, module_of
from cuboid.training.optimizer import Optimizer
from cuboid.training.replicas import deviations


class Copies(Looks):
    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        found = []
        for each in deviations(engine, optimizer):
            cause = f"copies differ: {each}"
            module = module_of(each.name.partition(" ")[0])
            found.append(Located(each.name, module, "update", step, None, each.ranks[0], 1.0, 0.0, cause))
        return found
