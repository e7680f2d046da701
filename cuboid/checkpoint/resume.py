"""Go on where a run stopped: the newest state that verifies, in memory or on disk, into whatever layout it has now."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.folder import checkpoints, step_of, sweep
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import Manifest, Place
from cuboid.checkpoint.memory.copies import Generation
from cuboid.checkpoint.memory.recall import Lost, Recall
from cuboid.checkpoint.save import load
from cuboid.checkpoint.state import Moments
from cuboid.checkpoint.verify import check_file, verify
from cuboid.errors import UserError
from cuboid.parallel.apply import Engine
from cuboid.resilience.pulse import PULSE
from cuboid.say import say


class Damaged(Exception):
    """A checkpoint cannot be used, as all ranks know; says why."""


def resume(
    engine: Engine,
    optimizer: Moments,
    folder: Place,
    group: dist.ProcessGroup | None = None,
    quiet: bool = False,
    recall: Recall | None = None,
) -> int:
    """Load the newest whole state, from memory or the folder; returns the steps it has done. Every rank calls this.

    One that has all the steps of the run is not loaded: there is nothing to go on with."""
    speaks, place = engine.groups.world.index == 0, locate(folder)
    if speaks:
        sweep(place)
    names = [path.name for path in checkpoints(place)] if speaks else []
    sources: list[Location | Generation] = [place / name for name in _from_first(names, group)]
    sources += reversed(recall.generations) if recall is not None else ()
    # The newest first; of the same step that in memory, which is read sooner.
    for source in sorted(sources, key=_step)[::-1]:
        try:
            if isinstance(source, Location):
                found, (manifest, index), where = source, _verify_together(source, speaks, group), ""
            else:
                assert recall is not None
                brought = recall.bring(source, engine, optimizer)
                found, manifest, index = brought.folder, brought.manifest, brought.index
                where = f" in memory ({brought.sent})" if brought.sent else " in memory"
        except (Lost, Damaged) as error:
            if speaks:
                say(str(error), as_warning=True)
            continue
        steps = engine.run.training.steps
        if manifest.step < steps:
            load(engine, optimizer, found, group, index)
        if speaks and not quiet:
            told = f"all {steps} steps are done" if manifest.step >= steps else f"resuming after step {manifest.step}"
            say(f"{told}{where}, written on {manifest.layout}")
        if recall is not None:
            recall.settle(manifest.step if where else None)
        return manifest.step
    if recall is not None:
        recall.settle(None)
    return 0


def _step(source: Location | Generation) -> int:
    return step_of(source) if isinstance(source, Location) else source.step


def _from_first(found: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 found, on all ranks: a folder may look different to each while somebody writes in it."""
    answer = [found]
    if dist.is_initialized():
        with PULSE.everybody().joined("agreement"):
            dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def _verify_together(
    checkpoint: Location, speaks: bool, group: dist.ProcessGroup | None
) -> tuple[Manifest, dict[str, Any]]:
    """Every rank reads its share of the files, which then lie in its machine's memory for loading; all ranks get the
    same answer: manifest and index, or why the checkpoint is damaged, as `Damaged`."""
    found: tuple[Manifest | None, str] = (None, "")
    if speaks:
        try:
            found = (verify(checkpoint, contents=False), "")
        except UserError as error:
            found = (None, str(error))
    manifest, reason = _from_first(found, group)
    if manifest is None:
        raise Damaged(reason)
    index: dict[str, Any] = {}
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        for name in list(manifest.files)[rank::ranks]:
            PULSE.do("reading")
            check_file(checkpoint, name, manifest.files[name])
        index = check_index(checkpoint)
    except UserError as error:
        reason = str(error)
    reasons = [reason]
    if ranks > 1:
        reasons = [""] * ranks
        with PULSE.everybody().joined("agreement"):
            dist.all_gather_object(reasons, reason, group=group)
    if reason := next(filter(None, reasons), ""):
        raise Damaged(reason)
    return manifest, index
