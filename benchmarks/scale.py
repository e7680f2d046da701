"""What each rank and the store do in set-up, save, resume and the watch of a run, on disk and in memory, as ranks grow.

    python benchmarks/scale.py                            # 64 ranks measured; 64, 1,024, 4,096 and 16,384 counted
    python benchmarks/scale.py --counted 64 1024 --json

Measured: real processes at a real TCPStore, writing and reading real files; process groups have the fake backend,
because gloo, which is all that a machine without GPUs has, connects every two ranks of a group.

Counted: the same functions on as many threads as there are ranks, over a store and files that live in memory and count
what is asked of them. `new_group` is counted on three ranks of the mesh with the fake backend; each communicator
costs its ranks one call of the store, as ProcessGroupNCCL has it: the first puts an id there, the others get it.

Exits with 1 if anything grows faster than ranks × log(ranks) in all."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from counted_store import SECONDS, Counter, MemoryFiles, Store, Through
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.checkpoint.location import LocalFiles, Location
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Manifest, StoredFile, checksum_of_bytes, data_file
from cuboid.checkpoint.memory.node_state import NodeRecord, assign_copies, node_index, node_manifest
from cuboid.checkpoint.memory.nodes import join_nodes
from cuboid.checkpoint.memory.restore import MemoryRestore
from cuboid.checkpoint.resume import look_together
from cuboid.checkpoint.save import agree, gather_index, write
from cuboid.checkpoint.shards import ShardedTensor, TensorSlice, Wishes
from cuboid.checkpoint.storage import Staging
from cuboid.launch import rendezvous, watched
from cuboid.launch.place import local_places
from cuboid.parallel.coordination import Coordination
from cuboid.parallel.groups import Group, Groups, make_groups
from cuboid.spec.layout import Layout
from cuboid.telemetry.heartbeat import Place, Reading, Waiting

COUNTED = (64, 1024, 4096, 16384)
MEASURED = (64,)
STAGES, TENSORS, KINDS = 4, 4, ("parameter", "exp_avg", "exp_avg_sq")
"""Of the state that is saved: each rank holds two rows of each tensor of its stage."""
PER_NODE = 8
ID_BYTES = 128
"""Of what NCCL's ranks find each other by."""
PHASES = ("set-up", "save", "resume", "memory set-up", "memory save", "memory resume")
MARGIN = 1.15
"""By which growth may be above ranks × log(ranks): names of ranks get longer."""
CPU = torch.device("cpu")


@dataclass
class Row:
    """One phase at one number of ranks."""

    ranks: int
    phase: str
    how: str
    calls: int = 0
    """Of the store, in all."""
    most_calls: int = 0
    """By one rank."""
    bytes: int = 0
    """In and out of the store."""
    keys_left: int = 0
    look_ups: int = 0
    """Files and folders looked at or opened for reading."""
    groups: int = 0
    """Calls of new_group, by the rank that makes most."""
    node_bytes: int = 0
    """Of index and manifest, on the node that keeps most of them in memory."""
    sockets: float = 0.0
    """Of a rank."""
    seconds: float = 0.0
    """Of the slowest rank where it is measured; of all ranks on one machine where it is counted."""


# What a rank does.


def held_by(rank: int, ranks: int, shift: int = 0) -> dict[str, ShardedTensor]:
    """Two rows of each tensor of a stage. `shift`: the state of another layout, whose slices touch two of these."""
    stage, position = divmod(rank, ranks // STAGES)
    rows = 2 * ranks // STAGES
    first = 2 * position + shift
    tensor_slice = TensorSlice((first, 0), (min(2, rows - first), 2), 0)
    state = {
        f"{kind}/stages.{stage}.{tensor}.weight": ShardedTensor(
            (rows, 2), torch.float32, ((tensor_slice, torch.zeros(tensor_slice.lengths)),)
        )
        for kind in KINDS
        for tensor in range(TENSORS)
    }
    generator = TensorSlice((0,), (16,), 0)
    values = torch.zeros(16, dtype=torch.uint8)
    state[f"generator/cpu/{rank:05d}"] = ShardedTensor((16,), torch.uint8, ((generator, values),))
    return state


class Rank:
    """One rank and what it has of a run; `index` is what a saver gathers once, in set-up."""

    def __init__(self, group: Coordination, place: Location, own: Location) -> None:
        """`own`: where its node keeps states in memory."""
        self.group, self.place, self.own = group, place, own
        self.staging = Staging(held_by(group.rank, group.size), CPU)
        self.manifest = Manifest(1, 1, 8, "", str(layout_of(group.size)), "")
        self.index = b""

    def do(self, name: str) -> None:
        getattr(self, name.replace(" ", "_").replace("-", "_"))()

    def set_up(self) -> None:
        self.index = gather_index(self.staging, self.group)

    def save(self) -> None:
        self.group = self.group.renew()
        write(self.staging, self.place / "step-00000001", self.manifest, self.index, self.group)

    def wishes(self, shift: int = 0) -> Wishes:
        return Wishes(self.group, lambda: held_by(self.group.rank, self.group.size, shift))

    def resume(self) -> None:
        """All but the reading of the data itself."""
        self.group.broadcast(self.place.names() if self.group.rank == 0 else [])
        _, whole, _ = look_together(self.place / "step-00000001", self.group)
        part = self.wishes(shift=1).part(whole)
        assert len(part) == len(KINDS) * TENSORS + 1
        agree("", self.group)

    def memory_set_up(self) -> None:
        self.memory = join_nodes(self.own, self.own.parent.name, self.group)
        sizes = self.group.gather(self.staging.content.nbytes)
        _, self.copies = assign_copies(sizes, self.memory.nodes, self.group)
        self.node_index = node_index(self.staging, self.memory.nodes, self.group)

    def memory_save(self) -> None:
        """All but the copies of the data to other nodes: every rank has the same."""
        self.group = self.group.renew()
        file = StoredFile(self.staging.content.nbytes, checksum_of_bytes(self.staging.content))
        received = dict.fromkeys(self.copies, file.checksum)
        nodes, folder = self.memory.nodes, self.own / "step-00000001"
        manifest = node_manifest(file, received, self.manifest, self.node_index, nodes, self.group)
        folder.make_folder()
        for rank in (self.group.rank, *self.copies):
            (folder / data_file(rank)).write_durably(self.staging.content)
        if manifest is not None:
            NodeRecord(manifest, self.node_index).write(folder)
        agree("", self.group)

    def memory_resume(self) -> None:
        """On the nodes that kept it, which have all they need."""
        in_memory = MemoryRestore(self.memory, self.group, 1)
        brought = in_memory.bring(in_memory.generations[0], self.wishes(), self.manifest.layout)
        assert len(brought.index) == len(KINDS) * TENSORS + 1
        in_memory.settle(1)


def communicators(groups: Groups) -> int:
    named = [getattr(groups, each.name) for each in fields(groups)] + [*vars(groups.routed).values()]
    return len(
        {id(group.handle) for group in [*named, *groups.links.values()] if isinstance(group, Group)} - {id(None)}
    )


def layout_of(ranks: int) -> Layout:
    return Layout.parse(f"dp={ranks // 32},tp=8,pp=4,zero={int(ranks > 32)}")


def count_groups(ranks: int) -> tuple[int, int]:
    """Calls of new_group and communicators of a rank."""
    calls, most = 0, 0
    real = dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*arguments, **options)

    found = []
    for rank in (0, ranks // 2, ranks - 1):
        calls = 0
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            with patch.object(dist, "new_group", counted):
                most = max(most, communicators(make_groups(layout_of(ranks), rank, 8, True, False, False)))
        finally:
            dist.destroy_process_group()
        found.append(calls)
    return max(found), most


# Counted.


def together(ranks: int, shared: Store, work: Callable[[int], None]) -> float:
    """On a thread for each rank; how long it took."""
    problems: list[str] = []

    def guarded(rank: int) -> None:
        try:
            with shared.turn:
                work(rank)
        except Exception as error:
            problems.append(f"rank {rank}: {type(error).__name__}: {error}")

    before = threading.stack_size(256 << 10)
    start = time.perf_counter()
    try:
        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    if problems:
        raise RuntimeError(problems[0])
    return time.perf_counter() - start


def phase(name: str, ranks: int, shared: Store, counters: list[Counter], work: Callable[[int], None]) -> Row:
    for counter in counters:
        counter.calls = counter.bytes = 0
    seconds = together(len(counters), shared, work)
    calls = [counter.calls for counter in counters]
    total = sum(counter.bytes for counter in counters)
    return Row(ranks, name, "counted", sum(calls), max(calls), total, len(shared.values), seconds=seconds)


def count(ranks: int) -> list[Row]:
    shared = Store()
    counters = [Counter(shared) for _ in range(ranks)]
    disk, *nodes = files = [MemoryFiles() for _ in range(1 + ranks // PER_NODE)]
    found = []
    for rank, counter in enumerate(counters):
        node = rank // PER_NODE
        own = Location(nodes[node], f"/node-{node}/run")
        own.make_folder()
        found.append(Rank(Coordination(counter, rank, ranks, SECONDS), Location(disk, "/run"), own))
    rows = []
    for name in PHASES:
        for each in files:
            each.looks.clear()
        rows.append(phase(name, ranks, shared, counters, lambda rank, name=name: found[rank].do(name)))  # type: ignore[misc]
        rows[-1].look_ups = sum(len(each.looks) for each in files)
    rows[PHASES.index("memory save")].node_bytes = max(
        sum(len(content or b"") for path, content in each.held.items() if path.endswith((INDEX, MANIFEST)))
        for each in nodes
    )
    rows[0].groups, made = count_groups(ranks)
    add_communicators(rows[0], made)
    return [*rows, count_watch(ranks)]


def count_watch(ranks: int) -> Row:
    """A hang that all nodes judge together: rank 3 keeps all others waiting."""
    shared = Store()
    counters = [Counter(shared) for _ in range(ranks // PER_NODE)]
    world = Place("world", range(ranks))
    local = threading.local()

    def noted(rank: int) -> Reading:
        if rank == 3:
            return Reading(3, 12, "step", 5, "data", counts={world: 7})
        return Reading(rank, 10, "step", 5, waiting=Waiting("all-reduce", world, 8), counts={world: 8})

    def judge(node: int) -> None:
        local.node = node
        own = [noted(rank) for rank in range(PER_NODE * node, PER_NODE * (node + 1))]
        here = local_places(PER_NODE, PER_NODE * node, ranks, "", 0, "attempt")[0]
        assert watched.judge_with_all(here, SECONDS)(own).culprits == (3,)

    with patch.object(rendezvous, "reach_store", lambda *_: counters[local.node]):
        row = phase("watch", ranks, shared, counters, judge)
    row.keys_left = 0  # the attempt ends here
    return row


# Measured.


def measure_rank(rank: int, ranks: int, port: int, folder: str) -> None:
    def sockets() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return found

    torch.set_num_threads(1)
    before = sockets()
    limit = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    start = time.perf_counter()
    dist.init_process_group("fake", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)  # type: ignore[attr-defined]
    groups = make_groups(layout_of(ranks), rank, 8, True, False, False)
    counter = Through(Store(), real=dist.PrefixStore("coordination", store.clone()))  # type: ignore[attr-defined]
    own = Location(LocalFiles(), f"{folder}/node-{rank // PER_NODE}/run")
    this = Rank(Coordination(counter, rank, ranks, SECONDS), Location(LocalFiles(), f"{folder}/run"), own)
    own.make_folder()
    if rank == 0:
        this.place.make_folder()
    made = communicators(groups)
    found = []
    for name in PHASES:
        this.do(name)
        found.append((time.perf_counter() - start, counter.calls, counter.bytes))
        start, counter.calls, counter.bytes = time.perf_counter(), 0, 0
    told = {"phases": found, "sockets": sockets() - before, "communicators": made}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    agree("", this.group)
    dist.destroy_process_group()


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send(store.port)
    pipe.recv()


def measure(ranks: int) -> list[Row]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    port = ours.recv()
    try:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=measure_rank, args=(rank, ranks, port, folder)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"a rank of {ranks} failed")
            told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        ours.send("over")
        server.join()
    rows = []
    for number, name in enumerate(PHASES):
        seconds, calls, size = zip(*(each["phases"][number] for each in told), strict=True)
        rows.append(Row(ranks, name, "measured", sum(calls), max(calls), sum(size), seconds=max(seconds)))
        rows[-1].sockets = sum(each["sockets"] for each in told) / ranks
    add_communicators(rows[0], max(each["communicators"] for each in told))
    return rows


def add_communicators(row: Row, made: int) -> None:
    """One call of each rank for each communicator that it belongs to."""
    row.calls += row.ranks * made
    row.most_calls += made
    row.bytes += row.ranks * made * ID_BYTES


# What is said of it.


def growth(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Phase -> quantity -> the exponent with which it grows from the smallest counted job to the largest, in all."""
    counted = [row for row in rows if row.how == "counted"]
    least, most = min(row.ranks for row in counted), max(row.ranks for row in counted)
    found: dict[str, dict[str, float]] = {}
    for small in (row for row in counted if row.ranks == least):
        large = next(row for row in counted if (row.ranks, row.phase) == (most, small.phase))
        for quantity in ("calls", "bytes", "look_ups", "groups", "node_bytes"):
            scale = least if quantity in ("groups", "node_bytes") else 1  # these are told of a rank or a node
            before, after = getattr(small, quantity) * scale, getattr(large, quantity) * (most if scale > 1 else 1)
            if before:
                found.setdefault(small.phase, {})[quantity] = math.log(after / before) / math.log(most / least)
    return found


def too_fast(rows: list[Row]) -> list[str]:
    """What grows faster than ranks × log(ranks)."""
    counted = [row.ranks for row in rows if row.how == "counted"]
    least, most = min(counted), max(counted)
    limit = math.log(MARGIN * most * math.log(most) / (least * math.log(least))) / math.log(most / least)
    return [
        f"{quantity} in {name} grow as ranks^{exponent:.2f}; ranks × log(ranks) is ranks^{limit:.2f} here"
        for name, found in growth(rows).items()
        for quantity, exponent in found.items()
        if exponent > limit
    ]


def show(rows: list[Row]) -> None:
    print(f"{'ranks':>6} {'phase':<13} {'':<8} {'calls/rank':>10} {'most':>6} {'calls':>9} {'MB':>8} {'kB/rank':>8} "
          f"{'keys left':>9} {'look-ups':>8} {'groups':>6} {'kB/node':>7} {'sockets':>7} {'seconds':>8}")  # fmt: skip
    for row in rows:
        mean, each = row.calls / row.ranks, row.bytes / row.ranks / 1e3
        kept = f"{row.node_bytes / 1e3:.1f}" if row.node_bytes else ""
        print(f"{row.ranks:>6,} {row.phase:<13} {row.how:<8} {mean:>10.1f} {row.most_calls:>6,} {row.calls:>9,} "
              f"{row.bytes / 1e6:>8.1f} {each:>8.1f} {row.keys_left:>9} {row.look_ups:>8,} {row.groups or '':>6} "
              f"{kept:>7} {row.sockets or '':>7} {row.seconds:>8.2f}")  # fmt: skip
    for name, found in growth(rows).items():
        print(f"{name}: in all " + ", ".join(f"{what} as ranks^{power:.2f}" for what, power in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", type=int, nargs="+", default=list(COUNTED))
    parser.add_argument("--measured", type=int, nargs="*", default=list(MEASURED))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for ranks in options.measured for row in measure(ranks)]
    for ranks in options.counted:
        rows += count(ranks)
    problems = too_fast(rows)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "growth": growth(rows), "problems": problems}))
    else:
        show(rows)
        print("\n".join(problems) or "nothing grows faster than ranks × log(ranks)")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
