"""Score card of the planner on published runs: `python benchmarks/planner.py [--worst 20] [--json] [--errors]`.

Step time and memory: median and mean absolute error, per source, on the rows calibration saw and on those it did not;
bias is the median of the signed error.
Out of memory: precision, recall and F1 of "does not fit". Order: rank correlation within runs that differ in their
layout only, and regret: how much slower than the best measured layout the one ranked first is, and the best of the
first three.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from published_rows import HELD_OUT_SOURCES, Run, load

from cuboid.cost import constants
from cuboid.cost.estimate import Seen, family, scale_of
from cuboid.cost.inputs import Array
from cuboid.cost.published import Answer, answer_cases


@dataclass(frozen=True)
class Scored:
    """A run and what the planner says of it."""

    run: Run
    answer: Answer

    @property
    def time_error(self) -> float:
        """Predicted over measured, less one."""
        return self.answer.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one."""
        return self.answer.memory / self.run.memory - 1


def score(runs: Sequence[Run]) -> list[Scored]:
    """Every run that has what an estimate needs, with its estimate."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        if run.case:
            case = run.case
            groups.setdefault((case.chip, case.fabric, case.engine, case.precision), []).append(run)
    scored = []
    for members in groups.values():
        answers = answer_cases([run.case for run in members if run.case])
        scored += [Scored(run, answer) for run, answer in zip(members, answers, strict=True)]
    return scored


def errors(scored: Iterable[Scored]) -> dict[str, float]:
    """Median and mean absolute errors of time and memory."""
    rows = list(scored)
    time = np.abs([item.time_error for item in rows if np.isfinite(item.run.seconds)])
    memory = np.abs([item.memory_error for item in rows if np.isfinite(item.run.memory) and not item.run.out_of_memory])
    result: dict[str, float] = {"time_rows": len(time), "memory_rows": len(memory)}
    if len(time):
        result["time_bias"] = float(np.median([item.time_error for item in rows if np.isfinite(item.run.seconds)]))
    for name, values in (("time", time), ("memory", memory)):
        if len(values):
            result |= {f"{name}_median": float(np.median(values)), f"{name}_mean": float(np.mean(values))}
    return result


def out_of_memory(scored: Iterable[Scored]) -> dict[str, float]:
    """How well "does not fit" is told, over rows that either ran with a time or are known to have failed."""
    rows = [item for item in scored if item.run.out_of_memory or np.isfinite(item.run.seconds)]
    said = np.array([not item.answer.fits for item in rows], dtype=bool)
    true = np.array([item.run.out_of_memory for item in rows], dtype=bool)
    hits = float(np.sum(said & true))
    precision, recall = hits / max(np.sum(said), 1), hits / max(np.sum(true), 1)
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-9)}


def _ranks(values: Sequence[float]) -> Array:
    return np.argsort(np.argsort(values)).astype(float)


def order(scored: Iterable[Scored], smallest: int = 5) -> dict[str, float]:
    """Rank correlation and regret over groups of at least so many layouts."""
    groups: dict[tuple[str, ...], list[Scored]] = {}
    for item in scored:
        if np.isfinite(item.run.seconds) and not item.run.out_of_memory:
            groups.setdefault(item.run.group, []).append(item)
    correlations, first, three = [], [], []
    for members in groups.values():
        if len(members) < smallest:
            continue
        predicted = [1 / item.answer.tokens for item in members]
        real = [item.run.seconds / float(item.run.row["gbs"]) for item in members]
        if np.std(predicted) > 0 and np.std(real) > 0:
            correlations.append(float(np.corrcoef(_ranks(predicted), _ranks(real))[0, 1]))
        by_prediction = [real[index] for index in np.argsort(predicted, kind="stable")]
        first.append(by_prediction[0] / min(real) - 1)
        three.append(min(by_prediction[:3]) / min(real) - 1)
    if not first:
        return {"groups": 0}
    means = {"correlation": correlations, "regret_first": first, "regret_three": three}
    return {"groups": len(first)} | {name: float(np.mean(values)) for name, values in means.items() if values}


def _line(name: str, rows: Sequence[Scored]) -> str:
    seen = errors(item for item in rows if not item.run.held_out)
    unseen = errors(item for item in rows if item.run.held_out)

    def cell(result: dict[str, float], kind: str) -> str:
        if not result[f"{kind}_rows"]:
            return f"{'':>22s}"
        return f"{result[f'{kind}_rows']:5.0f} {result[f'{kind}_median']:7.1%} {result[f'{kind}_mean']:8.1%}"

    cells = [cell(result, kind) for kind in ("time", "memory") for result in (seen, unseen)]
    return " | ".join([f"{name:18s}", *cells])


TARGETS: tuple[tuple[str, Callable[[Scored], bool]], ...] = (
    ("all sources", lambda item: True),
    ("all but playbook beyond 128 GPUs or tp 8", lambda item: _quiet(item)),
    ("vtrain-multi", lambda item: item.run.source == "vtrain-multi"),
    ("simumax", lambda item: item.run.source == "simumax"),
    ("mixtures", lambda item: _mixture(item)),
    ("mixtures on h100, h800 and b200", lambda item: _mixture(item) and item.run.case.chip in HOPPER),
    ("mixtures of sources held out whole", lambda item: _mixture(item) and item.run.id.startswith(HELD_OUT_SOURCES)),
    ("dense on 1,000 GPUs and more", lambda item: not _mixture(item) and _world(item) >= 1000),
    ("dense on 1,000 GPUs and more, sources held out whole", lambda item: _world(item) >= 1000 and _whole(item)),
    ("playbook, tp <= 8", lambda item: item.run.source == "playbook" and _quiet(item)),
)


HOPPER = ("h100-80g", "h100-96g", "h800", "b200")


def _world(item: Scored) -> float:
    job = item.run.case.job if item.run.case else {}
    return job.get("dp", 0) * job.get("tp", 0) * job.get("pp", 0) * job.get("cp", 0)


def _whole(item: Scored) -> bool:
    return item.run.id.startswith(HELD_OUT_SOURCES) and not _mixture(item)


def _mixture(item: Scored) -> bool:
    return item.run.case is not None and item.run.case.shape["experts"] > 0


def _quiet(item: Scored) -> bool:
    if item.run.source != "playbook" or item.run.case is None:
        return True
    return item.run.case.job["tp"] <= 8 and float(item.run.row["gpus"]) <= 128


def card(scored: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """The figures of the score card, on held-out rows and (order, out of memory) on all."""
    result = {}
    for name, belongs in TARGETS:
        rows = [item for item in scored if belongs(item)]
        result[name] = errors(item for item in rows if item.run.held_out) | order(rows)
        if any(item.run.out_of_memory for item in rows):
            result[name] |= out_of_memory(item for item in rows if item.run.held_out)
    return result


def _print(scored: Sequence[Scored], runs: Sequence[Run]) -> None:
    titles = ("time, fitted", "time, held out", "memory, fitted", "memory, held out")
    print(" | ".join([f"{'':18s}", *(f"{title:>22s}" for title in titles)]))
    print(" | ".join([f"{'source':18s}", *(f"{'rows  median     mean':>22s}" for _ in titles)]))
    for source in sorted({item.run.source for item in scored}):
        print(_line(source, [item for item in scored if item.run.source == source]))
    print(_line("all", scored))
    print(f"\n{len(scored)} of {len(runs)} rows estimated; the others lack something (see cuboid estimate)\n")
    for name, figures in card(scored).items():
        shown = ", ".join(f"{key} {value:.3f}" if value % 1 else f"{key} {value:.0f}" for key, value in figures.items())
        print(f"{name}: {shown}")


def seen_errors(scored: Sequence[Scored], least: int = 3) -> list[Seen]:
    """Errors of step time by engine, accelerator, kind and scale, on held-out rows, where there are so many."""
    groups: dict[tuple[str, str, str, int], list[float]] = {}
    for item in scored:
        if item.run.case is None or not item.run.held_out or not np.isfinite(item.run.seconds):
            continue
        world = _world(item)
        kind = "moe" if _mixture(item) else "dense"
        for scale in (0, scale_of(world)):
            key = (*family(item.run.case.engine, item.run.case.chip), kind, scale)
            groups.setdefault(key, []).append(item.time_error)
    return [
        Seen(
            *key,
            len(values),
            round(float(np.median(np.abs(values))), 3),
            round(float(np.quantile(np.abs(values), 0.9)), 3),
            round(float(np.median(values)), 3),
        )
        for key, values in sorted(groups.items())
        if len(values) >= least
    ]


def write_errors(scored: Sequence[Scored]) -> None:
    """Puts them where the planner reads them."""
    lines = ["# Errors of predicted step times on held-out published runs; written by benchmarks/planner.py --errors."]
    for entry in seen_errors(scored):
        values = (f"{name} = {json.dumps(value)}" for name, value in asdict(entry).items())
        lines.append("\n[[seen]]\n" + "\n".join(values))
    (Path(constants.__file__).parent / "data" / "errors.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Prints the score card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, help="print the rows with the largest errors of time")
    parser.add_argument("--errors", action="store_true", help="write cuboid/cost/data/errors.toml")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args()
    runs = load()
    scored = score(runs)
    if options.errors:
        write_errors(scored)
    if options.json:
        print(json.dumps(card(scored), indent=1))
        return
    _print(scored, runs)
    timed = [item for item in scored if np.isfinite(item.run.seconds)]
    for item in sorted(timed, key=lambda item: -abs(item.time_error))[: options.worst]:
        measured, predicted = item.run.seconds, item.answer.seconds
        print(f"{item.run.id:22s} {item.time_error:+7.1%}  {measured:9.3f} s, predicted {predicted:9.3f} s")


if __name__ == "__main__":
    main()
