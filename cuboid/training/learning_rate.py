"""The learning rate of each step."""

from __future__ import annotations

import math

from cuboid.errors import UserError
from cuboid.spec.plugin import load_plugin, resolve_here
from cuboid.spec.run import Run
from cuboid.spec.training import LearningRateSpec


def learning_rate(spec: LearningRateSpec, step: int, steps: int) -> float:
    """`step` counts from 0. Warm-up is linear and reaches the peak at its last step; cosine and wsd reach the minimum
    at the last step of all."""
    if step < spec.warmup_steps:
        return spec.peak * (step + 1) / spec.warmup_steps
    if spec.python:
        own = load_plugin(resolve_here(spec.python, "learning_rate.python"), "learning_rate.python")
        return spec.peak * float(own(step, steps))
    minimum = spec.peak * spec.minimum_ratio
    left = max(1, steps - spec.warmup_steps)
    if spec.schedule == "cosine":
        progress = (step - spec.warmup_steps) / max(1, left - 1)
        return minimum + (spec.peak - minimum) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    if spec.schedule == "wsd":
        decay = min(spec.decay_steps or max(1, steps // 5), left)
        progress = (step + 1 - (steps - decay)) / decay
        return spec.peak - (spec.peak - minimum) * min(1.0, max(0.0, progress))
    return spec.peak


def check_schedule(run: Run) -> None:
    """Refuse a schedule of one's own that gives no numbers, before anything is written."""
    spec, steps = run.learning_rate, run.training.steps
    for step in {min(spec.warmup_steps, steps - 1), steps - 1} if spec.python else ():
        try:
            found = learning_rate(spec, step, steps)
        except (TypeError, ValueError) as problem:
            raise UserError(
                f"learning_rate.python={spec.python} gives no number for step={step}, steps={steps}: {problem}; "
                "return what multiplies learning_rate.peak"
            ) from problem
        if not math.isfinite(found):
            raise UserError(f"learning_rate.python={spec.python} gives {found} for step={step}; return a finite number")


def tell_change(old: Run, new: Run, done: int) -> str:
    """What becomes of the learning rate where a run resumes after `done` steps with more steps, or another schedule,
    than it was saved with; empty: nothing changes."""
    before, after = vars(old.learning_rate), vars(new.learning_rate)
    changed = [
        f"learning_rate.{name}={after[name]} (was {before[name]})" for name in after if after[name] != before[name]
    ]
    if new.training.steps != old.training.steps:
        changed.insert(0, f"training.steps={new.training.steps} (was {old.training.steps})")
    if not changed or done >= new.training.steps:
        return ""
    spec = new.learning_rate
    ways = {
        "cosine": "the cosine schedule ends at the last step as it is now",
        "wsd": "the decay ends at the last step as it is now",
        "constant": "the schedule is constant",
    }
    way = f"{spec.python} decides" if spec.python else ways[spec.schedule]
    last = learning_rate(old.learning_rate, done - 1, old.training.steps)
    now = learning_rate(spec, done, new.training.steps)
    told = f"the learning rate of step {done} was {last:.3g}, of step {done + 1} it is {now:.3g}"
    return f"{', '.join(changed)}: {way}; {told}"
