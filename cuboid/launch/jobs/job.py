"""`Job`: what every scheduler must be told of a run: nodes, ranks on each, how ranks meet, how long a stop may take."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from cuboid.errors import UserError, nearest_numbers, use
from cuboid.launch.islands import IslandOptions
from cuboid.planning.heterogeneous_file import planned_nodes
from cuboid.planning.plan import planned_cluster
from cuboid.resilience.goodput import measured
from cuboid.resilience.replan import Replanner
from cuboid.spec.run import ResilienceSpec, Run, dump_run

# How long a stop may take: until the step in flight has ended and a checkpoint is written.


UNMEASURED = 300
"""Seconds, before the run has shown how long its steps and saves take."""
LEAST = 60
MARGIN = 2.0
"""Over the slowest step and save seen: the file system is busiest when many jobs are stopped at once."""


def grace_seconds(run: Run) -> tuple[int, str]:
    """Seconds, and where they come from: the run's folder, if it has trained before."""
    found = measured(run.output.folder)
    asked = math.ceil(run.resilience.grace_seconds)
    if not found.saved:
        return max(UNMEASURED, asked), "assumed: this run has not saved yet"
    needed = MARGIN * (found.slowest_step + found.slowest_save)
    why = f"{MARGIN:g} × ({found.slowest_step:.2g} s a step + {found.slowest_save:.2g} s a save), at least {LEAST} s"
    return max(LEAST, math.ceil(needed), asked), f"measured: {why}"


REFUSED = 2
"""The exit code of what starting again cannot mend."""
LEAVING = 30
"""Seconds by which the scheduler waits longer than the training gives itself: it ends its own processes first."""
PORT = 29400
"""Where supervisors meet, unless told otherwise; what torchrun uses too, so that firewalls often know it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    run: Run
    file: str
    """The run file, as a supervisor will find it."""
    name: str
    nodes: int
    min_nodes: int
    """With how many the training continues when nodes are lost; equal to `nodes`: it waits for them."""
    smallest: str
    """The layout it continues with then, as planned; empty where no planner wrote the run file."""
    ranks_per_node: int
    gpus: bool
    accelerator: str
    """Its name in the catalog; empty where no planner wrote the run file."""
    port: int = PORT
    interface: str = ""
    overrides: tuple[str, ...] = ()
    """Changes to the run file, for the command line."""
    island: tuple[str, ...] = ()
    """Options of the island that the job is, for the command line."""

    @property
    def notice_seconds(self) -> int:
        """How long before its end, at the latest, the scheduler tells the job."""
        return math.ceil(self.run.resilience.grace_seconds) + LEAVING

    @property
    def summary(self) -> str:
        """One line for the head of a file."""
        unit = "GPU" if self.gpus else "rank"
        each = f"{self.ranks_per_node} {unit}" + "s" * (self.ranks_per_node > 1)
        return (
            f"{one_line(self.run.model.name)}, {self.run.layout}: {self.nodes} node{'s' * (self.nodes > 1)} of {each}"
        )

    @property
    def placement(self) -> str:
        """Why ranks sit where they do, in one sentence."""
        tensor = f"tensor groups of {self.run.layout.tp}" if self.run.layout.tp > 1 else "neighbours in rank"
        lost = (
            f" With {self.min_nodes} of the nodes: {self.smallest}."
            if self.smallest and self.min_nodes < self.nodes
            else ""
        )
        return f"Ranks fill node after node, so {tensor} share a node's links.{lost}"

    def waiting(self, **seconds: float) -> Job:
        """With other time-outs of `resilience`, but for those that the run file has changed itself."""
        spec, usual = self.run.resilience, ResilienceSpec()
        changed: dict[str, Any] = {
            key: value for key, value in seconds.items() if getattr(spec, key) == getattr(usual, key)
        }
        said = tuple(f"resilience.{key}={value:g}" for key, value in changed.items())
        run = replace(self.run, resilience=replace(spec, **changed))
        return replace(self, run=run, overrides=(*self.overrides, *said))

    def command(self, host: str) -> list[str]:
        """What a node's supervisor is started with; `host` is where the first of them runs."""
        words = ["cuboid", "train", self.file]
        if self.nodes > 1:
            words += ["--nodes", str(self.nodes), "--rendezvous", f"{host}:{self.port}"]
            if self.min_nodes < self.nodes:
                words += ["--min-nodes", str(self.min_nodes), "--max-nodes", str(self.nodes)]
            if self.interface:
                words += ["--interface", self.interface]
        return [*words, *self.island, *(word for change in self.overrides for word in ("--set", change))]

    @property
    def shell_command(self) -> str:
        """The same as a line of shell, where `$head` holds the host."""
        return shlex.join(self.command("HEAD")).replace(f"HEAD:{self.port}", f'"$head:{self.port}"')


def make_job(
    run: Run,
    file: str,
    *,
    name: str = "",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    min_nodes: int | None = None,
    grace_seconds: int,
    port: int = PORT,
    interface: str = "",
    overrides: tuple[str, ...] = (),
    across_nodes: bool = False,
    island: IslandOptions | None = None,
) -> Job:
    """The job of a run; what neither its plan nor an option tells is asked for."""
    island = island or IslandOptions()
    island.check(run)
    if planned_nodes(run) is not None:
        raise UserError(
            f"{file} plans one job over nodes of several groups, which a job file of equal nodes does not start; run "
            "cuboid train on each node with --group"
        )
    cluster = planned_cluster(run)
    on_cpus = run.training.device == "cpu" or (cluster is not None and cluster.accelerator == "cpu")
    per_node = _ranks_per_node(run, nodes, gpus_per_node, cluster.accelerators_per_node if cluster else None)
    fast = max(per_node, cluster.tiers[0].size if cluster and gpus_per_node is None else 0)
    if not across_nodes:
        check_tensor_groups(run, fast)
    count = run.layout.world_size // per_node
    least = count if min_nodes is None else min_nodes
    if least > count:
        raise UserError(f"min-nodes={least} is more than the {count} nodes of {run.layout}; use min-nodes={count}")
    if grace_seconds != run.resilience.grace_seconds:
        run = replace(run, resilience=replace(run.resilience, grace_seconds=float(grace_seconds)))
        overrides = (*overrides, f"resilience.grace_seconds={grace_seconds}")
    # Without a plan the planner knows the machine it runs on, and this one may not be of the job.
    smallest = Replanner(run, per_node, cluster).choose(least).layout if cluster else ""
    _check_interface(interface)
    _check_no_secrets(run)
    return Job(
        run=run,
        file=file,
        name=job_name(name or f"{run.model.name}{'' if island.island is None else f'-island-{island.island}'}"),
        nodes=count,
        min_nodes=least,
        smallest=smallest,
        ranks_per_node=per_node,
        gpus=not on_cpus,
        accelerator=cluster.accelerator if cluster else "",
        port=port,
        interface=interface,
        overrides=overrides,
        island=_words_of(island),
    )


def _words_of(island: IslandOptions) -> tuple[str, ...]:
    if island.island is None or island.rendezvous is None:
        return ()
    return ("--island", str(island.island), "--islands-rendezvous", island.rendezvous)


def check_tensor_groups(run: Run, domain: int) -> None:
    """Refuse a tensor group that would cross the nodes: it communicates activations in every layer."""
    layout = run.layout
    if all(first // domain == (first + layout.tp - 1) // domain for first in range(0, layout.world_size, layout.tp)):
        return
    near = nearest_numbers(layout.tp, lambda number: domain % number == 0, 1, domain)
    raise UserError(
        f"tp={layout.tp} crosses nodes of {domain}, where every layer would wait for the network; "
        f"{use('tp', near[:1])}, another --gpus-per-node, or --across-nodes if that is meant"
    )


def one_line(text: str) -> str:
    """For comments, which a line break would end."""
    return " ".join(text.split())


def job_name(text: str) -> str:
    """A name every scheduler takes: small letters, digits and dashes, at most 40.

    >>> job_name("Qwen3_0.6B")
    'qwen3-0-6b'
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    if not name or not name[0].isalpha():  # a Service's name begins with a letter
        name = f"run-{name}".strip("-")
    return name


def _ranks_per_node(run: Run, nodes: int | None, gpus_per_node: int | None, planned: int | None) -> int:
    world = run.layout.world_size
    per_node = gpus_per_node or (world // nodes if nodes and world % nodes == 0 else None)
    if nodes and (world % nodes or (per_node is not None and per_node * nodes != world)):
        near = nearest_numbers(nodes, lambda number: world % number == 0, 1, world)
        raise UserError(f"nodes={nodes} cannot share the {world} ranks of {run.layout} evenly; {use('nodes', near)}")
    per_node = min(per_node or planned or world, world)
    if world % per_node:
        near = nearest_numbers(per_node, lambda number: world % number == 0, 1, world)
        raise UserError(
            f"gpus-per-node={per_node} does not divide the {world} ranks of {run.layout}; {use('gpus-per-node', near)}"
        )
    if nodes is None and gpus_per_node is None and planned is None and world > 1:
        raise UserError(f"the GPUs of a node are not known for {world} ranks; use --gpus-per-node 8 or --nodes 1")
    return per_node


def _check_interface(interface: str) -> None:
    if not re.fullmatch(r"[\w.:-]*", interface):
        raise UserError(f"interface={interface!r} is no name of a network interface; use one such as eth0")


def _check_no_secrets(run: Run) -> None:
    """Job files are read by many: a URL with a password in it must not get there."""
    found = re.search(r'"[a-z0-9+]+://[^/\s"@:]+:[^/\s"@]+@', dump_run(run))
    if found:
        address = found[0].strip('"').partition("://")[0]
        raise UserError(
            f"the run file holds a {address}:// address with a password, which job files must not; use the store's own "
            "credentials (environment, secret or role)"
        )
