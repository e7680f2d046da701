"""The proof that a training can stop on one layout and resume on another: a chain of layouts, each resuming from the
checkpoint of the one before it, against one uninterrupted process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.resume import resume
from cuboid.checkpoint.save import save
from cuboid.checkpoint.state import PARAMETER
from cuboid.checkpoint.storage import whole_tensors
from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.parallel.coordination import open_coordination
from cuboid.parallel.device import joined_device
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.checks.located import Located
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step
from cuboid.verification.carried import LOADED, TRAINED, Carried, floor_of, note
from cuboid.verification.compare import TOLERANCE, relative_error, tensor_error
from cuboid.verification.reference import Tensors, reference_trace


@dataclass(frozen=True)
class Leg:
    """The steps done on one layout, and the checkpoint it left."""

    layout: str
    world_size: int
    first_step: int
    last_step: int
    loss_error: float
    parameter_error: float
    first_moment_error: float
    second_moment_error: float
    worst_parameter: str
    worst_first_moment: str
    worst_second_moment: str
    passed: bool


@dataclass(frozen=True)
class ChainVerdict:
    model: str
    dtype: str
    seed: int
    steps: int
    losses: list[float]
    legs: list[Leg]
    tolerance: float
    passed: bool
    located: Located | None
    """What is wrong first, where anything is."""


def train_leg(rank: int, run: Run, folder: str, first: int, last: int) -> list[float]:
    """Steps first + 1 to last on this layout; every rank calls this and gets the losses."""
    device = joined_device(run.training.device)
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    source = make_source(run)
    group = open_coordination(run.checkpoint.timeout_seconds)
    done = resume(engine, optimizer, locate(folder), group, quiet=True) if first else 0
    if done != first:
        raise AssertionError(f"resumed after step {done}, not {first}")
    if first:
        note(engine, optimizer, folder, LOADED, first, rank)
    losses = []
    for step in range(first, last):
        HEARTBEAT.enter("step", step + 1)
        batches = micro_batches(source, run, step, engine.groups.coordinates.dp, device)
        rate = learning_rate(run.learning_rate, step, run.training.steps)
        losses.append(train_step(engine, optimizer, batches, rate).loss)
    HEARTBEAT.enter("save")
    note(engine, optimizer, folder, TRAINED, last, rank)
    save(engine, optimizer, locate(folder), last)
    return losses


def judge_chain(rank: int, runs: list[Run], folder: str, losses: list[list[float]]) -> dict[str, Any]:
    """Compare the losses of every leg and the checkpoint it left with the uninterrupted run."""
    whole = runs[0]
    ends = [sum(len(part) for part in losses[: index + 1]) for index in range(len(losses))]
    reference = reference_trace(whole, moments_after=ends)
    legs: list[Leg] = []
    for run, seen, end in zip(runs, losses, ends, strict=True):
        expected = reference.losses[end - len(seen) : end]
        state = {f"parameter/{name}": tensor for name, tensor in reference.parameters[end - 1].items()}
        state |= reference.moments[end]
        legs.append(_judge(run, end, list(zip(seen, expected, strict=True)), locate(folder), state))
    passed, tolerance = all(leg.passed for leg in legs), TOLERANCE[whole.training.precision]
    located = None if passed else Carried(runs, folder, reference, tolerance).first_wrong(losses)
    return asdict(
        ChainVerdict(
            model=whole.model.name,
            dtype=whole.training.precision,
            seed=whole.training.seed,
            steps=ends[-1],
            losses=[loss for part in losses for loss in part],
            legs=legs,
            tolerance=tolerance,
            passed=passed,
            located=located,
        )
    )


def _judge(run: Run, end: int, losses: list[tuple[float, float]], folder: Location, expected: Tensors) -> Leg:
    held = whole_tensors(checkpoint_path(folder, end))
    if held.keys() != expected.keys():
        raise AssertionError(f"{sorted(held.keys() ^ expected.keys())[0]} is held by one side only")
    kinds = {name.partition("/")[0] for name in expected}
    worst = {kind: _worst(kind, held, expected, run.learning_rate.peak) for kind in kinds}
    loss_error = max(relative_error(*pair) for pair in losses)
    errors = [loss_error, *(error for error, _ in worst.values())]
    none = (0.0, "")
    first = max((worst[kind] for kind in kinds if kind != PARAMETER and not kind.endswith("_sq")), default=none)
    second = max((worst[kind] for kind in kinds if kind.endswith("_sq")), default=none)
    return Leg(
        layout=str(run.layout),
        world_size=run.layout.world_size,
        first_step=end - len(losses) + 1,
        last_step=end,
        loss_error=loss_error,
        parameter_error=worst["parameter"][0],
        first_moment_error=first[0],
        second_moment_error=second[0],
        worst_parameter=worst["parameter"][1],
        worst_first_moment=first[1],
        worst_second_moment=second[1],
        passed=max(errors) <= TOLERANCE[run.training.precision],
    )


def _worst(kind: str, held: Tensors, expected: Tensors, update: float) -> tuple[float, str]:
    """The largest error of one kind. Optimizers of one's own may keep others than two moments: the worst that is no
    square counts as first."""
    prefix = f"{kind}/"
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        name.removeprefix(prefix): (held[name], tensor) for name, tensor in expected.items() if name.startswith(prefix)
    }
    floor = floor_of(kind, expected, update)
    return max((tensor_error(seen, tensor, floor), name) for name, (seen, tensor) in pairs.items())
