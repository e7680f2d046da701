"""Jobs for the tests of collectives: what a rank gets, compared with plain torch on the parts of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel import collectives
from cuboid.parallel.groups import Group
from cuboid.parallel.shm_collectives import SLOT_BYTES, connect, machine_identity, sum_rows
from cuboid.telemetry.communication_ledger import Ledger

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "int64": torch.int64}
NAME = "cuboid-"
"""How the shared files of all collectives begin."""


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any rank can make the part of any other."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator)


def world(slot_bytes: int | None, local: bool = True) -> Group:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handle = dist.group.WORLD
    assert handle is not None
    group = Group(tuple(range(ranks)), rank, handle)
    if not local:
        return group
    return replace(group, local=connect(handle, rank, ranks, slot_bytes or SLOT_BYTES))


def collect(rank: int, sizes: list[int], slot_bytes: int | None, local: bool = True) -> list[str]:
    """Every collective on every size and dtype; returns what differs from plain torch."""
    group = world(slot_bytes, local)
    wrong = [
        f"{what} of {size} {dtype}"
        for seed, size in enumerate(sizes)
        for dtype in DTYPES
        for what in _differences(rank, group, size, DTYPES[dtype], seed)
    ]
    if group.local is not None:
        group.local.close()
    return wrong


def _differences(rank: int, group: Group, size: int, dtype: torch.dtype, seed: int) -> list[str]:
    parts = torch.stack([part_of(peer, (group.size, size), dtype, seed) for peer in range(group.size)])
    own = parts[rank].clone()
    close = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12, torch.int64: 0}[dtype]

    def same(found: Tensor, expected: Tensor) -> bool:
        return found.dtype == dtype and torch.allclose(
            found.double(), expected.double().reshape(found.shape), rtol=close, atol=close * group.size
        )

    total = parts.double().sum(0) if dtype.is_floating_point else parts.sum(0)
    summed = own.clone()
    found = {
        "all_reduce": same(collectives.all_reduce(summed, group), total) and same(summed, total),
        "all_reduce_maximum": torch.equal(collectives.all_reduce_maximum(own.clone(), group), parts.amax(0)),
        "all_gather": torch.equal(collectives.all_gather(own, group), parts.flatten(0, 1)),
        "reduce_scatter": same(collectives.reduce_scatter(own, group), total[rank : rank + 1]),
        "reduce_scatter of a view": same(collectives.reduce_scatter(own.t().contiguous().t(), group), total[rank]),
        "all_to_all": torch.equal(collectives.all_to_all(own, group), parts[:, rank]),
        "shift": torch.equal(collectives.start_shift(own, group).wait(), parts[rank - 1]),
        "shift of a view": torch.equal(collectives.start_shift(own.t(), group, tag=1).wait(), parts[rank - 1].t()),
        **{
            f"shift by {distance}": _shifted_by(distance, own, parts, group)
            for distance in (1, 2, -1)
            if distance % group.size
        },
        "the input": torch.equal(own, parts[rank]),
    }
    into = torch.empty(group.size * group.size, size, dtype=dtype)
    found["all_gather into"] = collectives.start_all_gather(own, group, into).wait() is into and torch.equal(
        into, parts.flatten(0, 1)
    )
    found |= _uneven(rank, group, parts, same)
    return [name for name, right in found.items() if not right]


def _uneven(rank: int, group: Group, parts: Tensor, same: Callable[[Tensor, Tensor], bool]) -> dict[str, bool]:
    """Flat parts of sizes that differ from rank to rank."""
    flat = parts.flatten(1)
    sizes = [1 + place * (flat.shape[1] // group.size) // group.size for place in range(group.size)]
    sizes[-1] = flat.shape[1] - sum(sizes[:-1])
    ends = [sum(sizes[: place + 1]) for place in range(group.size)]
    pieces = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    whole = torch.cat([row[piece] for row, piece in zip(flat, pieces, strict=True)])
    gathered = collectives.start_all_gather(flat[rank, pieces[rank]].clone(), group, sizes=sizes).wait()
    summed = collectives.start_reduce_scatter(flat[rank].clone(), group, sizes).wait()
    total = flat.double().sum(0) if flat.is_floating_point() else flat.sum(0)
    return {
        "uneven all_gather": torch.equal(gathered, whole),
        "uneven reduce_scatter": same(summed, total[pieces[rank]]),
    }


def _shifted_by(distance: int, own: torch.Tensor, parts: torch.Tensor, group: Group) -> bool:
    """Each rank sends as many numbers as its index says, the first none; those of the rank behind arrive."""
    source = (group.index - distance) % group.size
    sent = own.flatten()[: group.index]
    found = collectives.start_distant_shift(sent, group, distance, source, group.size - 1).wait()
    return torch.equal(found, parts[source].flatten()[:source])


def sum_bits(rank: int, size: int) -> bytes:
    """Ranks must agree to the last bit, or they would drift apart."""
    group = world(None)
    return collectives.all_reduce(part_of(rank, (size,), torch.float32, 0), group).numpy().tobytes()


def many_turns(rank: int, turns: int) -> bool:
    """Ranks of unequal speed: no one's slot is overwritten before all have read it."""
    group = world(4096)
    local = group.local
    assert local is not None
    right = True
    for turn in range(turns):
        if turn % group.size == rank:
            time.sleep(0.001)
        seen = local.all_show(torch.full((16,), float(turn * group.size + rank)))
        expected = torch.arange(group.size) + turn * group.size
        right &= bool((seen == expected.unsqueeze(1)).all())
    return right


def shared_files(rank: int) -> list[str]:
    """What this process has of shared memory while a collective is open."""
    group = world(None)
    dist.barrier()
    assert group.local is not None
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if f"/dev/shm/{NAME}" in line]


def lose_a_peer(rank: int, dying: int, file: str) -> None:
    """One rank dies in mid-training; the others write how long they waited for it and what they were told."""
    group = world(None)
    collectives.all_reduce(torch.ones(3), group)
    start = time.monotonic()
    if rank == dying:
        # Its end is seen last, so that nobody ends the others before they have written.
        group.local.close()  # type: ignore[union-attr]
        while len(list(Path(file).parent.glob("*"))) < group.size - 1:
            time.sleep(0.01)
        os._exit(7)
    try:
        collectives.all_reduce(torch.ones(3), group)
    except RuntimeError as error:
        Path(f"{file}.{rank}").write_text(f"{time.monotonic() - start:.3f} {error}")
    time.sleep(60)


def die_in_the_middle(rank: int, dying: int) -> None:
    group = world(None)
    collectives.all_reduce(torch.ones(3), group)
    if rank == dying:
        os._exit(7)
    collectives.all_reduce(torch.ones(3), group)


def identity(rank: int) -> str:
    return machine_identity()


def wait_twice(rank: int) -> list[float]:
    pending = collectives.start_all_reduce(torch.tensor([rank + 1.0]), world(None, local=False))
    pending.wait()
    found: list[float] = pending.wait().tolist()
    return found


def row_sums(rank: int) -> tuple[float, float]:
    """bf16 is summed in float32: 1 + 2^-8 + 2^-8 is lost when rounded after each addition."""
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    return sum_rows(rows).item(), sum_rows(rows.double()).item()


def counted(rank: int, local: bool) -> list[dict[str, object]]:
    """What the ledger says of one collective of each kind, twelve float32 each."""
    ledger = Ledger()
    group = replace(world(None, local), dimension="tp", ledger=ledger)
    collectives.all_reduce(torch.zeros(12), group)
    collectives.all_reduce_maximum(torch.zeros(12), group)
    collectives.all_gather(torch.zeros(12 // group.size), group)
    collectives.reduce_scatter(torch.zeros(12), group)
    if group.local is not None:
        group.local.close()
    return ledger.rows()
