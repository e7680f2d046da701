"""Trackers of experiments beside `metrics.jsonl`: each is imported only where `output.track` names it.

A tracker that fails costs a warning, not the training."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.readers import parse_toml
from cuboid.spec.run import TRACKERS, Run, dump_run
from cuboid.training.run_folder import Rows, layer_names


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run: Run, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(run.output.folder) / "tensorboard"
        # What an earlier part of the run wrote of steps that will be done again is skipped.
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)
        self._writer.add_text("run", f"```toml\n{dump_run(run)}\n```")

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, run: Run, done: int, offline: bool = False) -> None:
        import wandb

        folder = Path(run.output.folder)
        self._run: Any = wandb.init(
            project=run.output.project,
            name=folder.name,
            # The same id and resume="allow": a resumed run continues its curves, a first one begins them.
            id=_identity(folder),
            resume="allow",
            dir=str(folder),
            mode="offline" if offline else "online",
            config=_settings(run),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, run: Run, done: int) -> None:
        import trackio

        folder = Path(run.output.folder)
        self._module: Any = trackio
        trackio.init(project=run.output.project, name=folder.name, resume="allow", config=_settings(run))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


class JsonLines:
    """Numbers only, one flat object a line: what other programs like to read."""

    def __init__(self, run: Run, done: int) -> None:
        self._rows = Rows(Path(run.output.folder) / "tracked.jsonl", done)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._rows.append({"step": step, **values})

    def close(self) -> None:
        self._rows.close()


MAKERS: dict[str, Callable[[Run, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "wandb-offline": lambda run, done: WeightsAndBiases(run, done, offline=True),
    "trackio": Trackio,
    "jsonl": JsonLines,
}
assert set(MAKERS) == set(TRACKERS)


def check_trackers(run: Run) -> None:
    """Before anything starts: that what was asked for is installed."""
    for name in run.output.trackers:
        package = TRACKERS[name]
        if package and find_spec(package) is None:
            raise UserError(f"output.track={name} needs the package {package}; pip install {package}, or omit it")


class Tracking:
    """All that the run asks for; none is the rule."""

    def __init__(self, run: Run, done: int) -> None:
        self._open: dict[str, Tracker] = {}
        for name in run.output.trackers:
            self._guarded(name, partial(self._start, name, run, done))

    def _start(self, name: str, run: Run, done: int) -> None:
        self._open[name] = MAKERS[name](run, done)

    def log(self, step: int, row: dict[str, Any]) -> None:
        # Numbers become curves. A bool is an int to Python; step and time are axes.
        values = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "time")
        }
        values |= {
            f"layers/{kind}/{place}": value
            for kind, measured in row.get("layers", {}).items()
            for place, value in zip(layer_names(kind, len(measured)), measured, strict=True)
            if value is not None
        }
        # A copy of the list: one that fails is dropped while it is gone through.
        for name, tracker in list(self._open.items()):
            self._guarded(name, partial(tracker.log, step, values))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)

    def _guarded(self, name: str, act: Callable[[], object]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # our own output may be one JSON object
                act()
        except Exception as error:  # whatever a stranger's code raises is not worth a training
            self._open.pop(name, None)
            say(f"output.track={name} failed: {error}; the training continues without it", as_warning=True)


def _identity(folder: Path) -> str:
    """The same for a run that continues in its folder."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def _settings(run: Run) -> dict[str, Any]:
    table = parse_toml(dump_run(run))
    # What was predicted is no setting, and too long for a table of them.
    table.pop("plan", None)
    return table
