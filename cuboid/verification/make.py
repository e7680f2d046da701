"""The short run with which a layout is proved. Nothing here needs torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cuboid.errors import UserError
from cuboid.spec.islands import MOST_ISLANDS
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run, build_run
from cuboid.training.learning_rate import check_schedule
from cuboid.verification.rounding import ROUNDED

T = TypeVar("T")
MICRO_BATCHES = 4
BALANCED = tuple(
    f"model.mixture.{field}"
    for field in ("balance_coefficient=0.01", "z_coefficient=0.001", "router_bias=true", "bias_rate=0.01")
)
"""A mixture is proved with every way of balancing it at once, whichever its own are."""
HEAVILY = ("model.mixture.balance_coefficient=1.0", "model.mixture.z_coefficient=0.1")
"""In 16 bits auxiliary losses that are small would be lost in rounding, and a bug in them with them."""


def verification_run(
    layout: str,
    model: str = "tiny-llama",
    overrides: tuple[str, ...] = (),
    steps: int = 3,
    dtype: str = "float64",
    seed: int = 0,
    chain: Sequence[str] = (),
) -> Run:
    """A short run on random tokens with labels masked differently in every sample, so that means of means would
    show. With a chain of layouts its batch is one that fits them all."""
    shapes = [Layout.parse(each) for each in chain or [layout]]
    described = load_model(model)
    if described.mixture is not None:
        if not isinstance(described, PythonModelSpec):  # whose modules say themselves how they are balanced
            overrides = (*BALANCED, *(HEAVILY if dtype in ROUNDED else ()), *overrides)
        steps = 1 if dtype in ROUNDED else steps  # after which rounding sends tokens to other experts
    table: dict[str, Any] = {
        "model": model,
        "layout": layout,
        "training": {
            "steps": steps,
            "seed": seed,
            "precision": dtype,
            "global_batch": math.lcm(*(shape.batch_unit for shape in shapes)) * MICRO_BATCHES,
            "sequence": math.lcm(16, *(2 * shape.cp * shape.tp for shape in shapes)),
            "device": "cpu",
            "loss_scale": 1024.0,  # few tokens: no step may overflow
        },
        "learning_rate": {"peak": 1e-3, "schedule": "constant"},
        "data": {"source": "synthetic", "attention_within_documents": True, "positions_within_documents": True},
    }
    if isinstance(described, PythonModelSpec):
        table["data"] = {} if described.built.data is not None else {"source": "synthetic"}
    return build_run(table, overrides)


def take(field: str, value: str, overrides: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """`value`, or what overrides set the field to, and the others: what else a proof asks for follows from it."""
    pairs = [(each, *each.partition("=")[::2]) for each in overrides]
    found = [text.strip(" '\"") for _, name, text in pairs if name.strip() == field]
    return (found or [value])[-1], tuple(each for each, name, _ in pairs if name.strip() != field)


def islands_runs(
    islands: str, model: str, overrides: tuple[str, ...], steps: int | None, dtype: str, seed: int
) -> list[Run]:
    """One run per island of `A; B; C`, equal in all but the layout, and the batch by `islands.batch_weights`. `steps`:
    default: every fragment is synchronised twice, and once more after the last step."""
    layouts = [part.strip() for part in islands.split(";")]
    if not all(layouts):
        raise UserError(f'--islands "{islands}" is no list of layouts; write it like "tp=2; pp=2; dp=2,zero=3"')
    if len(layouts) > MOST_ISLANDS:
        raise UserError(f"--islands names {len(layouts)} layouts; use {MOST_ISLANDS} or fewer")
    # All of them, before one is blamed for what another lacks.
    shapes = _for_each(layouts, lambda number: Layout.parse(layouts[number]))
    # A single island steps with the outer optimizer too, which it does only in a proof.
    table = (f"islands.count={max(2, len(layouts))}", "islands.every=2", *overrides)
    first = verification_run(layouts[0], model, table, 3 if steps is None else steps, dtype, seed, layouts)
    if steps is None:
        steps = 2 * first.islands.every + first.islands.delay + 1
        first = replace(first, training=replace(first.training, steps=steps))

    def made(number: int) -> Run:
        batch = first.training.global_batch * first.islands.weight_of(number)
        return replace(first, layout=shapes[number], training=replace(first.training, global_batch=batch))

    return _for_each(layouts, made)


def _for_each(layouts: Sequence[str], make: Callable[[int], T]) -> list[T]:
    made = []
    for number, layout in enumerate(layouts):
        try:
            made.append(make(number))
        except UserError as error:
            raise UserError(f"island {number} of --islands, {layout}: {error}") from None
    return made


def check_provable(run: Run, chain: bool = False) -> None:
    """What rounding does to bf16 and the like is measured as it is compared; that is written for one layout only."""
    if run.optimizer.has_own_code:
        from cuboid.training.own_optimizer import check_optimizer  # the one thing here that needs torch

        check_optimizer(run)
    check_schedule(run)
    precision = run.training.precision
    if chain and precision in ROUNDED:
        raise UserError(f"training.precision={precision} is too coarse for a proof; use --precision float64 or float32")
