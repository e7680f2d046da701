"""`cuboid launch slurm|kubernetes|skypilot|ray run.toml`: a ready job file for a run."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cuboid.cli.options import given_options
from cuboid.errors import UserError
from cuboid.launch.islands import IslandOptions
from cuboid.launch.jobs import ray, skypilot, slurm
from cuboid.launch.jobs.job import PORT, Job, grace_seconds, make_job, one_line
from cuboid.launch.jobs.kubernetes import PodOptions, job_manifest, train_job_manifest
from cuboid.outputs import write_output
from cuboid.planning.island_file import plans_islands, with_island
from cuboid.readers import read_toml
from cuboid.spec.run import build_run, check_chosen
from cuboid.strict_json import json_text

Scheduler = Literal["slurm", "kubernetes", "skypilot", "ray"]

BELONGS = {
    "time": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "qos": ("slurm",),
    "constraint": ("slurm",),
    "setup": ("slurm", "skypilot"),
    "kind": ("kubernetes",),
    "image": ("kubernetes", "skypilot"),
    "claim": ("kubernetes",),
    "mount": ("kubernetes",),
    "namespace": ("kubernetes",),
    "user": ("kubernetes",),
    "memory": ("kubernetes",),
    "secret": ("kubernetes",),
    "cpus": ("kubernetes", "skypilot", "ray"),
    "bucket": ("skypilot",),
    "accelerator": ("skypilot",),
    "infra": ("skypilot",),
    "spot": ("skypilot",),
    "address": ("ray",),
}
"""Option -> the schedulers that have a use for it."""
NEEDED = {
    "slurm": {},
    "kubernetes": {"image": "--image registry/cuboid:1", "claim": "--claim NAME, a volume all nodes share"},
    "skypilot": {},
    "ray": {},
}
"""Scheduler -> what nobody but the user knows, and how to say it."""


def command(
    context: typer.Context,
    scheduler: Annotated[Scheduler, typer.Argument(help="For whom the file is.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The run file; a plan is one.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here, not to the screen.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job; default: that of the model.")] = "",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; default: as many as the plan's fill.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; default: the plan's.")] = None,
    min_nodes: Annotated[int | None, typer.Option(min=1, help="Continue with so few when nodes are lost.")] = None,
    island: Annotated[
        int | None, typer.Option(help="Of a run with [islands]: which one the job is, from 0; a plan has its layout.")
    ] = None,
    islands_rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT where islands meet, from all sites.")
    ] = None,
    across_nodes: Annotated[bool, typer.Option("--across-nodes", help="Let tensor groups cross nodes.")] = False,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Where supervisors meet.")] = PORT,
    interface: Annotated[str, typer.Option(help="Network interface of the nodes; default: found.")] = "",
    grace: Annotated[int | None, typer.Option(min=1, help="Seconds a stop may take; default: measured.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: training.steps=20.")] = None,
    time: Annotated[str, typer.Option(help="slurm: longest time, such as 24:00:00; default: the partition's.")] = "",
    partition: Annotated[str, typer.Option(help="slurm: partition.")] = "",
    account: Annotated[str, typer.Option(help="slurm: account.")] = "",
    qos: Annotated[str, typer.Option(help="slurm: quality of service.")] = "",
    constraint: Annotated[str, typer.Option(help="slurm: features nodes must have.")] = "",
    setup: Annotated[
        str, typer.Option(help="slurm, skypilot: shell before it, such as source .venv/bin/activate.")
    ] = "",
    kind: Annotated[str, typer.Option(help="kubernetes: job (plain), or trainjob of Kubeflow Trainer.")] = "",
    image: Annotated[str, typer.Option(help="kubernetes, skypilot: container image with Cuboid in it.")] = "",
    claim: Annotated[str, typer.Option(help="kubernetes: PersistentVolumeClaim that all nodes share.")] = "",
    mount: Annotated[str, typer.Option(help="kubernetes: where it is mounted; default: /workspace.")] = "",
    namespace: Annotated[str, typer.Option(help="kubernetes: namespace.")] = "",
    user: Annotated[int | None, typer.Option(help="kubernetes: number of the user; default: 1000.")] = None,
    memory: Annotated[str, typer.Option(help="kubernetes: memory of a node, such as 512Gi.")] = "",
    secret: Annotated[str, typer.Option(help="kubernetes: Secret for the environment; only its name is written.")] = "",
    cpus: Annotated[int | None, typer.Option(min=1, help="kubernetes, skypilot, ray: cores of a node.")] = None,
    bucket: Annotated[str, typer.Option(help="skypilot: where checkpoints go, such as s3://bucket/run.")] = "",
    accelerator: Annotated[str, typer.Option(help="skypilot: H100, …; default: the plan's.")] = "",
    infra: Annotated[str, typer.Option(help="skypilot: cloud[/region[/zone]].")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="skypilot: on machines that may be taken away.")] = False,
    address: Annotated[str, typer.Option(help="ray: HOST:PORT of the cluster; default: the one it runs in.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a ready job file for a run: an sbatch script, Kubernetes manifests, a SkyPilot task, or a Ray program.

    One supervisor a node starts that node's ranks; tensor groups stay inside nodes. Nothing is submitted.

    Example: cuboid launch slurm run.toml --gpus-per-node 8 --time 24:00:00 -o run.sbatch

    Example: cuboid launch kubernetes run.toml --image registry/cuboid:1 --claim shared -o run.yaml

    Example: cuboid launch skypilot run.toml --bucket s3://bucket/run --spot -o run.yaml

    Example: cuboid launch ray run.toml --gpus-per-node 8 -o run_on_ray.py

    Example: cuboid launch slurm islands.toml --island 1 --islands-rendezvous site-a:29700 -o island-1.sbatch
    """
    said = given_options(context)
    options = _options(scheduler, {option: value for option, value in said.items() if option in BELONGS})
    changes = tuple(overrides or ())
    table = dict(read_toml(file))
    if island is not None and plans_islands(table):
        table = dict(with_island(table, island))
    run = build_run(table, changes, folder=file.parent)
    check_chosen(run)
    seconds, why = (grace, "as asked") if grace is not None else grace_seconds(run)
    job = make_job(
        run,
        str(file),
        name=name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        min_nodes=min_nodes,
        grace_seconds=seconds,
        port=port,
        interface=interface,
        overrides=changes,
        across_nodes=across_nodes,
        island=IslandOptions(island=island, rendezvous=islands_rendezvous),
    )
    if not run.checkpoint.every:
        print("note: checkpoint.every=0 keeps no checkpoints: started again, the run begins anew", file=sys.stderr)
    text = _write(scheduler, job, options, _command_line(scheduler, file, said))
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json_text(_as_json(scheduler, job, why, text)))
    elif output is None:
        print(text, end="")
    else:
        print(f"{output}: {job.summary}; a stop may take {seconds} s ({why})")


def _options(scheduler: Scheduler, given: dict[str, Any]) -> dict[str, Any]:
    for option, value in given.items():
        if scheduler not in BELONGS[option]:
            raise UserError(f"{option}={value} is for {' and '.join(BELONGS[option])}; omit it for {scheduler}")
    for option, example in NEEDED[scheduler].items():
        if option not in given:
            raise UserError(f"{option} is not known for {scheduler}; use {example}")
    return given


def _command_line(scheduler: Scheduler, file: Path, said: Mapping[str, Any]) -> str:
    """What writes the same file again."""
    words = ["cuboid", "launch", scheduler, str(file)]
    for option, value in said.items():
        if option in ("scheduler", "file", "output", "as_json"):
            continue
        flag = "--set" if option == "overrides" else f"--{option.replace('_', '-')}"
        for each in value if option == "overrides" else [value]:
            words += [flag] if each is True else [flag, str(each)]
    return one_line(shlex.join(words))


def _write(scheduler: Scheduler, job: Job, given: dict[str, Any], written_by: str) -> str:
    if scheduler == "slurm":
        return slurm.script(job, slurm.SlurmOptions(**given), written_by)
    if scheduler == "skypilot":
        return skypilot.task(job, skypilot.SkyOptions(**given), written_by)
    if scheduler == "ray":
        return ray.program(job, ray.RayOptions(**given), written_by)
    kind = given.pop("kind", "job")
    if kind not in ("job", "trainjob"):
        raise UserError(f"kind={kind} is not known; use kind=job or kind=trainjob")
    pod = PodOptions(**given)
    return (job_manifest if kind == "job" else train_job_manifest)(job, pod, written_by)


def _as_json(scheduler: Scheduler, job: Job, why: str, text: str) -> dict[str, object]:
    return {
        "scheduler": scheduler,
        "name": job.name,
        "layout": str(job.run.layout),
        "nodes": job.nodes,
        "min_nodes": job.min_nodes,
        "ranks_per_node": job.ranks_per_node,
        "grace_seconds": job.run.resilience.grace_seconds,
        "notice_seconds": job.notice_seconds,
        "grace": why,
        "port": job.port,
        "text": text,
    }
