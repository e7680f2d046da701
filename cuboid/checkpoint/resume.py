"""Go on where a run stopped: the newest checkpoint that verifies, into whatever layout the run has now."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.folder import checkpoints, sweep
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import Manifest, Place
from cuboid.checkpoint.save import load
from cuboid.checkpoint.state import Moments
from cuboid.checkpoint.verify import check_file, verify
from cuboid.errors import UserError
from cuboid.parallel.apply import Engine
from cuboid.say import say


def resume(
    engine: Engine, optimizer: Moments, folder: Place, group: dist.ProcessGroup | None = None, quiet: bool = False
) -> int:
    """Load the newest whole checkpoint of the folder; returns the steps it has done. Every rank calls this.

    One that has all the steps of the run is not loaded: there is nothing to go on with."""
    speaks, place = engine.groups.world.index == 0, locate(folder)
    if speaks:
        sweep(place)
    names = [path.name for path in reversed(checkpoints(place))] if speaks else []
    for name in _from_first(names, group):
        manifest, reason = _verify_together(place / name, speaks, group)
        if manifest is None:
            if speaks:
                say(reason, as_warning=True)
            continue
        steps = engine.run.training.steps
        if manifest.step < steps:
            load(engine, optimizer, place / name, group)
        if speaks and not quiet:
            done = f"all {steps} steps are done" if manifest.step >= steps else f"resuming after step {manifest.step}"
            say(f"{done}, written on {manifest.layout}")
        return manifest.step
    return 0


def _from_first(found: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 found, on all ranks: a folder may look different to each while somebody writes in it."""
    answer = [found]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def _verify_together(
    checkpoint: Location, speaks: bool, group: dist.ProcessGroup | None
) -> tuple[Manifest | None, str]:
    """Every rank reads its share of the files, which then lie in its machine's memory for loading; all ranks get the
    same answer: the manifest, or why the checkpoint is damaged."""
    found: tuple[Manifest | None, str] = (None, "")
    if speaks:
        try:
            found = (verify(checkpoint, contents=False), "")
        except UserError as error:
            found = (None, str(error))
    manifest, reason = _from_first(found, group)
    if manifest is None:
        return None, reason
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        for name in list(manifest.files)[rank::ranks]:
            check_file(checkpoint, name, manifest.files[name])
        if speaks:
            check_index(checkpoint)
    except UserError as error:
        reason = str(error)
    reasons = [reason]
    if ranks > 1:
        reasons = [""] * ranks
        dist.all_gather_object(reasons, reason, group=group)
    reason = next(filter(None, reasons), "")
    return (None if reason else manifest), reason
