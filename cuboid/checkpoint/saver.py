"""Saves to disk while the training continues."""

from __future__ import annotations

from contextlib import suppress

from cuboid.checkpoint.background import BackgroundSaver
from cuboid.checkpoint.folder import checkpoint_path, prune, sweep
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest
from cuboid.checkpoint.save import GivenUp, gather_index, kept_state, write
from cuboid.checkpoint.staging import Staging
from cuboid.checkpoint.state import Moments
from cuboid.console import say
from cuboid.parallel.coordination import Coordination
from cuboid.parallel.parallelize import Engine


class Saver(BackgroundSaver):
    """The training waits for a save that takes longer than the steps between two."""

    def __init__(self, engine: Engine, optimizer: Moments, folder: Location, group: Coordination) -> None:
        super().__init__(engine, optimizer, group)
        self._folder = folder
        self._own = Staging(kept_state(engine, optimizer), engine.device)
        self._bytes = self._sum_of_all(self._own.content.nbytes)
        self._index = gather_index(self._own, group)

    def _is_ready(self) -> bool:
        if self._in_flight and self._rank == 0:
            say(f"the training waits for the checkpoint after step {self._step} to be written", as_warning=True)
        return self._settle()

    @property
    def _hindrance(self) -> str:
        return f"that after step {self._step} is not written {self._deadline}"

    def _place_for(self, kept_before: bool) -> Staging:
        return self._own

    def _keep(self, staging: Staging, manifest: Manifest) -> str:
        target = checkpoint_path(self._folder, manifest.step)
        try:
            write(staging, target, manifest, self._index, self._group)
        except GivenUp:  # on all ranks
            if self._rank == 0:
                with suppress(OSError):  # no rank writes any more, and a full disk needs the room
                    sweep(self._folder)
            raise
        if self._rank == 0:
            try:
                prune(self._folder, self._spec.keep, self._spec.keep_every, newest=target)
            except OSError as error:
                return f"old checkpoints stay in {self._folder}: {error}"
        return ""
