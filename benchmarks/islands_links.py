"""What a slow link costs islands, beside what the planner says of it.

    python benchmarks/islands.py links --json links.jsonl                        # needs root: hosts are namespaces
    python benchmarks/islands.py links --rates 50mbit --every 8,32 --delay 4     # some of it
    python benchmarks/islands.py links --table links.jsonl

Two islands, each on a host with a limited link, train a model of 3 million parameters in steps that take `--step`
seconds, padded by sleeping, so that the CPU is free for what is measured. `computing` is the fraction of time in which
a step was computed, after the first interval, that of the island that computes least. The prediction gets from the
measured run the seconds of a step and of what stops the training in each round, and from runs without limits, before
and after those of a link, how long a round usually takes beside the transfer; bytes, link and waiting are its own.
`dp_slower`: how many times slower the link is than data parallelism needs for the same share, if all of its bf16
gradients' traffic could hide behind its steps."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import Hosts, bytes_per_second
from islands_jobs import command, environment, finish, options_of, rows, rows_of, tell

from cuboid.cost.rounds import predict_computing
from cuboid.spec.block_owners import wire_bytes
from cuboid.spec.run import Run, build_run

LATENCY = 5e-5
"""Of two namespaces joined by a bridge, in one direction."""
FREE = "none"


def settings_of(every: int, options: argparse.Namespace) -> dict[str, object]:
    return {
        "model.layers": 4,
        "model.hidden": 256,
        "model.ffn": 704,
        "training.steps": max(options.intervals * every, 64),
        "training.global_batch": 1,
        "training.sequence": 16,
        "training.device": "cpu",
        "islands.count": 2,
        "islands.every": every,
        "islands.fragments": options.fragments,
        "islands.delay": min(options.delay, every - 1),
        "islands.bits": options.bits,
    }


def run_of(settings: dict[str, object]) -> Run:
    return build_run({"model": "tiny-llama"}, [f"{name}={value}" for name, value in settings.items()])


def measured(rate: str, every: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of the steps after the first interval."""
    settings = settings_of(every, options)
    known = environment(options.step)
    with tempfile.TemporaryDirectory(prefix="cuboid-links-") as name, Hosts(2, None if rate == FREE else rate) as hosts:
        folder, log = Path(name), Path(name) / "log"
        with log.open("w") as output:
            place = f"{hosts.address(0)}:29500"
            how: dict[str, Any] = {"env": known, "stdout": output, "stderr": subprocess.STDOUT}
            started = [hosts.run(each, command(folder, each, place, settings), **how) for each in range(2)]
            finish(started, log)
        found = [rows(folder, each) for each in range(2)]
    sides = [_one(each, every) for each in found]
    worst = min(sides, key=lambda side: side["computing"])
    return {"rate": rate, "every": every, "steps": int(str(settings["training.steps"])), **worst}


def _one(found: list[dict[str, Any]], skip: int) -> dict[str, float]:
    later = found[skip - 1 :]
    elapsed, seconds = later[-1]["time"] - later[0]["time"], sum(row["seconds"] for row in later[1:])
    told = [row["islands"] for row in later[1:] if "islands" in row]
    waited = sum(each["waited"] for each in told)
    between = sum(max(0.0, row["time"] - before["time"] - row["seconds"]) for before, row in pairwise(later))
    return {
        "computing": seconds / elapsed,
        "step_seconds": statistics.fmean(row["seconds"] for row in later[1:]),
        "waited": waited / max(len(told), 1),
        "usually": statistics.median(each["waited"] for each in told) if told else 0.0,
        "stops": max(0.0, between - waited) / max(len(told), 1),
        "sent_bytes": sum(each["sent_bytes"] for each in told),
        "rounds": len(told),
    }


def predicted(row: dict[str, Any], beside: float, options: argparse.Namespace) -> float:
    """`beside`: seconds of a round that are not the transfer."""
    run = run_of(settings_of(row["every"], options))
    spec = run.islands
    sizes = [float(wire_bytes(run, fragment, 0, run)[0]) for fragment in range(spec.fragments)]
    return predict_computing(
        fragment_bytes=sizes,
        islands=2,
        link_bytes_per_second=bytes_per_second(row["rate"]),
        latency=LATENCY,
        step_seconds=row["step_seconds"],
        every=spec.every,
        fragments=spec.fragments,
        delay=spec.delay,
        apply_seconds=row["stops"],
        outer_seconds=beside,
        steps=row["steps"],
        skip=row["every"],
    ).computing


def slower_than_dp(row: dict[str, Any], options: argparse.Namespace) -> float:
    """Two replicas each send all gradients once, in as long as a step takes and it may wait."""
    parameters = run_of(settings_of(row["every"], options)).model.parameters
    return 2 * parameters / (row["step_seconds"] / row["computing"]) / bytes_per_second(row["rate"])


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| link | every | delay | bits | computing, % | predicted, % | off, points | times slower than dp needs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        shares = 100 * row["computing"], 100 * row["predicted"]
        off = f"{shares[1] - shares[0]:+.1f}"
        cells = [row["rate"], row["every"], row["delay"], row["bits"], f"{shares[0]:.1f}", f"{shares[1]:.1f}", off]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['dp_slower']:.1f}"])) + " |")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    parser = options_of(__doc__, {"step": 0.25, "fragments": 1, "delay": 0, "bits": 8, "intervals": 3})
    parser.add_argument("--rates", default="50mbit,200mbit,1gbit,5gbit")
    parser.add_argument("--every", default="8,32,128")
    options = parser.parse_args(words)
    if options.table:
        print(table(rows_of(options.table)))
        return
    found = []
    for rate in options.rates.split(","):
        free = measured(FREE, 8, _at_once(options))["usually"]
        some = [measured(rate, every, options) for every in map(int, options.every.split(","))]
        beside = (free + measured(FREE, 8, _at_once(options))["usually"]) / 2
        for row in some:
            row |= {"predicted": predicted(row, beside, options), "beside": beside, "bits": options.bits}
            row |= {"dp_slower": slower_than_dp(row, options), "fragments": options.fragments, "delay": options.delay}
            tell(
                {name: round(each, 5) if isinstance(each, float) else each for name, each in row.items()}, options.json
            )
            found.append(row)
    print(table(found))


def _at_once(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "delay": 0})
