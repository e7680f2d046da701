"""Does the planner, given `cuboid probe` of a cluster, rank layouts as they measure? Four hosts in network namespaces
with rate-limited links, two ranks on each: tensor, pipeline or data parallelism across the hosts, at two rates.

    python benchmarks/links.py
    python benchmarks/links.py --rates 40mbit 2gbit --seconds 60 --rounds 3

Every host runs `cuboid probe`; the profile then predicts a step of each layout, and each is trained for a few steps,
one layout after another in every round. Needs root, for `ip netns` and `tc`."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from hosts import INTERFACE, Hosts

from cuboid.planning.choose import predict
from cuboid.planning.question import Question
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run

HOSTS, RANKS = 4, 2
LAYOUTS = {"tensor": "tp=8", "pipeline": "pp=8", "data": "dp=8"}
"""What crosses the hosts -> the layout."""
MODEL = {"hidden": 256, "layers": 8, "heads": 8, "ffn": 704, "vocab": 1024, "family": "llama"}
BATCH, SEQUENCE = 8, 16


def the_run(layout: str) -> Run:
    """Many parameters and few tokens: gradients are many bytes in few pieces, activations few bytes in many. Slow
    links hurt data parallelism, and what every piece costs on fast ones hurts tensor parallelism."""
    parsed = Layout.parse(layout)
    sizes = {"global_batch": BATCH, "sequence": SEQUENCE, "precision": "float32", "device": "cpu"}
    return build_run(
        {
            "model": dict(MODEL),
            "layout": f"{layout},micro_batch={BATCH // parsed.dp}",
            "training": sizes,
            "data": {"source": "synthetic"},
        }
    )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MIMALLOC_PURGE_DELAY": "-1", "GLOO_SOCKET_IFNAME": INTERFACE}


def cuboid(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cuboid.cli.main", *arguments]


def wait_for(processes: list[subprocess.Popen[Any]]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a process ended with {max(codes, key=abs)}")


def probe(hosts: Hosts, seconds: float, output: Path) -> None:
    """On all hosts at once; the first one leads and writes the profile."""
    words = ["probe", "--nodes", str(HOSTS), "--ranks", str(RANKS), "--seconds", str(seconds), "--device", "cpu"]
    words += ["--rendezvous", f"{hosts.address(0)}:29400", "--interface", INTERFACE, "-o", str(output)]
    quiet = {"env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    wait_for([hosts.run(host, cuboid(*words), **quiet) for host in range(HOSTS)])


class Ranks:
    """Rank processes in the hosts, which train one layout after another."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._port = 30000
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
        command = [sys.executable, __file__, "--rank"]
        self._started = [
            hosts.run(rank // RANKS, [*command, str(rank)], **pipes) for rank in range(HOSTS * RANKS)
        ]  # they end with their input

    def measure(self, layout: str, steps: int) -> list[float]:
        """Seconds of each step but the first."""
        self._port += 1
        job = {"layout": layout, "steps": steps, "address": f"tcp://{self._hosts.address(0)}:{self._port}"}
        for process in self._started:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._started]
        return cast(list[float], json.loads(answers[0]))


def rank_process(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from cuboid.data.loader import micro_batches
    from cuboid.data.source import make_source
    from cuboid.parallel.parallelize import build_engine
    from cuboid.training.optimizer import Optimizer
    from cuboid.training.step import train_step

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        run = the_run(job["layout"])
        dist.init_process_group("gloo", init_method=job["address"], rank=rank, world_size=HOSTS * RANKS)
        engine = build_engine(run, rank, torch.device("cpu"))
        optimizer = Optimizer(engine, run.optimizer)
        seconds = []
        for step in range(job["steps"] + 1):
            batches = micro_batches(make_source(run), run, step, engine.groups.coordinates.dp, torch.device("cpu"))
            dist.barrier()
            start = time.perf_counter()
            train_step(engine, optimizer, batches, 1e-4)
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        dist.destroy_process_group()
        print(json.dumps(seconds[1:]), flush=True)


def predicted(profile: Path) -> dict[str, tuple[float, dict[str, float]]]:
    """Seconds of a step, and where they go."""
    found = {}
    for name, layout in LAYOUTS.items():
        run = the_run(layout)
        question = Question(
            model=run.model,
            cluster=load_cluster(str(profile)),
            global_batch=BATCH,
            sequence=SEQUENCE,
            precision="float32",
        )
        plan = predict(question, run.layout)
        found[name] = plan.seconds, {part: seconds for part, seconds in plan.parts.items() if seconds > 1e-3}
    return found


def ranked(seconds: dict[str, float]) -> str:
    return " < ".join(f"{name} {seconds[name]:.3g} s" for name in sorted(seconds, key=lambda name: seconds[name]))


def main() -> None:
    os.environ.setdefault("CUBOID_SECRET", secrets.token_hex(32))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "4gbit"], help="of every host's link, as tc writes it")
    parser.add_argument("--seconds", type=float, default=60, help="of the probe")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each layout in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help="write the profiles into this folder")
    options = parser.parse_args()
    if options.rank is not None:
        rank_process(options.rank)
        return
    orders = []
    with tempfile.TemporaryDirectory() as scratch, Hosts(HOSTS) as hosts:
        ranks = Ranks(hosts)
        for rate in options.rates:
            hosts.set_rate(rate)
            profile = (options.keep or Path(scratch)) / f"hosts-{rate}.toml"
            probe(hosts, options.seconds, profile)
            foretold = predicted(profile)
            times: dict[str, list[float]] = {name: [] for name in LAYOUTS}
            for _ in range(options.rounds):
                for name, layout in LAYOUTS.items():
                    times[name] += ranks.measure(layout, options.steps)
            seen = {name: statistics.median(values) for name, values in times.items()}
            planned = {name: seconds for name, (seconds, _) in foretold.items()}
            print(f"{rate}\n  measured  {ranked(seen)}\n  predicted {ranked(planned)}")
            for name, (_, parts) in foretold.items():
                spread = f"{min(times[name]):.3g} to {max(times[name]):.3g} s"
                told = ", ".join(f"{part} {seconds:.3g}" for part, seconds in parts.items())
                print(f"    {name} ({LAYOUTS[name]}): measured {spread}; predicted {told}", flush=True)
            orders.append([sorted(table, key=lambda name: table[name]) for table in (seen, planned)])
    right = sum(measured == planned for measured, planned in orders)
    print(f"the planner's order is the measured one at {right} of {len(orders)} rates")
    print(f"measured orders differ: {'yes' if len({tuple(measured) for measured, _ in orders}) > 1 else 'no'}")


if __name__ == "__main__":
    main()
