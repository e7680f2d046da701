"""A training from its first check to its end, as the command line and the Python interface start it: what this process
is in the job, what cannot work, then the training."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuboid.checkpoint.memory.folder import NODE, check_room
from cuboid.checkpoint.terms import Terms
from cuboid.data.opened import check_data
from cuboid.errors import UserError, nearest_numbers, use
from cuboid.launch.capacity import check_run
from cuboid.launch.islands import IslandOptions, met, with_own_folders
from cuboid.launch.network import Endpoint, Interface, find_interface, listen_if_host, parse_endpoint
from cuboid.launch.place import Place, find_place
from cuboid.launch.supervisor import check_machine, start_training
from cuboid.resilience.replan import Replanner
from cuboid.resilience.replan_groups import check_group
from cuboid.spec.layout import require_positive
from cuboid.spec.run import Run, check_chosen, check_supported, dump_run
from cuboid.training.callbacks import callback_classes
from cuboid.training.claim import InUse, claimed
from cuboid.training.learning_rate import check_schedule
from cuboid.training.run_folder import RUN_FILE, as_begun, check_folders, checkpoint_folder, prepare_folder
from cuboid.training.trackers import check_trackers

if TYPE_CHECKING:
    from cuboid.training.trainer import Outcome


# What the command line says of a job on many nodes, checked before anything starts.


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """As they were given; None where they were not."""

    rendezvous: str | None = None
    nodes: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    ranks_per_node: int | None = None
    interface: str | None = None
    group: str | None = None
    """Of the plan's several kinds of nodes the one that this node is."""


@dataclass(frozen=True)
class Nodes:
    endpoint: Endpoint
    interface: Interface
    least: int
    most: int
    ranks: int
    """On each node."""
    group: str = ""
    """Of this node, where they are not alike."""

    def fingerprint(self, run: Run) -> str:
        """Equal on all nodes that were given the same run and the same options."""
        text = f"{self.least} {self.most} {self.ranks}\n{dump_run(run)}"
        return hashlib.sha256(text.encode()).hexdigest()


def find_nodes(run: Run, options: NodeOptions) -> Nodes | None:
    """None: the job has one node only, and no options of many."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    if not given:
        return None
    if options.rendezvous is None:
        name, value = next(iter(given.items()))
        raise UserError(f"{name.replace('_', '-')}={value} needs a place where nodes meet; add --rendezvous HOST:PORT")
    endpoint = parse_endpoint(options.rendezvous)
    for name in ("nodes", "min_nodes", "max_nodes", "ranks_per_node"):
        if name in given:
            require_positive(name.replace("_", "-"), given[name])
    most = options.max_nodes or options.nodes
    if most is None:
        raise UserError(f"rendezvous={endpoint} needs the number of nodes; add --nodes N")
    least = options.min_nodes or options.nodes or most
    if options.min_nodes is None and options.max_nodes is not None:
        least = min(least, most)
    if least > most:
        raise UserError(f"min-nodes={least} is more than max-nodes={most}; use --min-nodes {most} or less")
    if least < most and not run.checkpoint.keeps:
        raise UserError(
            f"min-nodes={least} has no checkpoints to resume from with fewer nodes; use checkpoint.every=100"
        )
    ranks = _ranks_per_node(run, least, most, options.ranks_per_node)
    check_group(run, options.group, most, ranks)
    if options.group is None:  # what nodes of several kinds do depends on which are there
        Replanner(run, ranks).choose(least)
    return Nodes(endpoint, find_interface(options.interface, endpoint), least, most, ranks, options.group or "")


def _ranks_per_node(run: Run, least: int, most: int, asked: int | None) -> int:
    world = run.layout.world_size
    if asked is None:
        if world % most:
            near = nearest_numbers(most, lambda number: world % number == 0, 1, world)
            raise UserError(f"nodes={most} do not divide the {world} ranks of {run.layout}; {use('nodes', near)}")
        return world // most
    if world % asked:
        near = nearest_numbers(asked, lambda number: world % number == 0, 1, world)
        raise UserError(
            f"ranks-per-node={asked} does not divide the {world} ranks of {run.layout}; {use('ranks-per-node', near)}"
        )
    if not least <= world // asked <= most:
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise UserError(
            f"{run.layout} on {asked} ranks a node takes {world // asked} nodes, not {allowed}; "
            f"use --max-nodes {world // asked} or another layout"
        )
    return asked


# What this process is in the job: all of it, a rank that somebody started, or the supervisor of one node of many.


@dataclass(frozen=True)
class Role:
    run: Run
    place: Place | None = None
    nodes: Nodes | None = None
    listener: socket.socket | None = None
    """Of the node that leads first."""

    def check_room(self, oversubscribe: bool) -> None:
        """Refuse what this machine cannot start. Of ranks that somebody else started, that one has decided."""
        if self.place is None:
            check_run(
                self.run, self.nodes.ranks if self.nodes is not None else self.run.layout.world_size, oversubscribe
            )

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the job, and prepares what it writes. Rank 0 belongs to it."""
        if self.nodes is not None:
            return self.listener is not None
        return self.place is None or self.place.rank == 0


@dataclass(frozen=True)
class TrainingRole(Role):
    begin: Callable[[], None] = lambda: None
    """Called when nothing is refused any more."""

    @property
    def fewest_nodes(self) -> int:
        """With which the job continues."""
        if self.nodes is not None:
            return self.nodes.least
        return max(1, self.place.world_size // self.place.local_world_size) if self.place else 1

    def train(self, quiet: bool) -> tuple[Outcome, bool]:
        """Also whether this process tells of the job at its end."""
        self.begin()
        if self.nodes is None:
            return start_training(self.run, quiet), self.speaks
        from cuboid.launch.node import supervise_node

        return supervise_node(self.run, self.nodes, self.listener, quiet)


def take_role(run: Run, options: NodeOptions, begin: Callable[[], None] = lambda: None) -> TrainingRole:
    """Refuses in one sentence what cannot work; of many nodes the one at the rendezvous listens there when this
    returns."""
    nodes = find_nodes(run, options)
    if nodes is None:
        return TrainingRole(run, place=find_place(os.environ), begin=begin)
    os.environ.setdefault(NODE, nodes.interface.address)  # which stays the same when this process is started again
    listener = listen_if_host(nodes.endpoint, nodes.interface)
    if listener is not None and _is_led(run):  # this node led, and another took over
        listener.close()
        listener = None
    return TrainingRole(run, nodes=nodes, listener=listener, begin=begin)


def _is_led(run: Run) -> bool:
    from cuboid.launch.leadership import leader_answers

    return leader_answers(run)


def _was_led(run: Run) -> bool:
    """Whether nodes ever trained it together: else whoever has its folder is another job."""
    return Terms(Path(run.output.folder)).newest() is not None


# The training itself.


def train_run(
    run: Run,
    options: NodeOptions | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    conclude: Callable[[Outcome], None] = lambda outcome: None,
    announce: Callable[[str], None] = lambda past: None,
    oversubscribe: bool = False,
    take_over: bool = False,
    island: IslandOptions | None = None,
) -> Outcome:
    """What cannot work is refused before any process starts and anything is written. Of the processes of a job, those
    that speak for it check data and folder; `announce` is told there what the folder held, `conclude` how it ended.
    `oversubscribe`: start also where memory or cores seem too few for the ranks. `take_over`: resume the
    checkpoints of another run in `checkpoint.folder` as this one's. `island`: which one this is, of several."""
    island = island or IslandOptions()
    island.check(run)
    run = with_own_folders(run, island)
    with met(run, island) as begin:
        return _train(run, options, overwrite, quiet, conclude, announce, oversubscribe, take_over, begin)


def _train(
    run: Run,
    options: NodeOptions | None,
    overwrite: bool,
    quiet: bool,
    conclude: Callable[[Outcome], None],
    announce: Callable[[str], None],
    oversubscribe: bool,
    take_over: bool,
    begin: Callable[[], None],
) -> Outcome:
    check_chosen(run)
    check_supported(run)
    check_trackers(run)
    check_folders(run)
    run, begun = (run, "") if overwrite else as_begun(run)
    if run.profile.steps:  # read as torch is loaded, here and in ranks: the profiler says when it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    role = take_role(run, options or NodeOptions(), begin)
    check_machine(run, role.place)
    role.check_room(oversubscribe)
    check_room(run, role.fewest_nodes)
    if not role.speaks:
        outcome, tells = role.train(quiet=quiet)
        if tells:
            conclude(outcome)
        return outcome
    check_data(run)
    if run.optimizer.has_own_code:
        from cuboid.training.own_optimizer import check_optimizer  # here, because it brings torch

        check_optimizer(run)
    notes = [*filter(None, [begun]), *_check_start(run, overwrite)]
    until = time.monotonic() + run.resilience.contact_seconds
    while True:
        try:
            return _lead(role, notes, overwrite, take_over, quiet, conclude, announce)
        except InUse:
            if role.nodes is None:
                raise
            if _is_led(run):
                break  # another node has taken over since this one looked
            # One that lives may have no time to answer, and one that has just died holds the folder for a moment.
            if time.monotonic() > until or not _was_led(run):
                raise
    assert role.listener is not None
    role.listener.close()
    outcome, tells = replace(role, listener=None).train(quiet=quiet)
    if tells:
        conclude(outcome)
    return outcome


def _lead(
    role: TrainingRole,
    notes: list[str],
    overwrite: bool,
    take_over: bool,
    quiet: bool,
    conclude: Callable[[Outcome], None],
    announce: Callable[[str], None],
) -> Outcome:
    run = role.run
    with ExitStack() as claims:
        claims.enter_context(claimed(Path(run.output.folder)))
        # Stores have no locks: there the files that name the owner decide.
        named = run.checkpoint.folder if "://" not in run.checkpoint.folder else ""
        if os.path.realpath(named) == os.path.realpath(run.output.folder):  # which is claimed
            named = ""
        if named:
            # The checkpoints of a run that keeps them in its own folder, which is what it has claimed.
            place, own = Path(named).resolve(), Path(run.output.folder).resolve()
            if place.name == "checkpoints" and (place.parent / RUN_FILE).exists() and place.parent != own:
                claims.enter_context(claimed(place.parent, field="checkpoint.folder"))
            claims.enter_context(claimed(Path(named), field="checkpoint.folder"))
        past = prepare_folder(run, overwrite, take_over)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        announce(past)
        outcome, tells = role.train(quiet=quiet)
        if tells:
            conclude(outcome)
        return outcome


def _check_start(run: Run, overwrite: bool) -> list[str]:
    callback_classes(run.training.callbacks)
    check_schedule(run)
    if run.samples.every:
        from cuboid.generate.samples import prompts_of

        prompts_of(run)
    if not run.training.start_from:
        return []
    from cuboid.checkpoint.weights import check_start  # here, because it brings torch, for which others need not wait

    return check_start(run, checkpoint_folder(run), overwrite)
