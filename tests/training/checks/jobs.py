"""Short trainings with a bug of the catalogue in them, whose checks look for it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.parallel.device import joined_device
from cuboid.spec.checks import ChecksSpec
from cuboid.spec.run import OutputSpec, Run
from cuboid.telemetry.rows import metric_rows
from cuboid.training.checks.replay import Replay
from cuboid.training.step import StepResult
from cuboid.training.trainer import train
from tests.verification.bugs import catalogue
from tests.verification.bugs.bug import CATALOGUE, Patches

assert catalogue.FILES  # which enter all bugs


def checked(run: Run, steps: int, **settings: Any) -> Run:
    """The run of a proof as a training whose steps are checked."""
    settings = {"every": 10} | settings
    learning_rate = replace(run.learning_rate, warmup_steps=0)
    training = replace(run.training, steps=steps)
    return replace(run, training=training, learning_rate=learning_rate, checks=ChecksSpec(**settings))


def warnings_of(rank: int, run: Run, bug: str = "", ends: bool = False) -> list[dict[str, Any]]:
    """What a training warned of, each with its step; on rank 0. `ends`: it may stop because something is wrong."""
    patches = Patches(rank, run)
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, output=OutputSpec(folder=folder, health=False, count_communication=True))
        if bug:
            CATALOGUE[bug].install(patches)
            plain = Replay.see_gradients

            def see(self: Replay, result: StepResult) -> None:
                # As for `verify`: the bug is in what ranks compute, and not in what that is compared with.
                with patches.suspended():
                    plain(self, result)

            patches.put(Replay, "see_gradients", see)
        try:
            train(run, rank, joined_device(run.training.device), quiet=True)
        except UserError as error:
            if not ends or "check:" not in str(error):
                raise
        finally:
            patches.undo()
        rows = metric_rows(Path(folder) / "metrics.jsonl") if rank == 0 else []
    return [{**warning, "step": row["step"]} for row in rows for warning in row.get("warnings", ())]


def first_warning_of(rank: int, run: Run, bug: str = "") -> list[dict[str, Any]]:
    """The same, of a training that ends with it."""
    return warnings_of(rank, replace(run, checks=replace(run.checks, wrong="stop")), bug, ends=True)
