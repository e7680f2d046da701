"""Resume where a run stopped: the newest state that verifies, in memory or on disk, into whatever layout it has now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuboid.checkpoint.folder import checkpoints, step_of, sweep
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, Manifest, Place, StoredFile
from cuboid.checkpoint.memory.nodes import Generation
from cuboid.checkpoint.memory.restore import Lost, MemoryRestore
from cuboid.checkpoint.save import Damaged, agree, load
from cuboid.checkpoint.shards import Wishes
from cuboid.checkpoint.state import Moments, generators, state_to_load
from cuboid.checkpoint.verify import check_file, check_index, verify
from cuboid.console import say
from cuboid.data.opened import same_data
from cuboid.errors import UserError
from cuboid.parallel.coordination import Coordination
from cuboid.parallel.parallelize import Engine, draw_weights
from cuboid.telemetry.heartbeat import HEARTBEAT


def resume(
    engine: Engine,
    optimizer: Moments,
    folder: Place,
    group: Coordination,
    quiet: bool = False,
    in_memory: MemoryRestore | None = None,
) -> int:
    """Load the newest whole state, from memory or the folder; returns the steps it has done. Every rank calls this.

    One that has all the steps of the run is not loaded: there is nothing to continue with."""
    speaks, place = engine.groups.world.index == 0, locate(folder)
    if speaks:
        sweep(place)
    names = [path.name for path in checkpoints(place)] if speaks else []
    sources: list[Location | Generation] = [place / name for name in group.broadcast(names)]
    sources += reversed(in_memory.generations) if in_memory is not None else ()
    steps, spoiled = engine.run.training.steps, False
    wishes = Wishes(group, lambda: {**state_to_load(engine, optimizer), **generators(engine)})
    # The newest first; of the same step that in memory, which is read sooner.
    for source in sorted(sources, key=_step)[::-1]:
        try:
            if isinstance(source, Location):
                found, where = source, ""
                manifest, whole, to_check = look_together(source, group)
                if manifest.step >= steps:
                    agree(_damage(found, to_check), group)
                else:
                    index = wishes.part(whole)
            else:
                assert in_memory is not None
                brought = in_memory.bring(source, wishes, str(engine.run.layout))
                _require_same_data(engine, brought.manifest, group)
                found, manifest, index, to_check = brought.folder, brought.manifest, brought.index, None
                where = f" in memory ({brought.sent})" if brought.sent else " in memory"
            if manifest.step < steps:
                spoiled = True
                load(engine, optimizer, found, group, manifest, index, to_check)
        except (Lost, Damaged) as error:
            if speaks:
                say(str(error), as_warning=True)
            continue
        if speaks and not quiet:
            told = f"all {steps} steps are done" if manifest.step >= steps else f"resuming after step {manifest.step}"
            say(f"{told}{where}, written on {manifest.layout}")
        if in_memory is not None:
            in_memory.settle(manifest.step if where else None)
        return manifest.step
    if in_memory is not None:
        in_memory.settle(None)
    if spoiled:
        begin_anew(engine, optimizer)
    return 0


def begin_anew(engine: Engine, optimizer: Moments) -> None:
    """As if nothing had ever been loaded."""
    draw_weights(engine)
    for unit in engine.units:
        for optimizer_shard in unit.optimizer_shards():
            for kept in optimizer.state_of(optimizer_shard).values():
                kept.zero_()
    optimizer.set_steps_taken(0)
    optimizer.begin_average()
    if engine.loss_scale is not None:
        engine.loss_scale.restore([])
    if engine.balance is not None:
        engine.balance.restore([], 0)


def _require_same_data(engine: Engine, manifest: Manifest, group: Coordination) -> None:
    """Of a state in memory, about which nobody could ask before the ranks had met."""
    if not group.broadcast(group.rank > 0 or same_data(engine.run, manifest.data)):
        raise UserError(
            f"data.source={', '.join(engine.run.data.sources)} holds other samples than it did when the state "
            f"after step {manifest.step} was kept in memory; use the same data, another folder, or --overwrite"
        )


def _step(source: Location | Generation) -> int:
    return step_of(source) if isinstance(source, Location) else source.step


def look_together(checkpoint: Location, group: Coordination) -> tuple[Manifest, dict[str, Any], dict[str, StoredFile]]:
    """Everything but the contents of the data, which rank 0 alone looks at: the manifest without its files, the index
    (on rank 0), and the files whose contents this rank answers for; where the layout is the one that wrote them, its
    own. Or `Damaged`."""
    manifest, reason, index = None, "", dict[str, Any]()
    to_check_by_rank: list[dict[str, StoredFile]] = []
    if group.rank == 0:
        try:
            manifest = verify(checkpoint, contents=False)
            check_file(checkpoint, INDEX, manifest.files[INDEX])
            index = check_index(checkpoint, manifest.files)
            files = [(name, file) for name, file in manifest.files.items() if name != INDEX]
            to_check_by_rank = [dict(files[rank :: group.size]) for rank in range(group.size)]
            manifest = replace(manifest, files={})
        except UserError as error:
            manifest, reason = None, str(error)
    manifest, reason = group.broadcast((manifest, reason))
    if manifest is None:
        raise Damaged(reason)
    return manifest, index, group.scatter(to_check_by_rank)


def _damage(checkpoint: Location, to_check: dict[str, StoredFile]) -> str:
    try:
        for name, file in to_check.items():
            HEARTBEAT.do("reading")
            check_file(checkpoint, name, file)
    except UserError as error:
        return str(error)
    return ""
