"""Islands: what they learn, what a slow link costs them, and what becomes of them when one is killed.

    python benchmarks/islands.py learning --steps 200 --islands 4 --every 16     # loss at equal tokens, islands and dp
    python benchmarks/islands.py learning --model 12M --steps 600 --seeds 3      # the same of 12 million parameters
    python benchmarks/islands.py links --rates 10mbit,50mbit,200mbit             # hosts on limited links; needs root
    python benchmarks/islands.py kill --steps 400                                # island 1 is killed, and started again

Each prints a line of JSON for each run. Islands are `cuboid train` processes, one rank each unless `--layouts` says
otherwise, and meet on loopback; with `links` each has a network namespace of its own. Losses are means over the last
tenth of the steps, and over islands; the text is the source of Python's standard library. `computing` is the fraction
of time in which a training step was computed, from the second interval on."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import Hosts

SIZES = {
    "tiny": ["model.layers=2"],
    "12M": ["model.layers=8", "model.hidden=384", "model.ffn=1024", "model.heads=6", "model.kv_heads=6"],
}
CUBOID = [sys.executable, "-m", "cuboid.cli.main"]


def settings(options: argparse.Namespace, seed: int, batch: int) -> list[str]:
    made = [
        *SIZES[options.model],
        f"training.steps={options.steps}",
        f"training.seed={seed}",
        f"training.global_batch={batch}",
        f"training.sequence={options.sequence}",
        f"training.device={options.device}",
        f"learning_rate.peak={options.peak}",
        "output.log_every=1000000",
        "output.health=false",
    ]
    return [part for each in made for part in ("--set", each)]


def islands(options: argparse.Namespace) -> list[str]:
    table = {"count": options.islands, "every": options.every, "fragments": options.fragments, "delay": options.delay}
    table |= {"bits": options.bits, "rate": options.rate, "grace_seconds": options.grace, "momentum": options.momentum}
    return [part for name, value in table.items() for part in ("--set", f"islands.{name}={value}")]


def layout_of(options: argparse.Namespace, number: int) -> str:
    layouts = options.layouts.split(";")
    return str(layouts[number % len(layouts)]).strip()


def command(options: argparse.Namespace, folder: Path, number: int, place: str, seed: int) -> list[str]:
    return [
        *CUBOID,
        *("train", "--layout", layout_of(options, number), "--oversubscribe"),
        *settings(options, seed, options.batch),
        *islands(options),
        *("--set", f"output.folder={folder}", "--island", str(number), "--islands-rendezvous", place),
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_open(place: str) -> None:
    host, _, port = place.partition(":")
    while True:
        with suppress(OSError):
            socket.create_connection((host, int(port))).close()
            return
        time.sleep(0.05)


def environment() -> dict[str, str]:
    return {**os.environ, "CUBOID_SECRET": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}


def rows(folder: Path, number: int | None = None) -> list[dict[str, Any]]:
    path = (folder if number is None else folder / f"island-{number}") / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.wait():
            raise SystemExit(f"island failed with exit code {process.returncode}")


def last_loss(found: list[dict[str, Any]]) -> float:
    return statistics.fmean(row["loss"] for row in found[-max(1, len(found) // 10) :])


def learning(options: argparse.Namespace, folder: Path) -> None:
    for seed in range(options.seeds):
        plain = folder / f"dp-{seed}"
        batch = options.batch * options.islands
        finish(
            [subprocess.Popen([*CUBOID, "train", *settings(options, seed, batch), "--set", f"output.folder={plain}"])]
        )
        own, place = folder / f"islands-{seed}", f"127.0.0.1:{free_port()}"
        known = environment()
        finish(
            [
                subprocess.Popen(command(options, own, number, place, seed), env=known)
                for number in range(options.islands)
            ]
        )
        losses = [last_loss(rows(own, number)) for number in range(options.islands)]
        reference, found = last_loss(rows(plain)), statistics.fmean(losses)
        told = {"seed": seed, "dp": reference, "islands": found, "over_dp": found / reference - 1}
        print(json.dumps({**told, "every": options.every, "bits": options.bits, "count": options.islands}), flush=True)


def computing(found: list[dict[str, Any]], skip: int) -> float:
    """The fraction of time in which steps were computed."""
    later = found[skip:]
    return sum(row["seconds"] for row in later[1:]) / (later[-1]["time"] - later[0]["time"])


def links(options: argparse.Namespace, folder: Path) -> None:
    for rate in options.rates.split(","):
        own, known = folder / rate, environment()
        with Hosts(options.islands, rate) as hosts:
            place = f"{hosts.address(0)}:29500"
            finish(
                [
                    hosts.run(number, command(options, own, number, place, 0), env=known)
                    for number in range(options.islands)
                ]
            )
        found = [rows(own, number) for number in range(options.islands)]
        told = [each["islands"] for each in found[0] if "islands" in each]
        fractions = [round(computing(each, options.every), 4) for each in found]
        sent = sum(each["sent_bytes"] for each in told)
        step = statistics.median(row["seconds"] for row in found[0])
        print(json.dumps({"rate": rate, "computing": fractions, "sent_bytes": sent, "step_seconds": step}), flush=True)


def kill(options: argparse.Namespace, folder: Path) -> None:
    place, known = f"127.0.0.1:{free_port()}", environment()
    start = [command(options, folder, number, place, 0) for number in range(options.islands)]
    running = [subprocess.Popen(start[0], env=known, start_new_session=True)]
    wait_until_open(place)  # island 0 decides for all: it is not the one that is killed
    running += [subprocess.Popen(each, env=known, start_new_session=True) for each in start[1:]]
    while len(rows(folder, 1)) < options.steps // 3:
        time.sleep(0.05)
    os.killpg(running[1].pid, signal.SIGKILL)
    killed = time.time()
    while len(rows(folder, 0)) < options.steps // 3 + options.every and running[0].poll() is None:
        time.sleep(0.05)
    running[1] = subprocess.Popen([*start[1], "--overwrite"], env=known, start_new_session=True)
    for process in running:
        process.wait()
    found, again = rows(folder, 0), rows(folder, 1)
    gaps = [later["time"] - row["time"] for row, later in pairwise(found)]
    told = {"longest_gap": max(gaps), "median_gap": statistics.median(gaps), "grace_seconds": options.grace}
    after = next((row["step"] for row in found if row["time"] > killed), 0)
    first = again[0]["step"] if again else None
    print(json.dumps({**told, "killed_after": after, "came_back_at": first, "steps": len(found)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learning", "links", "kill"))
    parser.add_argument("--model", choices=SIZES, default="tiny")
    for name, value in (("islands", 2), ("steps", 40), ("every", 8), ("fragments", 2), ("delay", 2), ("bits", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 4), ("sequence", 64), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, number in (("rate", 0.7), ("momentum", 0.9), ("grace", 5.0), ("peak", 1e-3)):
        parser.add_argument(f"--{name}", type=float, default=number)
    parser.add_argument("--rates", default="50mbit")
    parser.add_argument("--layouts", default="dp=1", help="of the islands in turn, semicolons between them")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cuboid-islands-"))
    try:
        {"learning": learning, "links": links, "kill": kill}[options.what](options, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
