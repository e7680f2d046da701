"""`cuboid launch ray` on a local Ray cluster of three nodes with two ranks each: it trains, loses a node, and continues
on the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from cuboid.spec.run import load_run
from tests.launch.ports import free_port

STEPS, ENOUGH = 8, 3
RUN = f"""model = "tiny-llama"
layout = "dp=6"
[training]
steps = {STEPS}
global_batch = 12
sequence = 16
device = "cpu"
[data]
source = "synthetic"
[checkpoint]
every = 2
[resilience]
contact_seconds = 4.0
[output]
folder = "run"
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("enable_worker_prestart", "prestart_worker_first_driver"):  # workers that nobody asks for
        monkeypatch.setenv(f"RAY_{name}", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.parametrize("lost", [2, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_run_goes_through_the_loss_of_a_node(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, lost: int
) -> None:
    """With the first node goes the one that the others report to: all begin anew from the newest checkpoint."""
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    options = ["--gpus-per-node", "2", "--min-nodes", "2", "--port", str(free_port()), "--cpus", "2"]
    assert main(["launch", "ray", "run.toml", *options, "-o", "on_ray.py"]) == 0
    with (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        job = subprocess.Popen([sys.executable, "on_ray.py"], env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            # The program waits for them.
            nodes = {node.node_id: node for node in (cluster.add_node(wait=False, num_cpus=2) for _ in range(3))}
            while job.poll() is None and len(rows(tmp_path / "run")) < ENOUGH:
                time.sleep(0.1)
            assert job.poll() is None, (tmp_path / "log").read_text()
            ray.init(address=cluster.address, log_to_driver=False)
            (placed,) = [table for table in placement_group_table().values() if table["state"] == "CREATED"]
            ray.shutdown()
            cluster.remove_node(nodes[placed["bundles_to_node_id"][lost]], allow_graceful=False)
            assert job.wait(timeout=300) == 0, (tmp_path / "log").read_text()
        finally:
            job.kill()
    seen = rows(tmp_path / "run")
    assert [row["step"] for row in seen] == list(range(1, STEPS + 1)), "no step is lost or repeated"
    undisturbed = load_run(tmp_path / "run.toml", ["layout=dp=2", f"output.folder={tmp_path / 'undisturbed'}"])
    pool.run("tests.training.cases:train_rank", (undisturbed,), ranks=2)
    losses = [row["loss"] for row in rows(tmp_path / "undisturbed")]
    assert [row["loss"] for row in seen] == pytest.approx(losses, rel=1e-4)
    log_text = (tmp_path / "log").read_text()
    assert "3 nodes: the run's own layout" in log_text and "2 nodes: " in log_text
