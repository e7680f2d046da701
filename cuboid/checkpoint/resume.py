"""Go on where a run stopped: the newest checkpoint that verifies, into whatever layout the run has now."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.folder import newest_whole, sweep
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.save import load
from cuboid.checkpoint.state import Moments
from cuboid.parallel.apply import Engine


def resume(engine: Engine, optimizer: Moments, folder: Location, quiet: bool = False) -> int:
    """Load the newest whole checkpoint of the folder; returns the steps it has done. Every rank calls this."""
    world = engine.groups.world
    answer: list[Any] = [None]
    if world.index == 0:
        sweep(folder)
        path, manifest, damaged = newest_whole(folder)
        for sentence in damaged:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        answer = [(path and path.name, manifest)]
    if world.handle is not None:
        dist.broadcast_object_list(answer, src=0)
    name, manifest = answer[0]
    if name is None or manifest is None:
        return 0
    load(engine, optimizer, folder / name, manifest.updates)
    if world.index == 0 and not quiet:
        print(f"resuming after step {manifest.step}, written on {manifest.layout}", flush=True)
    return int(manifest.step)
