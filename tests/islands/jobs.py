"""Jobs that run on the ranks of the pool."""

from __future__ import annotations

from dataclasses import replace

from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.verification.compare import tensor_error
from cuboid.verification.islands import Simulation
from cuboid.verification.reference import reference_trace


def far_from_plain(rank: int, run: Run) -> float:
    """By how much a simulated island differs from a plain run after the last step."""
    run = replace(run, layout=Layout())
    island = Simulation(run, 1)
    island.train()
    plain = reference_trace(replace(run, islands=IslandsSpec())).parameters[-1]
    return max(tensor_error(x, plain[name], 0.0) for name, x in island.parameters(0).items())
