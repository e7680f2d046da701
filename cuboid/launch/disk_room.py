"""Whether the disk of a run's folder takes what ranks write there. On a full one the first row ends them: ranks that
failed are not started again before there is room, so that no attempts are lost in vain."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from cuboid.console import say
from cuboid.spec.run import Run

LEAST = 1 << 16


class DiskRoom:
    """Asked again and again; says when it waits."""

    def __init__(self, run: Run) -> None:
        self._folder = Path(run.output.folder)
        self._said = False

    def __call__(self) -> bool:
        """Tried, because a quota or a reserve is known to nobody else."""
        place = self._folder / f".room.{os.getpid()}"
        try:
            # Logs are written anew when ranks start, without the rows of steps to be done again.
            needed = LEAST + sum(log.stat().st_size for log in self._folder.glob("*.jsonl"))
            with place.open("wb", buffering=0) as file:
                file.write(bytes(LEAST))
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._warn()
                return False
            # Anything else is told by who meets it: it will not pass by itself.
        finally:
            with suppress(OSError):
                place.unlink()
        self._said = False
        return True

    def _warn(self) -> None:
        if not self._said:
            say(f"the disk of output.folder={self._folder} is full; ranks start when there is room", as_warning=True)
        self._said = True
