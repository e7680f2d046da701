"""DualPipeV: DualPipe cut in half, so that one copy of the model lies as a V over p ranks (DeepSeek 2025).

The eight steps and their counts are the published ones. In the middle a forward of one half is paired with a backward
of the other so that their communication can overlap; the pair is written here as forward, then whole backward. The
split backwards at both ends fill the bubble. A rank holds at most 2p + 1 half-size activations. The pattern needs 2p
micro-batches; for fewer it is made for 2p, and `make_schedule` drops those that do not exist.
"""

from __future__ import annotations

from cuboid.schedule.table import Action, Kind
from cuboid.schedule.zero_bubble import RankWriter


def dual_pipe_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [_rank_actions(rank, ranks, max(micro_batches, 2 * ranks)) for rank in range(ranks)]


def _rank_actions(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    write = RankWriter(rank, ranks)
    after = ranks - rank - 1  # ranks further down the V
    for _ in range(2 * after):  # step 1
        write.forward(0)
    for _ in range(rank + 1):  # step 2
        write.forward(0)
        write.forward(1)
    for _ in range(after):  # step 3
        write.split_backward(1)
        write.forward(1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):  # step 4, the steady state
        write.forward(0)
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for _ in range(after):  # step 5
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for number in range(2 * (rank + 1)):  # step 6: the second half of these backwards is split
        write.backward(1 - number % 2, Kind.INPUT if number > rank else Kind.BACKWARD)
    for _ in range(after):  # step 7
        write.weight()
        write.backward(0, Kind.INPUT)
    write.remaining_weights()  # step 8
    return write.actions
