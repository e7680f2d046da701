"""What a training says of itself: a line and a progress bar on the console, `metrics.jsonl` in the run folder."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cuboid.checkpoint.save import SaveReport
from cuboid.console import say
from cuboid.parallel.pipeline import TimedAction
from cuboid.resilience.goodput import Goodput
from cuboid.resilience.stragglers import read_slowest
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.telemetry.rows import metric_rows
from cuboid.training.callbacks import Callback
from cuboid.training.health import Health
from cuboid.training.routers import ExpertLoads, report
from cuboid.training.run_folder import Rows
from cuboid.training.step import StepResult
from cuboid.training.trackers import Tracking

if TYPE_CHECKING:
    from cuboid.training.trainer import Trainer


class Metrics(Callback):
    """Rank 0 speaks for all, because every rank knows the loss; timings are kept by every rank that was asked to."""

    def __init__(self, run: Run, rank: int, quiet: bool = False, done: int = 0) -> None:
        """`done`: steps an earlier part of the run has done; its rows are kept."""
        self._run = run
        self._rank = rank
        self._quiet = quiet
        self._done = done
        self._rows: Rows | None = None
        self._goodput: Goodput | None = None
        self._health: Health | None = None
        self._timing: Rows | None = None
        self._loads: ExpertLoads | None = None
        self._progress: Progress | None = None
        self._saves: list[SaveReport] = []
        """Ended, and in no row yet."""

    def __enter__(self) -> Metrics:
        folder = Path(self._run.output.folder)
        if self._run.output.keep_timing:
            self._timing = Rows(folder / f"timing-{self._rank:05d}.jsonl", self._done)
            HEARTBEAT.take_waits()  # from here on they are kept
        if self._rank == 0:
            path = folder / "metrics.jsonl"
            if self._done < self._run.training.steps:  # else it is written already, and nothing is spent
                self._goodput = Goodput(folder, metric_rows(path), self._done, HEARTBEAT)
            self._rows = Rows(path, self._done)
            if self._run.model.mixture is not None:
                self._loads = ExpertLoads(self._run, self._done)
            self._read_past()
            self._tracking = Tracking(self._run, self._done)
            console = Console(file=sys.stdout)
            if console.is_terminal and not self._quiet:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self._progress = Progress(*columns, console=console)
                self._progress.start()
                self._task = self._progress.add_task("training", total=self._run.training.steps)
        return self

    def __exit__(self, *_: object) -> None:
        self._add_saves()
        if self._progress is not None:
            self._progress.stop()
        if self._goodput is not None:
            self._goodput.write()
        for rows in (self._rows, self._timing, self._loads):
            if rows is not None:
                rows.close()
        HEARTBEAT.waits = None
        if self._rows is not None:
            self._tracking.close()

    def on_saved(self, trainer: Trainer, saves: Sequence[SaveReport]) -> None:
        self._saves += saves

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        self.record(step, result, trainer.engine.pipeline.timing)

    def record(self, step: int, result: StepResult, timing: list[TimedAction]) -> None:
        saves, self._saves = self._saves, []
        # On every rank that was asked to keep its times, not on rank 0 alone.
        if self._timing is not None:
            actions = [[str(timed.action), timed.start, timed.ready, timed.end] for timed in timing]
            # Clocks of one host agree; those of several are brought together by the time of day and by messages.
            clock = {"host": socket.gethostname(), "clock": time.time() - time.perf_counter()}
            waits = [list(wait) for wait in HEARTBEAT.take_waits() if wait[0] not in ("message", "device")]
            told = {"step": step, "seconds": result.seconds, **clock, "actions": actions, "collectives": waits}
            self._timing.append(told)
        if self._rows is None:
            return
        tokens = result.sequences * self._run.training.sequence
        row: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            # All positions of the batch, as throughput is told everywhere; the loss is a mean over those with labels.
            "tokens": tokens,
            "labelled_tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": tokens / result.seconds,
            "finite": result.is_finite,
            "activation_rms": result.activation,
            "time": round(time.time(), 3),
        }
        if result.z_loss is not None:
            row["z_loss"] = result.z_loss
        if result.assignment is not None:
            row |= {"imbalance": result.assignment.imbalance, "imbalance_in_order": result.assignment.in_order}
        for depth, each in enumerate(result.prediction_losses, 1):
            row[f"prediction_loss_{depth}"] = each
        if result.loss_scale:
            # `row` is what the console shows; `kept`, made of it below, is what the file and trackers get.
            row |= {"loss_scale": result.loss_scale, "overflows": result.overflows}
        if result.validation_loss is not None:
            row["validation_loss"] = result.validation_loss
        # JSON has no word for what is not a number.
        kept: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in row.items()}
        if self._goodput is not None:
            spent = self._goodput.now()
            kept |= {"goodput": round(spent.goodput, 4), "spent": spent.as_row()}
        if slowest := read_slowest(HEARTBEAT.folder):
            kept["slowest"] = slowest
        if saves:
            kept["checkpoints"] = [asdict(save) for save in saves]
        if result.overflowed:
            kept["overflowed"] = row["overflowed"] = True
        if result.left_out:
            kept["left_out"] = row["left_out"] = result.left_out
        tracked, dead = kept, None
        if result.routers is not None and self._loads is not None:
            dead = self._loads.add(step, result.routers)
            routing = report(result.routers, self._run, result.sequences, int(dead.sum()))
            tracked = {**kept, **routing.numbers}
            kept["routers"] = asdict(routing)
            row |= {"largest_load": max(routing.largest_load), "dead_experts": routing.dead}
        if result.islands is not None:
            kept["islands"] = result.islands
        if result.layers is not None:
            tracked["layers"] = kept["layers"] = {
                kind: [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
                for kind, values in result.layers.items()
            }
        # Judged from the row, as a resumed run does from its file, so that both come to the same warnings.
        found = [] if self._health is None else self._health.observe(kept, result.routers, dead)
        if found:
            kept["warnings"] = [asdict(trouble) for trouble in found]
        self._rows.append(kept)
        self._tracking.log(step, tracked)
        _warn_of(saves)
        if not self._quiet:
            self._show(row, saves)
        for trouble in found:
            say(f"step {step}: {trouble.text}", as_warning=True)

    def _read_past(self) -> None:
        """What the rows that are kept say of the run's health."""
        if self._run.output.health:
            self._health = Health(self._run, metric_rows(Path(self._run.output.folder) / "metrics.jsonl"))

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        self._add_saves()
        self.rewind(step)

    def rewind(self, done: int) -> None:
        """The run went back: what comes after so many steps will be written again."""
        self._done = done
        folder = Path(self._run.output.folder)
        if self._rows is not None:
            self._rows.close()
            # Before the rows are cut: what the dropped steps took was lost, and counts as such.
            if self._goodput is not None:
                self._goodput.rewind(metric_rows(folder / "metrics.jsonl"), done)
            self._rows = Rows(folder / "metrics.jsonl", done)
        if self._loads is not None:
            self._loads.close()
            self._loads = ExpertLoads(self._run, done)
            self._read_past()
        if self._timing is not None:
            self._timing.close()
            self._timing = Rows(folder / f"timing-{self._rank:05d}.jsonl", done)

    def warn(self, warning: dict[str, Any]) -> None:
        """More for the row of the last step, which is written already."""
        if self._rows is not None:
            self._rows.add_to_last("warnings", [warning])

    def _add_saves(self) -> None:
        """Those that ended after the last row, which stands in the file already: a published checkpoint has its row."""
        saves, self._saves = self._saves, []
        if self._rows is None or not saves:
            return
        _warn_of(saves)
        if not self._quiet and any(map(_is_checkpoint, saves)):
            say("".join(map(_shown, saves)).strip())
        self._rows.add_to_last("checkpoints", [asdict(save) for save in saves])

    def _show(self, row: dict[str, Any], saves: Sequence[SaveReport]) -> None:
        step, steps = row["step"], self._run.training.steps
        predicted = "".join(f"prediction {row[key]:.4f}  " for key in row if key.startswith("prediction_loss_"))
        line = (
            f"step {step:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}  {predicted}"
            f"norm {row['gradient_norm']:.3f}  lr {row['learning_rate']:.2e}  "
            f"{row['tokens_per_second']:,.0f} {self._run.counts}/s"
        )
        if "largest_load" in row:
            line += f"  busiest expert {row['largest_load']:.2f}×"
            line += f"  dead experts {row['dead_experts']}" if row["dead_experts"] else ""
        if "imbalance" in row:
            line += f"  busiest replica {row['imbalance']:.2f}× (in order {row['imbalance_in_order']:.2f}×)"
        if "validation_loss" in row:
            line += f"  validation {row['validation_loss']:.4f}"
        line += "".join(map(_shown, saves))
        if "overflowed" in row:
            line += f"  overflow {row['overflows']} at loss scale {row['loss_scale']:,.0f}: update skipped on all ranks"
        elif not row["finite"]:
            line += "  not finite: update skipped on all ranks"
        elif "left_out" in row:
            line += f"  {row['left_out']}: update skipped on all ranks"
        # `log_every` thins out ordinary steps; what a person must not miss has a line in any case.
        notable = not row["finite"] or row.keys() & {"left_out", "validation_loss"} or any(map(_is_checkpoint, saves))
        due = self._run.output.is_logged(step, steps) or notable
        if self._progress is not None:
            if due:
                self._progress.console.print(line, highlight=False)
            self._progress.update(self._task, completed=step)
        elif due:
            say(line)


def _is_checkpoint(save: SaveReport) -> bool:
    """Worth a line; copies in memory are made every few steps."""
    return save.bytes > 0 and save.place == "disk"


def _shown(save: SaveReport) -> str:
    if not _is_checkpoint(save):
        return ""
    size = f"{save.bytes / 1e6:,.1f} MB in {save.write_seconds:.2f} s"
    return f"  checkpoint {save.step} ({size}, waited {save.stall_seconds:.2f} s)"


def _warn_of(saves: Sequence[SaveReport]) -> None:
    for save in saves:
        if save.warning:
            say(f"{save.warning}; the training continues", as_warning=True)
