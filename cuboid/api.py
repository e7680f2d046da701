"""Cuboid from Python: `cuboid.plan`, `cuboid.train`, `cuboid.verify`, as the commands of the same names.

    import cuboid

    best = cuboid.plan("llama3-8b", "h100x64", global_batch=512, sequence=8192)
    trained = cuboid.train({"model": "tiny-llama", "layout": "dp=2,tp=2"}, "training.steps=20")
    proof = cuboid.verify("dp=2,tp=2,pp=2")

What is wrong is raised as `cuboid.UserError`, in one sentence. In a notebook, a plan and a training show themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuboid.errors import UserError
from cuboid.readers import parse_toml
from cuboid.spec.run import Run, build_run, dump_run, load_run
from cuboid.telemetry.rows import metric_rows

if TYPE_CHECKING:
    from cuboid.planning.plan import Plan
    from cuboid.verification.compare import Verdict

RunLike = Run | Mapping[str, object] | str | Path


def make_run(run: RunLike, *changes: str) -> Run:
    """A run from a file, a table as TOML has it, or a run; `changes` such as "training.steps=20"."""
    if isinstance(run, str | Path):
        return load_run(run, changes)
    if isinstance(run, Run):
        return build_run(parse_toml(dump_run(run)), changes) if changes else run
    return build_run(run, changes)


def plan(
    model: str,
    cluster: str,
    *,
    global_batch: int,
    sequence: int,
    precision: str | None = None,
    optimizer: str = "adamw",
    objective: str = "time",
    top: int = 1,
    fixed: Mapping[str, Any] | None = None,
) -> Plan:
    """The best layout of a model on a cluster, with what it costs. `fixed`: fields decided already, {"tp": 8}; the
    next best are in `alternatives`."""
    from cuboid.planning.choose import plans
    from cuboid.planning.question import Question, precision_on
    from cuboid.spec.cluster import load_cluster
    from cuboid.spec.model import load_model

    if objective not in ("time", "memory"):
        raise UserError(f"unknown objective={objective}; use time or memory")
    place = load_cluster(cluster)
    question = Question(
        model=load_model(model),
        cluster=place,
        global_batch=global_batch,
        sequence=sequence,
        precision=precision_on(place, precision),
        optimizer=optimizer,
        fixed=dict(fixed or {}),
    )
    return plans(question, top=top, objective=objective)[0]


@dataclass(frozen=True)
class Trained:
    """A training that ended."""

    run: Run
    folder: Path
    preempted: bool
    """It was asked to stop before its last step: training the same run again continues."""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """What `metrics.jsonl` has of each step."""
        return metric_rows(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    def _repr_html_(self) -> str:
        losses = [loss for loss in self.losses if loss is not None]
        title = f"{self.run.model.name} on {self.run.layout}: {len(losses)} steps"
        if len(losses) < 2:
            return f"<p>{escape(title)}</p>"
        low, high = min(losses), max(losses)
        points = " ".join(
            f"{400 * place / (len(losses) - 1):.1f},{100 - 96 * (loss - low) / (high - low or 1):.1f}"
            for place, loss in enumerate(losses)
        )
        line = f'<polyline points="{points}" fill="none" stroke="#1b6ca8" stroke-width="1.5"/>'
        return (
            f'<p>{escape(title)}, loss {losses[0]:.4f} → {losses[-1]:.4f}</p><svg width="400" height="104">{line}</svg>'
        )


@contextmanager
def _script_not_run_again() -> Iterator[None]:
    """Processes that multiprocessing starts run the script of the one that starts them again, up to its guard, because
    functions might lie there. Those of ranks do not; a script without a guard may call `train` as well."""
    # A module without a file is one that `inspect` passes over; one whose file is None it would stumble over.
    main = vars(sys.modules["__main__"])
    file, described = main.pop("__file__", None), main.get("__spec__")
    main["__spec__"] = None
    try:
        yield
    finally:
        main["__spec__"] = described
        if file is not None:
            main["__file__"] = file


def train(
    run: RunLike,
    *changes: str,
    overwrite: bool = False,
    quiet: bool = False,
    oversubscribe: bool = False,
    take_over: bool = False,
) -> Trained:
    """Train to the last step, from the newest checkpoint of the run's folder if there is one. Under torchrun every
    process calls it, and returns when the training has ended. `oversubscribe`: start also where memory or cores seem
    too few for the ranks. `take_over`: resume the checkpoints of another run in `checkpoint.folder` as this one's."""
    from cuboid.launch.start import train_run

    made = make_run(run, *changes)
    with _script_not_run_again():
        outcome = train_run(made, overwrite=overwrite, quiet=quiet, oversubscribe=oversubscribe, take_over=take_over)
    return Trained(made, Path(made.output.folder), outcome.preempted)


def verify(
    layout: str,
    model: str = "tiny-llama",
    *changes: str,
    steps: int = 3,
    precision: str = "float64",
    seed: int = 0,
) -> Verdict:
    """Whether a layout computes what one process computes: `verdict.passed`, and how far each kind of number is off."""
    from cuboid.data.opened import check_data
    from cuboid.launch.once import Heard, take_post
    from cuboid.launch.start import NodeOptions
    from cuboid.spec.run import check_supported
    from cuboid.verification.make import check_provable, verification_run

    run = verification_run(layout, model, changes, steps, precision, seed)
    check_supported(run)
    check_provable(run)
    check_data(run)
    post = take_post(run, NodeOptions())
    with _script_not_run_again():
        told = post.call("cuboid.verification.compare:verify_rank", (run,), Heard(silent=True))
    from cuboid.verification.compare import Verdict

    return Verdict(**told)
