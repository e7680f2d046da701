"""A first rank of a node as its second watch sees it: `FOLDER DOES FLOOR SETUP`; it prints when it begins."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from pathlib import Path

from cuboid.resilience.second_watch import Looks, second_watch
from cuboid.telemetry.heartbeat import HEARTBEAT


def look(looks: Looks, watches: bool) -> None:
    while True:
        looks.count()
        if not watches:
            return
        time.sleep(0.1)


def main(folder: Path, does: str, floor: float, setup: float) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    HEARTBEAT.open(folder, 0)
    looks = Looks(folder)
    if does != "sets up":
        HEARTBEAT.enter("step", 8)
    threading.Thread(target=look, args=(looks, does != "trains"), daemon=True).start()
    with second_watch(folder, 0, floor, setup):
        print("begun", flush=True)
        if does == "keeps the lock":
            ctypes.PyDLL(None).sleep(600)
        while True:
            time.sleep(0.1)
            if does == "trains":
                HEARTBEAT.do("forward")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
