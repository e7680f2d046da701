"""Jobs that run on the ranks of the pool."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cuboid.islands.sync import Site
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.training.callbacks import Callback
from cuboid.training.trainer import Trainer
from cuboid.verification.compare import tensor_error
from cuboid.verification.islands import Simulation
from cuboid.verification.reference import reference_trace


def far_from_plain(rank: int, run: Run) -> float:
    """By how much a simulated island differs from a plain run after the last step."""
    run = replace(run, layout=Layout())
    island = Simulation([run])
    island.train()
    plain = reference_trace(replace(run, islands=IslandsSpec())).parameters[-1]
    return max(tensor_error(x, plain[name], 0.0) for name, x in island.parameters(0).items())


Waits = tuple[int, Run]
"""After which step, and for what other island."""


class Left(Exception):
    pass


class Paced(Callback):
    """Steps take a while, and after one of them the island is gone without a word, or tells of it, or waits for what
    another one tells."""

    def __init__(self, seconds: float, last: int, tells: int, waits_for: Waits | None) -> None:
        self._seconds, self._last, self._tells = seconds, last, tells
        self._waits, self._told = (waits_for[0], told_by(waits_for[1])) if waits_for else (0, Path())

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        time.sleep(self._seconds)
        if step >= self._tells > 0:
            tell(trainer.run)
        while step >= self._waits > 0 and not self._told.exists():
            time.sleep(0.02)
        if step == self._last:
            raise Left


def tell(run: Run) -> None:
    told_by(run).touch()


def told_by(run: Run) -> Path:
    return Path(f"{run.output.folder}-told")


def trained(
    rank: int,
    run: Run,
    site: Site,
    pace: float = 0.0,
    last: int = 0,
    back: float = 0.0,
    tells: int = 0,
    waits_for: Waits | None = None,
    together: int = 0,
) -> dict[str, Any]:
    """`last`: the step after which the island is gone; `back`: so many seconds later it is there as a new one. `tells`:
    the step after which it tells who waits for it; one that is gone does so too. `together`: islands that
    begin at once, however long each needs to get there."""
    folder = Path(run.output.folder).parent
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    if together:
        (folder / f"ready-{site.number}").touch()
    while len(list(folder.glob("ready-*"))) < together:
        time.sleep(0.02)
    trainer = Trainer(run, rank, torch.device("cpu"), quiet=True, site=site)
    assert trainer.rounds is not None
    batches: list[int] = []
    begun: list[int] = []
    plain = trainer.rounds.next_batch

    def noted(step: int) -> tuple[int, ...]:
        taken = plain(step)
        batches.extend(taken)
        begun.append(step)
        return taken

    trainer.rounds.next_batch = noted  # type: ignore[method-assign]
    trainer.callbacks.append(Paced(pace, last, tells, waits_for))
    try:
        trainer.train()
    except Left:
        tell(run)
        if back:
            time.sleep(back)
            again = trained(
                rank, replace(run, output=replace(run.output, folder=f"{run.output.folder}-again")), site, pace
            )
            return {**again, "lost": batches}
    outer = trainer.rounds.islands.outer
    weights = {shard.part.name: shard.master.clone() for shard in trainer.optimizer.optimizer_shards}
    state = [outer[each].weights.clone() for each in range(run.islands.fragments)]
    return {"batches": batches, "steps": begun, "loss": trainer.loss, "weights": weights, "outer": state}
