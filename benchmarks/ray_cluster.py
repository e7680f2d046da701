"""`cuboid launch ray` tried on a local Ray cluster of three nodes with two ranks each: it trains, loses a node, and
continues on the others.

    pip install ray
    python benchmarks/ray_cluster.py            # about two minutes on two cores
    python benchmarks/ray_cluster.py first      # loses the node that the others report to: all begin anew

Ray is no dependency of the tests."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS, ENOUGH = 30, 7
RUN = f"""model = "tiny-llama"
layout = "dp=6"
[training]
steps = {STEPS}
global_batch = 12
sequence = 32
device = "cpu"
[checkpoint]
every = 5
[resilience]
contact_seconds = 8.0
[output]
folder = "run"
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trial(folder: Path, port: int, lost: str) -> None:
    import ray  # type: ignore[import-not-found]
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]
    from ray.util import placement_group_table  # type: ignore[import-not-found]

    from cuboid.cli.main import main

    (folder / "run.toml").write_text(RUN)
    os.chdir(folder)
    options = ["--gpus-per-node", "2", "--min-nodes", "2", "--port", str(port), "--cpus", "2"]
    assert main(["launch", "ray", "run.toml", *options, "-o", "on_ray.py"]) == 0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=2) for _ in range(3))}
    try:
        job = subprocess.Popen([sys.executable, "on_ray.py"], env={**os.environ, "RAY_ADDRESS": cluster.address})
        while job.poll() is None and len(rows(folder)) < ENOUGH:
            time.sleep(0.2)
        assert job.poll() is None, "it ended before a node was lost"
        ray.init(address=cluster.address, log_to_driver=False)
        (placed,) = [table for table in placement_group_table().values() if table["state"] == "CREATED"]
        ray.shutdown()
        cluster.remove_node(nodes[placed["bundles_to_node_id"][0 if lost == "first" else 2]], allow_graceful=False)
        assert job.wait() == 0
    finally:
        cluster.shutdown()
    seen = rows(folder)
    assert [row["step"] for row in seen] == list(range(1, STEPS + 1)), "steps lost or repeated"
    assert seen[-1]["loss"] < seen[0]["loss"]
    print(f"trained {STEPS} steps through the loss of a node: loss {seen[0]['loss']:.3f} -> {seen[-1]['loss']:.3f}")


if __name__ == "__main__":
    with TemporaryDirectory(prefix="cuboid-ray-") as place:
        trial(Path(place), 29500 + os.getpid() % 400, sys.argv[1] if len(sys.argv) > 1 else "last")
