"""A run as a task of SkyPilot, for its managed jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from textwrap import indent

from cuboid.errors import UserError
from cuboid.launch.jobs.job import Job
from cuboid.launch.jobs.kubernetes import GATHER, quoted
from cuboid.resilience.preemption import REQUEUE
from cuboid.secure_channel import VALUE

NAMES = {
    "v100-16g": "V100",
    "v100-32g": "V100-32GB",
    "a100-40g": "A100",
    "a100-80g": "A100-80GB",
    "h100-80g": "H100",
    "h200": "H200",
    "b200": "B200",
}
"""Accelerators of the catalog -> what SkyPilot's catalog calls them."""
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}
"""Kind of store -> the package with which fsspec reaches it."""


@dataclass(frozen=True, kw_only=True)
class SkyOptions:
    bucket: str = ""
    """Where checkpoints go, such as s3://bucket/run; default: checkpoint.folder of the run file is such an address."""
    accelerator: str = ""
    """As SkyPilot calls it; default: that of the plan."""
    infra: str = ""
    image: str = ""
    spot: bool = False
    cpus: int | None = None
    setup: str = ""


def task(job: Job, options: SkyOptions, written_by: str) -> str:
    """The whole file."""
    address = _store(job, options)
    if options.bucket:
        job = replace(job, overrides=(*job.overrides, f"checkpoint.folder={address}"))
    if job.min_nodes < job.nodes:
        job = job.waiting(gather_seconds=GATHER)
    setup = options.setup or f"pip install cuboid {DRIVERS.get(address.partition('://')[0], '')}".strip()
    meet = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' if job.nodes > 1 else ""
    return f"""# {job.summary}
# {job.placement}
# Written by: {written_by}
# Start it where the run file is:  sky jobs launch FILE{_passed(job)}
name: {job.name}
num_nodes: {job.nodes}
# The run file and what lies beside it; a machine's own disk goes with it, so checkpoints go to
# {address}
workdir: .
resources:
{indent(_resources(job, options), "  ")}
  job_recovery:
    # Machines that are taken away are sought anew, wherever there are some; a failing job is tried so often.
    max_restarts_on_errors: {job.run.resilience.restarts}
    # Told to stop, saved: start me again, and do not count it.
    recover_on_exit_codes: [{REQUEUE}]
{_secret(job)}setup: |
{indent(setup, "  ")}
run: |
{indent(f"{meet}exec {job.shell_command}", "  ")}
"""


def _passed(job: Job) -> str:
    return f" --secret {VALUE}=$(openssl rand -hex 32)" if job.nodes > 1 else ""


def _secret(job: Job) -> str:
    if job.nodes == 1:
        return ""
    why = "# What supervisors prove to one another that they know; given when the job is started, and in no file."
    return f"{why}\nsecrets:\n  {VALUE}: null\n"


def _store(job: Job, options: SkyOptions) -> str:
    address = options.bucket or job.run.checkpoint.folder
    if not re.fullmatch(r"[a-z0-9]+://\S+", address):
        field = "bucket" if options.bucket else "checkpoint.folder"
        raise UserError(f'{field}="{address}" is lost with a machine; use --bucket s3://bucket/run')
    return address


def _resources(job: Job, options: SkyOptions) -> str:
    lines = [f"infra: {quoted(options.infra)}"] if options.infra else []
    if job.gpus:
        lines.append(f"accelerators: {quoted(f'{_accelerator(job, options)}:{job.ranks_per_node}')}")
    else:
        lines.append(f'cpus: "{options.cpus or job.ranks_per_node * job.run.training.threads_per_rank}+"')
    if options.image:
        lines.append(f"image_id: {quoted('docker:' + options.image.removeprefix('docker:'))}")
    if options.spot:
        lines.append("use_spot: true")
    return "\n".join(lines)


def _accelerator(job: Job, options: SkyOptions) -> str:
    name = options.accelerator or NAMES.get(job.accelerator, "")
    if not name:
        known = (
            f"accelerator={job.accelerator} has no known name" if job.accelerator else "the accelerator is not known"
        )
        raise UserError(f"{known} for SkyPilot; use --accelerator H100 or another of `sky show-gpus`")
    return name
