"""A training from its first check to its end, as the command line and the Python interface start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cuboid.checkpoint.memory.folder import check_room
from cuboid.data.opened import check_data
from cuboid.launch.role import NodeOptions, take_role
from cuboid.launch.supervisor import check_machine
from cuboid.spec.run import Run
from cuboid.spec.supported import check_supported
from cuboid.training.claim import claimed
from cuboid.training.folder import checkpoint_folder, prepare_folder
from cuboid.training.trackers import check_trackers

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome


def train_run(
    run: Run,
    options: NodeOptions | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    conclude: Callable[[Outcome], None] = lambda outcome: None,
    announce: Callable[[str], None] = lambda past: None,
) -> Outcome:
    """What cannot work is refused before any process starts and anything is written. Of the processes of a job, those
    that speak for it check data and folder; `announce` is told there what the folder held, `conclude` how it ended."""
    check_supported(run)
    check_trackers(run)
    if run.profile.steps:  # read as torch is loaded, here and in ranks: the profiler says when it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    role = take_role(run, options or NodeOptions())
    check_machine(run, role.place)
    check_room(run, role.fewest_nodes)
    if not role.speaks:
        return role.train(quiet=quiet)
    check_data(run)
    if run.optimizer.is_own:
        from cuboid.training.own_optimizer import check_optimizer  # here, because it brings torch

        check_optimizer(run)
    notes = _check_start(run, overwrite)
    with claimed(Path(run.output.folder)):
        past = prepare_folder(run, overwrite)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        announce(past)
        outcome = role.train(quiet=quiet)
        conclude(outcome)
        return outcome


def _check_start(run: Run, overwrite: bool) -> list[str]:
    if run.samples.every:
        from cuboid.training.samples import prompts_of

        prompts_of(run)
    if not run.training.start_from:
        return []
    from cuboid.checkpoint.weights import check_start  # here, because it brings torch, for which others need not wait

    return check_start(run, checkpoint_folder(run), overwrite)
