"""Whether ranks that should hold the same values do: checksums of everything that several ranks keep, compared.

Nothing here knows which ranks those are: what has one name and place in the full tensor must have the same bits."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.collectives import start_all_gather
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.zero import Unit
from cuboid.training.optimizer import Optimizer

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Deviation:
    """Copies that are not equal."""

    name: str
    ranks: tuple[int, ...]
    """Those that differ from most; all holders, where there is no majority."""
    others: tuple[int, ...]

    def __str__(self) -> str:
        if not self.others:
            return f"ranks {_listed(self.ranks)} hold different values of {self.name}"
        return f"rank {_listed(self.ranks)} holds other values of {self.name} than rank {_listed(self.others)}"


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def checksum(values: Tensor) -> Tensor:
    """The sum of all elements' bits taken as integers: no single changed element leaves it as it was."""
    return values.detach().contiguous().view(BITS[values.element_size()]).sum(dtype=torch.int64)


def flip_bit(values: Tensor) -> None:
    """Of one element, what silent corruption does; called where that is rehearsed."""
    # A low mantissa bit: finite, plausible, and wrong, as a memory error is.
    bits = values.view(BITS[values.element_size()])
    bits[bits.numel() // 2] ^= 1 << 3


def _held(engine: Engine, optimizer: Optimizer, sees: Callable[[Unit], bool]) -> Iterator[tuple[str, str, Tensor]]:
    """Name, place, and values of all that this rank keeps."""
    for unit in filter(sees, engine.units):
        # Weights that matmuls use are compared where they are a copy of master weights; else those are compared below.
        # With ZeRO 3 nobody keeps whole weights between steps.
        optimizer_shards = unit.optimizer_shards()
        if unit.zero in (1, 2) or (
            unit.zero == 0 and any(optimizer_shard.weight is not None for optimizer_shard in optimizer_shards)
        ):
            unit.gather()  # what the last update sent for is there after this
            for part in unit.parts:
                yield part.name, f"weight/{part.slice}", unit.parameters[part.name]
            unit.release()
        for optimizer_shard in optimizer_shards:
            place = f"{optimizer_shard.part.slice}/{optimizer_shard.start}:{optimizer_shard.stop}"
            for kind, values in {"master": optimizer_shard.master, **optimizer.state_of(optimizer_shard)}.items():
                yield optimizer_shard.part.name, f"{kind}/{place}", values


def deviations(
    engine: Engine,
    optimizer: Optimizer,
    sees: Callable[[Unit], bool] | None = None,
    alone: set[int] | None = None,
) -> list[Deviation]:
    """Every rank calls this, between steps; all get the same answer. `sees`: the units that are compared; default: all.
    `alone`: keys of what no other rank has, which are found and omitted from then on."""
    world = engine.groups.world
    if world.handle is None:
        return []
    names: dict[int, str] = {}
    sums = []
    for name, place, values in _held(engine, optimizer, sees or (lambda _: True)):
        # Names become 64-bit keys, which travel in a tensor; the few names that differ are sent as text afterwards.
        digest = hashlib.blake2b(f"{name}/{place}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        if alone is not None and key in alone:
            continue
        names[key] = f"{name} ({place.partition('/')[0]})"
        sums.append(checksum(values).to(engine.device))  # what is offloaded was summed by the host
    # Ranks keep different numbers of tensors; an all-gather takes equal shapes, so rows are padded with key 0.
    most = torch.tensor(len(sums), device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world.handle)
    rows = torch.zeros(int(most), 2, dtype=torch.int64, device=engine.device)
    rows[: len(sums), 0] = torch.tensor(list(names), device=engine.device)
    if sums:
        rows[: len(sums), 1] = torch.stack(sums)
    told = start_all_gather(rows, world).wait().view(world.size, -1, 2).tolist()
    if engine.ledger is not None:
        engine.ledger.take()  # no part of a step
    holders: dict[int, dict[int, int]] = {}
    for rank, theirs in enumerate(told):
        for key, value in theirs:
            if key:
                holders.setdefault(key, {})[rank] = value
    if alone is not None:
        alone |= {key for key, values in holders.items() if len(values) == 1} & names.keys()
    wrong = {key: values for key, values in holders.items() if len(set(values.values())) > 1}
    if not wrong:
        return []
    known: list[dict[int, str]] = [{} for _ in range(world.size)]
    dist.all_gather_object(known, {key: names[key] for key in wrong if key in names}, group=world.handle)
    named = {key: name for each in known for key, name in each.items()}
    return sorted((_judge(named[key], values) for key, values in wrong.items()), key=lambda found: found.name)


def _judge(name: str, values: dict[int, int]) -> Deviation:
    (usual, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return Deviation(name, tuple(values), ())
    return Deviation(
        name,
        tuple(rank for rank, value in values.items() if value != usual),
        tuple(rank for rank, value in values.items() if value == usual),
    )
