"""The job file of `cuboid launch slurm` under a real Slurm: two nodes on this machine, told to stop on the way.

sudo apt-get install slurmctld slurmd slurm-client munge shellcheck
sudo .venv/bin/python benchmarks/slurm.py

Two slurmd's stand for two nodes (they share this machine's addresses). A job of two supervisors with two ranks each is
checked by `sbatch --test-only` and shellcheck, submitted, told to stop by the signal that Slurm sends before a job's
time is over, found requeued with its checkpoint written, and found finished with the losses of a run that nobody
disturbed; a second job is cancelled, and stays so. Nothing of an installed Slurm is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CUBOID = [sys.executable, "-m", "cuboid.cli.main"]
HERE = Path(__file__).parents[1]
STEPS = 60
RUN = f"""
model = "tiny-llama"
layout = "dp=2,tp=2"
[training]
steps = {STEPS}
global_batch = 4
sequence = 16
device = "cpu"
[checkpoint]
every = 1000
[output]
folder = "FOLDER"
"""


def configuration(folder: Path, names: tuple[str, str]) -> str:
    """Of a cluster of two nodes on one machine."""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=500"
        for name, port in zip(names, (17821, 17822), strict=True)
    )
    return f"""ClusterName=lab
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort=17817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def process(*command: str, log: Path) -> Iterator[None]:
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield
    finally:
        started.terminate()
        started.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """A Slurm of its own, with its own key; `SLURM_CONF` leads to it."""
    names = (socket.gethostname(), "localhost")  # both of which can be found on the network
    (folder / "slurm.conf").write_text(configuration(folder, names))
    for name in ("state", *(f"spool.{node}" for node in names)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            stack.enter_context(process(*command, log=folder / f"{name}.log"))

        start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait("the key service", lambda: (folder / "munge.socket").exists())
        start("slurmctld", "slurmctld", "-D", "-c")
        for node in names:
            start(f"slurmd.{node}", "slurmd", "-D", "-N", node)
        wait("two idle nodes", lambda: slurm("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")
        yield


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def wait(what: str, happened: Callable[[], bool], limit: float = 300) -> float:
    """Seconds until then."""
    start = time.monotonic()
    while not happened():
        if time.monotonic() > start + limit:
            raise SystemExit(f"{what}: not seen within {limit:g} s")
        time.sleep(0.2)
    return time.monotonic() - start


def state(job: str) -> dict[str, str]:
    words = slurm("scontrol", "-o", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


def prepare(folder: Path, name: str) -> Path:
    """A run file with its job file, in a folder of its own."""
    place = folder / name
    place.mkdir()
    (place / "run.toml").write_text(RUN.replace("FOLDER", "out"))
    options = ["--nodes", "2", "--time", "10", "--grace", "60", "-o", "job.sbatch"]
    subprocess.run([*CUBOID, "launch", "slurm", "run.toml", *options], cwd=place, check=True)
    return place


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        command = folder / "bin/cuboid"
        command.write_text(f'#!/bin/bash\nexec "{sys.executable}" -m cuboid.cli.main "$@"\n')
        command.chmod(0o755)
        os.environ.update(PATH=f"{folder}/bin:{os.environ['PATH']}", PYTHONPATH=str(HERE))
        alone = prepare(folder, "alone")
        subprocess.run([*CUBOID, "train", "run.toml"], cwd=alone, check=True, stdout=subprocess.DEVNULL)
        with cluster(folder):
            told(prepare(folder, "told"), losses(alone / "out"))
            cancelled(prepare(folder, "cancelled"))


def submit(place: Path) -> str:
    job = subprocess.run(["sbatch", "--parsable", "job.sbatch"], cwd=place, capture_output=True, text=True, check=True)
    return job.stdout.strip()


def told(place: Path, expected: list[float]) -> None:
    """Stopped by the signal of --signal=, requeued, finished."""
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "job.sbatch"], cwd=place, check=True)
        print("shellcheck: nothing to say")
    tested = subprocess.run(["sbatch", "--test-only", "job.sbatch"], cwd=place, capture_output=True, text=True)
    print(tested.stderr.strip())
    assert tested.returncode == 0
    number = submit(place)
    log = place / f"tiny-llama-{number}.log"
    try:
        seconds = wait("steps", lambda: len(losses(place / "out")) > 5)
        print(f"two nodes of two ranks: six steps after {seconds:.1f} s")
        slurm("scancel", "--signal=USR1", number)
        seconds = wait("the requeue", lambda: state(number).get("Restarts") == "1")
        done = len(losses(place / "out"))
        assert 5 < done < STEPS, f"{done} of {STEPS} steps were done: nothing was cut short"
        print(f"told to stop: saved and requeued after {seconds:.1f} s, at step {done}")
        slurm("scontrol", "update", f"jobid={number}", "starttime=now")
        wait("the end", lambda: state(number).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED"))
        assert state(number)["JobState"] == "COMPLETED", state(number)
        seen = losses(place / "out")
        assert len(seen) == STEPS
        assert seen == expected, "the losses are not those of the run that nobody disturbed"
        print(f"requeued: finished all {STEPS} steps; every loss as in a run on one machine that nobody disturbed")
    except BaseException:
        print(log.read_text() if log.exists() else "no log")
        raise


def cancelled(place: Path) -> None:
    """Stays cancelled, and has saved all the same."""
    number = submit(place)
    wait("steps", lambda: len(losses(place / "out")) > 5)
    slurm("scancel", number)
    wait("the end", lambda: not slurm("squeue", "-h", "-j", number))
    assert state(number)["JobState"] == "CANCELLED", state(number)
    saved = sorted(path.name for path in (place / "out/checkpoints").glob("step-*"))
    print(f"cancelled: stays so, with {', '.join(saved) or 'nothing'} saved")


if __name__ == "__main__":
    main()
