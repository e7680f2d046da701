"""What NCCL communicators cost in memory of the GPU: the numbers `communicator_first`, `communicator` and
`communicator_link` of cost/data/engines.toml.

    python benchmarks/nccl_memory.py                      # needs a GPU; ranks share the first one
    python benchmarks/nccl_memory.py --sizes 2 4 --json

For 2, 4 and 8 ranks it makes one communicator after another, each used by an all-reduce, then pairs used by messages
alone, and reads after each how much memory of the whole card is free: the difference, divided by the ranks, is what
one costs a rank. The first is told apart, because with it NCCL loads itself. Ranks that share a card talk through
sockets, whose buffers lie in host memory: between GPUs with NVLink a communicator has more of them on the card, so
what this finds is the least that it costs."""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from cuboid.launch.backend import join_world

SIZES = (2, 4, 8)
REPEATED = 4
ELEMENTS = 1 << 20
"""Of what is summed or sent: enough for NCCL to use all channels that it would for a gradient."""


class Card:
    """Free memory of the card, read while no rank is making anything."""

    def __init__(self, store: Any, ranks: int) -> None:
        self._store, self._ranks, self._number = store, ranks, 0

    def free(self) -> int:
        torch.cuda.synchronize()
        self._meet()
        free = torch.cuda.mem_get_info()[0]
        self._meet()
        return free

    def _meet(self) -> None:
        self._number += 1
        if self._store.add(f"meet/{self._number}", 1) == self._ranks:
            self._store.set(f"met/{self._number}", "yes")
        self._store.wait([f"met/{self._number}"])


def measure(rank: int, ranks: int, path: str) -> None:
    """Writes MiB a rank from rank 0: of the first communicator, of the later ones, and of a pair for messages."""
    device = torch.device("cuda", 0)
    store: Any = dist.FileStore(f"{path}.store", ranks)  # type: ignore[attr-defined]
    join_world(store, rank, ranks, device, "nccl", timedelta(seconds=60))
    card, values = Card(dist.PrefixStore("card", store), ranks), torch.ones(ELEMENTS, device=device)  # type: ignore[attr-defined]
    free = [card.free()]
    for _ in range(REPEATED + 1):
        group = dist.new_group(list(range(ranks)))
        dist.all_reduce(values, group=group)
        free.append(card.free())
    linked = [free[-1]]
    for _ in range(REPEATED):
        for first in range(0, ranks, 2):  # every rank is in one pair a round
            pair = dist.new_group([first, first + 1])
            if rank in (first, first + 1):
                (dist.send, dist.recv)[rank - first](values, 2 * first + 1 - rank, group=pair)
        linked.append(card.free())
    if rank == 0:
        costs = [(before - after) / 2**20 / ranks for before, after in pairwise(free)]
        links = [(before - after) / 2**20 / ranks for before, after in pairwise(linked)]
        found = {"ranks": ranks, "first": costs[0], "communicator": fmean(costs[1:]), "link": fmean(links)}
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("nccl_memory needs a GPU, and this machine has none that torch can use")
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.sizes:
            path = f"{folder}/{ranks}.json"
            multiprocessing.spawn(measure, (ranks, path), nprocs=ranks)  # type: ignore[no-untyped-call]
            rows.append(json.loads(Path(path).read_text()))
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(0), "mib_per_rank": rows}))
        return
    print(f"{torch.cuda.get_device_name(0)}, MiB of GPU memory for each rank")
    print(f"{'ranks':>5} {'first':>8} {'communicator':>13} {'link':>8}")
    for row in rows:
        print(f"{row['ranks']:>5} {row['first']:>8.1f} {row['communicator']:>13.1f} {row['link']:>8.1f}")


if __name__ == "__main__":
    main()
