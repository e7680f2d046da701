"""A run or a plan opened for a report, and its long series made short: of every bucket of steps the lowest, the middle
and the highest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

from cuboid.cost.constants import slowed
from cuboid.errors import UserError
from cuboid.planning.choose import predict
from cuboid.planning.plan import Plan, plan_of
from cuboid.planning.question import PRECISIONS, Question, resized
from cuboid.readers import is_finite, read_json
from cuboid.resilience.goodput import Failure, failures
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run, load_run
from cuboid.telemetry.rows import Row, metric_rows
from cuboid.training.run_folder import RUN_FILE

SERIES_POINTS = 1500
"""More than a screen has columns for."""


def finite(value: Any) -> float | None:
    """Numbers as they are, anything else as nothing."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and math.isfinite(value) else None


def buckets(count: int, points: int = SERIES_POINTS) -> list[range]:
    """Positions 0 to count - 1 in at most so many runs, of one position each where there are few."""
    size = max(1, math.ceil(count / points))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def thinned(values: Sequence[float | None], parts: list[range]) -> dict[str, list[float | None]]:
    """`middle` is a value that was there; `low` and `high` only where buckets hold several."""
    middle: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for part in parts:
        known = [value for index in part if (value := values[index]) is not None]
        middle.append(short(median_low(known)) if known else None)
        low.append(short(min(known)) if known else None)
        high.append(short(max(known)) if known else None)
    if all(len(part) == 1 for part in parts):
        return {"middle": middle}
    return {"middle": middle, "low": low, "high": high}


def short(value: float) -> float:
    """Six figures: more than anyone can see, in half the space."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


PROBE = "probe.json"
"""What `cuboid report --probe` found: how long this run's steps take on the machine of the report."""


@dataclass(frozen=True)
class Source:
    """A run with what its folder holds; of a plan that was not trained there is no folder."""

    run: Run
    folder: Path | None
    cluster_name: str = ""
    """What the user says the cluster is."""

    @cached_property
    def rows(self) -> list[Row]:
        return self.rows_of("metrics.jsonl")

    @cached_property
    def warnings(self) -> list[str]:
        """What the run said of its own health, oldest first."""
        return told(self.rows)

    def rows_of(self, name: str) -> list[Row]:
        return metric_rows(self.folder / name) if self.folder is not None else []

    @cached_property
    def failures(self) -> list[Failure]:
        """Oldest first."""
        return failures(self.folder) if self.folder is not None else []

    def rank_files(self, pattern: str) -> Iterator[tuple[int, Path]]:
        """Files of the ranks that are: a wider layout that the run had before may have left others."""
        for path in sorted(self.folder.glob(pattern)) if self.folder is not None else ():
            number = path.stem.partition("-")[2]
            if number.isdigit() and int(number) < self.run.layout.world_size:
                yield int(number), path

    @cached_property
    def memory(self) -> dict[int, Row]:
        """Rank -> its fullest moment, measured."""
        found = {rank: metric_rows(path) for rank, path in self.rank_files("memory-*.jsonl")}
        return {rank: rows[-1] for rank, rows in found.items() if rows}

    @cached_property
    def cluster(self) -> ClusterSpec | None:
        """As the user names it, as the plan has it, or as many processes of this kind as the run had."""
        if self.cluster_name:
            return load_cluster(self.cluster_name)
        if self.run.plan:
            return plan_of(self.run).question.cluster
        devices = {str(row.get("device")) for row in self.memory.values()} or {self.run.training.device}
        return load_cluster(f"cpux{self.run.layout.world_size}") if devices == {"cpu"} else None

    @cached_property
    def probed(self) -> Row | None:
        """What a probe of the machine found for the layout the run has now; a cluster that is named counts more."""
        path = self.folder / PROBE if self.folder is not None else None
        if self.cluster_name or path is None or not path.is_file():
            return None
        found = read_json(path)
        return found if found.get("layout") == str(self.run.layout) and is_finite(found.get("step_seconds")) else None

    @property
    def assumed(self) -> bool:
        """Whether nobody said what machine the run is on, and nobody measured it."""
        return self.folder is not None and not (self.cluster_name or self.run.plan or self.probed)

    @cached_property
    def plan(self) -> Plan | None:
        """What the planner says of the layout that the run has now, which may not be the one it was planned for."""
        if self.cluster is None:
            return None
        run, asked = self.run, self.run.plan.get("precision", self.run.training.precision)
        question = Question(
            model=run.model,
            cluster=self.cluster,
            global_batch=run.training.global_batch,
            sequence=run.training.sequence,
            precision=str(asked) if asked in PRECISIONS else "float32",
            optimizer=run.planned_optimizer(str(run.plan.get("engine", "cuboid"))),
            average=run.optimizer.average,
            gradient_sums=run.training.gradient_sums,
            fp8_scaling=run.training.fp8_scaling,
            fp8_experts=run.training.fp8_experts,
            engine=str(run.plan.get("engine", "cuboid")),
        )
        if question.cluster.accelerators != run.layout.world_size:
            question = resized(question, run.layout.world_size)
        try:
            plan = predict(question, run.layout)
        except UserError:
            if isinstance(run.model, PythonModelSpec):  # not every module can be run on tensors without contents
                return None
            raise
        if self.probed is None:
            return plan
        factor = float(self.probed["step_seconds"]) / plan.seconds
        machine = question.machine
        here = slowed(question.cluster, factor, machine.chip, machine.fabric, question.profile)
        return predict(replace(question, cluster=here), run.layout)


def told(rows: list[Row]) -> list[str]:
    """The warnings in rows of metrics, each with its step."""
    return [f"step {row['step']}: {trouble['text']}" for row in rows for trouble in row.get("warnings", ())]


def open_source(path: str | Path, cluster: str = "") -> Source:
    """A run's folder, its run file, or a plan."""
    path = Path(path)
    if path.is_dir():
        if not (path / RUN_FILE).is_file():
            own = sorted(path.glob(f"island-*/{RUN_FILE}"))
            instead = f"one of its islands, as {own[0].parent}" if own else "the folder of a run, or a plan file"
            raise UserError(f"{path} holds no {RUN_FILE}; name {instead}")
        return Source(load_run(path / RUN_FILE), path, cluster)
    if not path.is_file():
        raise UserError(f"{path} does not exist; name the folder of a run, or a plan file")
    run = load_run(path)
    if path.name == RUN_FILE and (path.parent / "metrics.jsonl").exists():
        return Source(run, path.parent, cluster)
    if not run.plan and not cluster:
        raise UserError(f"{path} has no [plan] section; add --cluster h100x64, or write one with cuboid plan … -o")
    return Source(run, None, cluster)
