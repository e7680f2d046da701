"""Start a training: the ranks of this machine through PyTorch's elastic launcher, or join those already started."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from cuboid.errors import RankError, UserError
from cuboid.launch.place import find_place
from cuboid.launch.pool import fork_server
from cuboid.spec.layout import check
from cuboid.spec.run import Run


def start_training(run: Run, quiet: bool = False) -> float:
    """Train and return the last loss."""
    place = find_place(os.environ)
    if place is None and run.layout.world_size > 1:
        return _launch(run, quiet)
    if place is not None:
        training = run.training
        check(
            run.layout,
            run.model,
            global_batch=training.global_batch,
            sequence=training.sequence,
            world_size=place.world_size,
        )
    from cuboid.launch.rank import run_rank

    return run_rank(run, quiet)


def _launch(run: Run, quiet: bool) -> float:
    os.environ["OMP_NUM_THREADS"] = str(run.training.threads_per_rank)
    # All ranks are here: loopback works whatever the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    fork_server()
    forkserver.ensure_running()  # it imports torch for all ranks while this process imports it for the agent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from cuboid.launch.rank import run_rank

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=run.layout.world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    try:
        losses = elastic_launch(config, run_rank)(run, quiet)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        report = Path(run.output.folder) / f"failure-{rank:05d}.txt"
        lines = report.read_text().strip().splitlines() if report.exists() else []
        reason = lines[-1] if lines else f"it ended with exit code {failure.exitcode}"
        if reason.startswith("cuboid.errors.UserError: "):
            raise UserError(reason.partition(": ")[2]) from None
        where = f"; its traceback is in {report}" if lines else ""
        raise RankError(f"rank {rank} failed: {reason}{where}") from None
    return float(losses[0])
