"""Where this process stands in the job: alone, or one rank among those that torchrun or Slurm started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cuboid.errors import UserError, up_to


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    attempt: str = ""
    """Names this start of the ranks in the store that their supervisor serves at that address. Empty: somebody else
    started them, and PyTorch's own way to meet there is used."""
    term: int = 0
    """Of the node that leads the job, as `checkpoint.terms` counts them; 0: nobody else could."""


def local_places(ranks: int, first: int, world_size: int, address: str, port: int, attempt: str) -> tuple[Place, ...]:
    """The places of the ranks that one machine runs, the first of which has the number `first`."""
    return tuple(Place(first + local, world_size, local, ranks, address, port, attempt) for local in range(ranks))


def first_host(node_list: str) -> str:
    """The first name of a Slurm node list.

    >>> first_host("gpu[07-09,12],login1")
    'gpu07'
    """
    name = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", name)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """None: nobody started ranks, so this process should."""
    try:
        place = _torchrun(environment) or _slurm(environment)
        if place is not None:
            _check(place)
    except ValueError as problem:
        raise UserError(f"the variables of torchrun or Slurm are damaged: {problem}; start the ranks anew") from None
    if place is not None and not 0 <= place.rank < place.world_size:
        works = up_to(place.world_size - 1, "RANK=")
        raise UserError(f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}; use {works}")
    return place


def _check(place: Place) -> None:
    """A ValueError says what no launcher sets."""
    if not 1 <= place.local_world_size <= max(1, place.world_size):
        raise ValueError(f"{place.local_world_size} ranks on this node, of {place.world_size} in all")
    if place.local_rank < 0:
        raise ValueError(f"LOCAL_RANK={place.local_rank}")
    if not 0 < place.master_port < 65536:
        raise ValueError(f"MASTER_PORT={place.master_port} is no port from 1 to 65535")


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world = int(environment["WORLD_SIZE"])
    return Place(
        rank=int(environment["RANK"]),
        world_size=world,
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE") or _tasks_here(environment, world)),
        master_address=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(environment.get("MASTER_PORT", "29500")),
    )


def _slurm(environment: Mapping[str, str]) -> Place | None:
    # Only srun sets the variables of a step; a batch script that it did not start has those of the job, and is no rank.
    if "SLURM_PROCID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    world = int(environment["SLURM_STEP_NUM_TASKS"])
    # A port that two jobs sharing a node rarely both take.
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        world_size=world,
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        local_world_size=_tasks_here(environment, world),
        master_address=environment.get("MASTER_ADDR", first_host(nodes)),
        master_port=int(environment.get("MASTER_PORT", str(port))),
    )


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """Ranks of this node, as Slurm tells them: "4(x3),2" is four on each of the first three nodes and two on the next.
    Scripts that set RANK and LOCAL_RANK for the tasks of srun often leave LOCAL_WORLD_SIZE unset."""
    on_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not on_nodes or int(environment.get("SLURM_STEP_NUM_TASKS", world)) != world:
        return world
    node = int(environment.get("SLURM_NODEID", "0"))
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", on_nodes):
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    raise ValueError(f"SLURM_NODEID={environment['SLURM_NODEID']} is not in SLURM_STEP_TASKS_PER_NODE={on_nodes}")
