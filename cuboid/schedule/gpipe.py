"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is in flight at the turn."""

from __future__ import annotations

from cuboid.schedule.table import Action, Kind


def gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [
        [Action(kind, rank, batch) for kind in (Kind.FORWARD, Kind.BACKWARD) for batch in range(micro_batches)]
        for rank in range(ranks)
    ]
