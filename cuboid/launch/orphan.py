"""A rank process ends with the process that asked for it, however that one ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """Called by a rank process as it begins. Its parent in the system is the fork server, which lives as long as any
    rank does, so nothing else would end a rank whose launcher was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too; it has nothing to say about it
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
