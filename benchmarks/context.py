"""Ring, Ulysses and all-gather against the planner: one attention layer, forward and backward, on ranks in network
namespaces of their own whose links are limited to a rate. Needs root, for `ip netns` and `tc`.

    python benchmarks/context.py
    python benchmarks/context.py --rates 100 1000 --lengths 1024 4096
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from cuboid.cost.constants import Fabric, engine_named
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.cost.layers import waiting
from cuboid.spec.layout import ContextMethod, Layout
from cuboid.spec.model import load_model

RANKS, HEAD_DIM = 4, 32
METHODS: tuple[ContextMethod, ...] = ("ring", "ulysses", "allgather")
HEADS = {"8 key-value heads": (8, 8), "2 key-value heads": (8, 2)}
REPEATS = 3


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def links() -> Iterator[None]:
    """A bridge, and a namespace with one interface on it for each rank."""
    run("ip", "link", "add", "cuboid0", "type", "bridge")
    try:
        run("ip", "link", "set", "cuboid0", "up")
        for rank in range(RANKS):
            name, outer = f"cuboid-rank{rank}", f"cuboidv{rank}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", outer, "master", "cuboid0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for rank in range(RANKS):
            subprocess.run(["ip", "netns", "del", f"cuboid-rank{rank}"], capture_output=True)
        subprocess.run(["ip", "link", "del", "cuboid0"], capture_output=True)


def limit(megabits: int) -> None:
    """What each rank may send."""
    for rank in range(RANKS):
        words = ["tc", "-n", f"cuboid-rank{rank}", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        run(*words, "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")


def measure(lengths: list[int], port: int) -> dict[str, float]:
    """Seconds by case, from processes in the namespaces."""
    started = []
    for rank in range(RANKS):
        words = ["ip", "netns", "exec", f"cuboid-rank{rank}", sys.executable, __file__, "--rank", str(rank)]
        words += ["--port", str(port), "--lengths", *map(str, lengths)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True))
    outputs = [process.communicate()[0] for process in started]
    return cast(dict[str, float], json.loads(outputs[0].splitlines()[-1]))


def rank_process(rank: int, port: int, lengths: list[int]) -> None:
    import torch
    import torch.distributed as dist

    from cuboid.model.rope import Positions
    from cuboid.parallel.context import ContextMix
    from cuboid.parallel.groups import make_groups

    dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    nowhere = cast(Positions, SimpleNamespace(documents=None))
    found: dict[str, float] = {}
    for method in METHODS:
        groups = make_groups(
            Layout(cp=RANKS, cp_method=method), rank, 1, embedding_on_two_ranks=False, experts=False, on_cpu=True
        )
        mix = ContextMix(groups, gathers=method == "allgather")
        for name, (heads, shared) in HEADS.items():
            for length in lengths:
                shapes = [(1, length // RANKS, count, HEAD_DIM) for count in (heads, shared, shared)]
                times = []
                for _ in range(REPEATS):
                    parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
                    dist.barrier()
                    start = time.perf_counter()
                    mix(*parts, nowhere).sum().backward()
                    dist.barrier()
                    times.append(time.perf_counter() - start)
                found[f"{name}/{length}/{method}"] = min(times)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def predicted(length: int, heads: int, shared: int, megabits: int, compute: float) -> dict[str, float]:
    """Seconds of the layer by the planner's formulas, its computing as measured on links without a limit."""
    jobs = Jobs.of([Layout(cp=RANKS, cp_method=method) for method in METHODS], global_batch=1, sequence=length)
    model = replace(load_model("tiny-llama"), heads=heads, kv_heads=shared, head_dim=HEAD_DIM, hidden=heads * HEAD_DIM)
    rate = megabits * 1e6 / 8
    fabric = Fabric(name="link", inner_bandwidth=rate, outer_bandwidth=rate, inner_latency=0, outer_latency=0, node=1)
    engine = replace(engine_named("cuboid"), activation_wire=4.0)
    # A backward pass of attention multiplies five matrices where the forward pass multiplies two.
    core = (number(compute * 2 / 7), number(compute * 5 / 7))
    forward, backward = waiting(engine, fabric, Shape.of(model), jobs, core)
    return dict(zip(METHODS, (forward + backward + compute).tolist(), strict=True))


def ranked(seconds: dict[str, float]) -> str:
    return " < ".join(f"{name} {seconds[name]:.3f}" for name in sorted(METHODS, key=lambda name: seconds[name]))


def compare(rates: list[int], lengths: list[int]) -> None:
    agreed = cases = 0
    with links():
        free = measure(lengths, 29500)
        for turn, megabits in enumerate(rates):
            limit(megabits)
            found = measure(lengths, 29501 + turn)
            for name, (heads, shared) in HEADS.items():
                for length in lengths:
                    compute = min(free[f"{name}/{length}/{method}"] for method in METHODS)
                    measured = {method: found[f"{name}/{length}/{method}"] for method in METHODS}
                    planned = predicted(length, heads, shared, megabits, compute)
                    best = min(METHODS, key=lambda method: planned[method])
                    # A choice within a tenth of the fastest is as good as that.
                    right = measured[best] <= 1.1 * min(measured.values())
                    agreed, cases = agreed + right, cases + 1
                    print(f"{megabits} Mbit/s, {length} tokens, {name}: computing {compute:.3f} s")
                    print(f"  measured {ranked(measured)}\n  planned  {ranked(planned)}{'' if right else '  <- other'}")
    print(f"the planner's choice is the fastest, or within a tenth of it, in {agreed} of {cases} cases")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 1000], help="megabits per second and rank")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="tokens of the sequence")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_process(options.rank, options.port, options.lengths)
    else:
        compare(options.rates, options.lengths)


if __name__ == "__main__":
    main()
