"""Says when a run goes wrong: one sentence for each kind of trouble, with the setting to change.

Fed with rows of `metrics.jsonl` as they are written, so it costs the device nothing, and a run that resumes reads its
own past. Every limit is far from what good runs do (`benchmarks/bad_runs.py` tries both)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run
from cuboid.training.routers import DEAD_STEPS

Row = dict[str, Any]

FIRST_LOSS = (0.3, 0.2)
"""The first loss may be below ln(vocabulary) by this share (a tied head likes to repeat tokens, and text does), and
above it by this one, at least 1.5: logits of deviation σ add σ²/2."""
OVER_CLIP = 100.0
"""Times the clipping norm that gradients may have, at the median of a window."""
JUMP = 30.0
"""Times the median of the steps before that a gradient norm may have; more is counted."""
JUMPS = 3
"""So many jumps in one window are no single bad batch."""
WINDOW = 10
"""Steps that say what is so now."""
HISTORY = 64
"""Good steps that say what is usual."""
ABOVE_START = {True: 1.05, False: 1.2}
"""Times the loss at the start that later ones may have; with random weights the start is hardly a matter of chance."""
GROWTH = 100.0
"""Times their first size, or 1 if that is more, that activations may have while they still grow"""
STILL = 1.2
"""by this factor in so many steps."""
STILL_STEPS = 20
FP16_ACTIVATION = 655.0
"""Root mean square of activations in fp16: single ones are a hundred times larger, and 65,504 is the largest number."""
COLLAPSED = 0.9
"""How far the `top_k` busiest experts of a collapsed layer are from even loads (0) to all of its assignments (1). A
single expert that nearly all tokens choose is met in good runs too, and then leaves them the others to differ in."""
COLLAPSED_STEPS = 20
"""Over which that is averaged. Routers of young models come back from less."""


@dataclass(frozen=True)
class Trouble:
    kind: str
    text: str


class Health:
    def __init__(self, run: Run, past: Sequence[Row] = ()) -> None:
        """`past`: rows of the steps that the run has done; what was told in them is not told again."""
        self._run = run
        self._told: set[str] = set()
        self._random = not run.training.start_from
        self._first: list[float] = []
        """Losses of the first steps, where they are known."""
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._usual_norms: deque[float] = deque(maxlen=HISTORY)
        self._jumps: deque[bool] = deque(maxlen=WINDOW)
        self._first_activations: list[float] = []
        self._activations: deque[float] = deque(maxlen=STILL_STEPS + 1)
        self._fractions: deque[Tensor] = deque(maxlen=COLLAPSED_STEPS)
        for row in past:
            self._told |= {trouble["kind"] for trouble in row.get("warnings", ())}
        # How it began and what is usual now; a run may have a million rows between.
        for row in past if len(past) < 2 * HISTORY else [*past[:WINDOW], *past[-HISTORY:]]:
            self.observe(row)

    def observe(self, row: Row, routers: Tensor | None = None, dead: Tensor | None = None) -> list[Trouble]:
        """What is new after a step. `routers`: as `StepResult` has them; `dead`: as `DeadExperts` does. Steps that are
        not finite, or whose update was skipped, do not count: others tell of them."""
        if row.get("finite") is False or "left_out" in row or row["loss"] is None or row["gradient_norm"] is None:
            return []
        looks = [self._at_loss(row), self._at_gradient(row), self._at_activations(row)]
        if routers is not None and dead is not None and self._run.model.mixture is not None:
            looks.append(self._at_routers(routers, dead, self._run.model.mixture))
        found: dict[str, str] = {}
        for kind, text in (each for look in looks for each in look):
            found.setdefault(kind, text)
        new = [Trouble(kind, text) for kind, text in found.items() if kind not in self._told]
        self._told |= found.keys()
        return new

    def _at_loss(self, row: Row) -> Iterator[tuple[str, str]]:
        loss, step = float(row["loss"]), int(row["step"])
        if not self._first:
            self._random = self._random and step == 1
            if self._random:
                yield from self._at_first_loss(loss)
        if len(self._first) < 3:
            self._first.append(loss)
        rate = self._run.learning_rate
        if step <= rate.warmup_steps:
            return
        self._losses.append(loss)
        start = self._first[0] if self._random else median(self._first)
        limit = start * ABOVE_START[self._random]
        # One step may be an exception; the mean of a few would be at the mercy of the worst.
        if len(self._losses) == WINDOW and sum(each > limit for each in self._losses) >= WINDOW - 1:
            yield (
                "loss",
                f"loss was above its start in the last {WINDOW} steps, {median(self._losses):.2f} beside {start:.2f}: "
                f"{_lower_rate(self._run)}",
            )

    def _at_first_loss(self, loss: float) -> Iterator[tuple[str, str]]:
        model, expected = self._run.model, math.log(self._run.model.vocab)
        below, above = FIRST_LOSS
        beside = f"the first loss is {loss:.2f}, far from ln(vocabulary) = {expected:.2f} of random weights"
        if loss > expected + max(1.5, above * expected):
            yield "first loss", f"{beside}: they are too large for this width; {_smaller_weights(model)}"
        elif loss < (1 - below) * expected:
            sources = ",".join(self._run.data.sources)
            yield (
                "first loss",
                f"{beside}: labels repeat their inputs or are mostly padding; check data.source={sources}",
            )

    def _at_gradient(self, row: Row) -> Iterator[tuple[str, str]]:
        norm, clip = float(row["gradient_norm"]), self._run.training.gradient_clip
        # Compared before it joins the history, or a jump would raise the median it is measured by.
        jumped = len(self._usual_norms) >= WINDOW // 2 and norm > JUMP * median(self._usual_norms)
        self._norms.append(norm)
        self._jumps.append(jumped)
        if sum(self._jumps) >= JUMPS:
            ratio = norm / median(self._usual_norms)
            yield (
                "gradient norm",
                f"gradient norm {norm:.3g} is {ratio:,.0f} × the median of the steps before, and it was not the only "
                f"such step: {_lower_rate(self._run)}",
            )
        self._usual_norms.append(norm)
        middle = median(self._norms)
        if clip and len(self._norms) == WINDOW and middle > OVER_CLIP * clip:
            fix = f"lower learning_rate.peak={self._run.learning_rate.peak:g}, or {_smaller_weights(self._run.model)}"
            if middle < OVER_CLIP:  # a size that is met elsewhere
                fix = f"raise training.gradient_clip={clip:g}"
            told = f"gradient norm {middle:.3g} is {middle / clip:,.0f} × training.gradient_clip={clip:g}"
            yield "gradient norm", f"{told}, in most of the last {WINDOW} steps: {fix}"

    def _at_activations(self, row: Row) -> Iterator[tuple[str, str]]:
        value = row.get("activation_rms")
        if value is None:
            return
        self._activations.append(float(value))
        if len(self._first_activations) < WINDOW:
            self._first_activations.append(float(value))
        usual = min(self._first_activations)  # a run may explode within them
        large = value > GROWTH * max(usual, 1.0)
        told = f"activations (RMS before the head) grew from {usual:.3g} in the first steps to {value:.3g}"
        # Where the run is too young to look so far back, its first steps are what there is.
        if large and value > STILL * self._activations[0] and len(self._activations) > WINDOW:
            yield "activations", f"{told} and still grow: {_lower_rate(self._run)}, or raise optimizer.weight_decay"
        elif self._run.training.precision == "fp16" and value > FP16_ACTIVATION:
            yield "activations", f"{told}, and fp16 ends at 65,504: use training.precision=bf16"

    def _at_routers(self, routers: Tensor, dead: Tensor, mixture: MixtureSpec) -> Iterator[tuple[str, str]]:
        # (layers with experts, experts): assignments in the global batch.
        asked = routers[:, : mixture.experts]
        if mixture.experts == mixture.top_k or not asked.sum():
            return
        # A token's top_k assignments go to different experts, so the busiest top_k can have all of them.
        self._fractions.append(asked.topk(mixture.top_k, 1).values.sum(1) / asked.sum(1))
        even = mixture.top_k / mixture.experts
        lately = torch.stack(list(self._fractions)).mean(0)
        collapsed = (lately >= even + COLLAPSED * (1 - even)).nonzero().flatten().tolist()
        if collapsed and len(self._fractions) == COLLAPSED_STEPS:
            yield (
                "collapsed routers",
                f"routers of {_layers(collapsed, mixture)} have collapsed: {mixture.top_k} of {mixture.experts} "
                f"experts had {lately[collapsed].min():.0%} or more of the assignments of the last {COLLAPSED_STEPS} "
                f"steps; {_balance(mixture)}",
            )
        # Of a collapsed layer there is more to say than that.
        layers = [layer for layer in dead.any(1).nonzero().flatten().tolist() if layer not in collapsed]
        if layers:
            number = int(dead[layers].sum())
            some = f"{number} expert{'s have' if number > 1 else ' has'}"
            text = f"{some} had no token for {DEAD_STEPS} steps or more, in {_layers(layers, mixture)}"
            yield "dead experts", f"{text}; {_balance(mixture)}"


def _lower_rate(run: Run) -> str:
    rate = run.learning_rate
    return f"lower learning_rate.peak={rate.peak:g} or raise learning_rate.warmup_steps={rate.warmup_steps}"


def _smaller_weights(model: ModelSpec) -> str:
    lower, other = (
        f"lower model.initial_std={model.initial_std:g}",
        f"use model.initialization=auto, not {model.initialization}",
    )
    if model.initialization in ("width", "fan_in", "zero_output", "mup"):  # which do not use it
        return other
    return lower if model.initialization == "auto" else f"{lower} or {other}"


def _balance(mixture: MixtureSpec) -> str:
    if not mixture.router_noise:
        return "set model.mixture.router_noise=1"
    return f"raise model.mixture.balance_coefficient={mixture.balance_coefficient:g} (0.1 to 0.3 hold with noise)"


def _layers(rows: list[int], mixture: MixtureSpec) -> str:
    """Rows of the routers' statistics as layers of the model, runs of them short: layers 1–3, 7."""
    runs: list[list[int]] = []
    for layer in (row + mixture.first_dense_layers for row in sorted(rows)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    named = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' if len(rows) > 1 else ''} {named}"
