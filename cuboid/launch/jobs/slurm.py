"""A run as an sbatch script."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cuboid.errors import UserError
from cuboid.launch.jobs.job import REFUSED, Job
from cuboid.resilience.preemption import REQUEUE
from cuboid.secure_channel import VALUE

REJOIN = 300.0
"""Seconds that nodes wait for one that is gone: Slurm brings none back before the job is queued again."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    time: str = ""
    """As Slurm spells it: 24:00:00, 2-12, 90; default: the partition's own limit."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    setup: str = ""
    """A line of shell before the training, such as `source .venv/bin/activate`."""

    def __post_init__(self) -> None:
        if self.time and not re.fullmatch(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}", self.time):
            raise UserError(f"time={self.time} is not a time of Slurm; use hours:minutes:seconds, such as 24:00:00")
        for name in ("partition", "account", "qos", "constraint"):
            if re.search(r"\s", getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)!r} has a space in it; use the name {name} has in Slurm")


def script(job: Job, options: SlurmOptions, written_by: str) -> str:
    """The whole file; `written_by` is the command that writes it again."""
    if job.nodes > 1:
        job = job.waiting(rejoin_seconds=REJOIN)
    parts = [_head(job, written_by), _directives(job, options), _body(job, options)]
    return "\n".join(parts)


def _head(job: Job, written_by: str) -> str:
    return f"""#!/bin/bash
# {job.summary}
# {job.placement}
# Written by: {written_by}
# Submit it where the run file is, on a file system that all nodes share:  sbatch FILE
# Let it save and wait for its turn again:  scancel --signal=USR1 JOB     End it:  scancel JOB"""


def _directives(job: Job, options: SlurmOptions) -> str:
    named = {name: getattr(options, name) for name in ("partition", "account", "qos", "constraint")}
    lost = "without enough of its nodes" if job.min_nodes < job.nodes else "without a node"
    lines = [
        f"#SBATCH --job-name={job.name}",
        *(f"#SBATCH --{name}={value}" for name, value in named.items() if value),
        f"#SBATCH --time={options.time}" if options.time else "# No --time: the limit of the partition holds.",
        f"#SBATCH --nodes={job.nodes}",
        "# One task a node: its supervisor, which starts the node's ranks and starts them again when one fails.",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.ranks_per_node}"] if job.gpus else []),
        "# A training uses nodes whole: the cores that ranks share, and all the memory.",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        f"# {job.notice_seconds} s before its time is over every process is told; the training saves and leaves.",
        f"#SBATCH --signal=USR1@{job.notice_seconds}",
        f"# Preempted, or {lost}, the job waits for its turn again and resumes from its checkpoint.",
        "#SBATCH --requeue",
        *(
            ["# A lost node does not end the job: those that are left continue.", "#SBATCH --no-kill"]
            if job.min_nodes < job.nodes
            else []
        ),
        "# A requeued job writes on in the same log.",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={job.name}-%j.log",
    ]
    return "\n".join(lines) + "\n"


def _body(job: Job, options: SlurmOptions) -> str:
    setup = f"{options.setup}\n" if options.setup else ""
    host = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n' if job.nodes > 1 else ""
    if job.nodes > 1:
        host += (
            "# What supervisors prove to one another that they know; srun hands it to each of them.\n"
            f"export {VALUE}=\"${{{VALUE}:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}}\"\n"
        )
    return f"""set -u
cd "$SLURM_SUBMIT_DIR" || exit 1
{setup}{host}
# Supervisors end when they agree to, not with the first of them; ranks share all cores of a node (--cpu-bind=none).
{_elastic_step(job) if job.min_nodes < job.nodes else _step(job)}
# {REQUEUE} means: told to stop, saved, start me again. (scancel ends this script too, and so the job for good.)
if [ "$code" -eq {REQUEUE} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _step(job: Job) -> str:
    return f"""srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \\
  {job.shell_command}
code=$?
"""


def _elastic_step(job: Job) -> str:
    return f"""# Supervisors that were not killed say how the job ended; srun would say how a lost one did.
verdict="$PWD/.{job.name}-$SLURM_JOB_ID.code"
rm -f "$verdict".*
# shellcheck disable=SC2016  # the words in quotes are for the shell of each node
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \\
  bash -c 'trap : TERM USR1; "${{@:2}}"; c=$?; [ "$c" -gt 128 ] || echo "$c" >"$1.$SLURM_NODEID"; exit "$c"' \\
  supervisor "$verdict" \\
  {job.shell_command}
code=1
for ended in {REFUSED} {REQUEUE} 0; do  # a node that was cut off to the end failed; the job did not
  grep -qxs "$ended" "$verdict".* && code=$ended
done
rm -f "$verdict".*
"""
