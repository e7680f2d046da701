"""Go on where a run stopped: the newest checkpoint that verifies, into whatever layout the run has now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.folder import newest_whole
from cuboid.checkpoint.save import load
from cuboid.checkpoint.state import Moments
from cuboid.parallel.apply import Engine


def resume(engine: Engine, optimizer: Moments, folder: Path) -> int:
    """Load the newest whole checkpoint of the folder; returns the steps it has done. Every rank calls this."""
    world = engine.groups.world
    answer: list[Any] = [None]
    if world.index == 0:
        path, manifest, damaged = newest_whole(folder)
        for sentence in damaged:
            print(f"warning: {sentence}", flush=True)
        answer = [(path, manifest)]
    if world.handle is not None:
        dist.broadcast_object_list(answer, src=0)
    path, manifest = answer[0]
    if path is None or manifest is None:
        return 0
    load(engine, optimizer, path, manifest.updates)
    if world.index == 0:
        print(f"resuming after step {manifest.step}, written on {manifest.layout}", flush=True)
    return int(manifest.step)
