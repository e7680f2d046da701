"""A run as a program for a Ray cluster: Ray places one supervisor on each of its nodes, Cuboid does the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cuboid.errors import UserError
from cuboid.launch.jobs.job import Job

GATHER = 120.0
"""Seconds that nodes are waited for: Ray starts a worker process on each first."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    address: str = "auto"
    """Of the cluster: auto, HOST:PORT or ray://HOST:PORT."""
    cpus: int | None = None
    """Cores of a node that Ray counts as taken; default: those of the ranks' threads."""

    def __post_init__(self) -> None:
        if not self.address.strip():
            raise UserError('address="" names no cluster; use auto, or HOST:PORT of its head')


def program(job: Job, options: RayOptions, written_by: str) -> str:
    """The whole file."""
    if job.min_nodes < job.nodes:
        job = job.waiting(gather_seconds=GATHER)
    cpus = options.cpus or job.ranks_per_node * job.run.training.threads_per_rank
    bundle: dict[str, int] = {"CPU": cpus, **({"GPU": job.ranks_per_node} if job.gpus else {})}
    _, *words = job.command("HEAD")
    settings = {
        "ADDRESS": options.address,
        "NODES": job.nodes,
        "MIN_NODES": job.min_nodes,
        "BUNDLE": bundle,
        "COMMAND": words,
        "PORT": job.port,
        "RESTARTS": job.run.resilience.restarts,
    }
    said = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    head = f'"""{job.summary}\n{job.placement}\n\nWritten by: {written_by}\n'
    return head + PROGRAM.replace("@SETTINGS@", said)


PROGRAM = '''Run it where the run file is, in a folder that all nodes share:  python FILE
or:  ray job submit -- python FILE

Ray places one supervisor a node, each on a node of its own, and places it again when its node is gone and another is
there. Supervisors start ranks, restart them, and continue without a lost node. When the first node is lost, all begin
anew from the newest checkpoint, on as many nodes as there are, MIN_NODES at least."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

try:
    import ray
except ImportError:
    print("error: this program needs Ray; install it with `pip install ray`", file=sys.stderr)
    sys.exit(2)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@SETTINGS@
PATIENCE = 60  # seconds that a placement is waited for before one with a node less is tried


def die_with_parent():
    """A node that Ray has lost must not train beside those that replace it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=4, num_cpus=0)
class Node:
    def __init__(self, folder):
        os.chdir(folder)
        self.process = None

    def address(self):
        return ray.util.get_node_ip_address()

    def train(self, head, waits, secret):
        """The supervisor of this node, until it ends; its exit code. Supervisors prove to each other that they know
        the secret."""
        deadline = time.monotonic() + 60
        while waits and time.monotonic() < deadline:  # for the first node, which serves the others
            try:
                socket.create_connection((head, PORT), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        words = [word.replace("HEAD:", head + ":") for word in COMMAND]
        here = {**os.environ, "CUBOID_SECRET": secret}
        if "GPU" not in BUNDLE:
            here.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-m", "cuboid.cli.main", *words]
        self.process = subprocess.Popen(command, env=here, preexec_fn=die_with_parent)
        return self.process.wait()

    def stop(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def reserve():
    """A bundle on each node, and how many they are."""
    while True:
        for count in range(NODES, MIN_NODES - 1, -1):
            group = placement_group([BUNDLE] * count, strategy="STRICT_SPREAD")
            if group.wait(PATIENCE):
                return group, count
            remove_placement_group(group)
            print(f"there are no {count} Ray nodes with {BUNDLE} each; waiting, {MIN_NODES} would do", flush=True)


def attempt():
    """The exit code of the job; None when its first node was lost."""
    group, count = reserve()
    where = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(count)]
    nodes = [
        Node.options(scheduling_strategy=place, num_gpus=BUNDLE.get("GPU", 0), max_restarts=-1 if i else 0).remote(
            os.getcwd()
        )
        for i, place in enumerate(where)
    ]

    def stop(*_):
        print("told to stop: supervisors save and leave", flush=True)
        for node in nodes:
            node.stop.remote()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    try:
        head = ray.get(nodes[0].address.remote())
        secret = secrets.token_hex(32)
        ends = [node.train.remote(head, i > 0, secret) for i, node in enumerate(nodes)]
        code = ray.get(ends[0])
        ray.wait(ends, num_returns=len(ends), timeout=5)  # the others end when they are told so; a lost one does not
        return code
    except ray.exceptions.RayActorError:
        return None
    finally:
        for node in nodes:
            ray.kill(node)
        remove_placement_group(group)


ray.init(address=ADDRESS)
for number in range(RESTARTS + 1):
    code = attempt()
    if code is not None:
        break
    print("the first node is lost: beginning anew from the newest checkpoint", flush=True)
    time.sleep(5)
# Told to stop and saved (exit code 75): whoever started this may start it again.
sys.exit(1 if code is None else code)
'''
