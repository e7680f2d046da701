"""Go on where a run stopped: the newest state that verifies, in memory or on disk, into whatever layout it has now."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.folder import checkpoints, step_of, sweep
from cuboid.checkpoint.index import check_index
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, Manifest, Place, StoredFile
from cuboid.checkpoint.memory.copies import Generation
from cuboid.checkpoint.memory.recall import Lost, Recall
from cuboid.checkpoint.save import Damaged, agree, load
from cuboid.checkpoint.state import Moments
from cuboid.checkpoint.verify import check_file, verify
from cuboid.errors import UserError
from cuboid.parallel.apply import Engine, draw_weights
from cuboid.resilience.pulse import PULSE
from cuboid.say import say


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
    steps, spoiled = engine.run.training.steps, False
    # The newest first; of the same step that in memory, which is read sooner.
    for source in sorted(sources, key=_step)[::-1]:
        try:
            if isinstance(source, Location):
                found, (manifest, index), where = source, _look_together(source, speaks, group), ""
                share = _share(manifest)
                if manifest.step >= steps:
                    agree(_damage(found, share), group)
            else:
                assert recall is not None
                brought = recall.bring(source, engine, optimizer)
                found, manifest, index, share = brought.folder, brought.manifest, brought.index, None
                where = f" in memory ({brought.sent})" if brought.sent else " in memory"
            if manifest.step < steps:
                spoiled = True
                load(engine, optimizer, found, group, index, share)
        except (Lost, Damaged) as error:
            if speaks:
                say(str(error), as_warning=True)
            continue
        if speaks and not quiet:
            told = f"all {steps} steps are done" if manifest.step >= steps else f"resuming after step {manifest.step}"
            say(f"{told}{where}, written on {manifest.layout}")
        if recall is not None:
            recall.settle(manifest.step if where else None)
        return manifest.step
    if recall is not None:
        recall.settle(None)
    if spoiled:
        begin_anew(engine, optimizer)
    return 0


def begin_anew(engine: Engine, optimizer: Moments) -> None:
    """As if nothing had ever been loaded."""
    draw_weights(engine)
    for unit in engine.units:
        for piece in unit.pieces():
            for moment in optimizer.moments(piece):
                moment.zero_()
    optimizer.set_steps_taken(0)
    if engine.loss_scale is not None:
        engine.loss_scale.restore([])


def _step(source: Location | Generation) -> int:
    return step_of(source) if isinstance(source, Location) else source.step


def _from_first(found: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 found, on all ranks: a folder may look different to each while somebody writes in it."""
    answer = [found]
    if dist.is_initialized():
        with PULSE.everybody().joined("agreement"):
            dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def _look_together(
    checkpoint: Location, speaks: bool, group: dist.ProcessGroup | None
) -> tuple[Manifest, dict[str, Any]]:
    """Everything but the contents of the data: manifest and index on all ranks, or `Damaged`."""
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
    try:
        check_file(checkpoint, INDEX, manifest.files[INDEX])
        index = check_index(checkpoint)
    except UserError as error:
        reason = str(error)
    agree(reason, group)
    return manifest, index


def _share(manifest: Manifest) -> dict[str, StoredFile]:
    """The files that this rank answers for; where the layout is the one that wrote them, its own."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {name: manifest.files[name] for name in [name for name in manifest.files if name != INDEX][rank::ranks]}


def _damage(checkpoint: Location, share: dict[str, StoredFile]) -> str:
    try:
        for name, file in share.items():
            PULSE.do("reading")
            check_file(checkpoint, name, file)
    except UserError as error:
        return str(error)
    return ""
