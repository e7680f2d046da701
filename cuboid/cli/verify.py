"""`cuboid verify --layout …`: prove that a layout computes what one process computes."""

import json
import math
from typing import Annotated, Any, Literal

import typer

from cuboid.data.opened import check_data
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, build_run
from cuboid.spec.supported import check_supported

MICRO_BATCHES = 4


def verification_run(
    layout: str,
    model: str = "tiny-llama",
    overrides: tuple[str, ...] = (),
    steps: int = 3,
    dtype: str = "float64",
    seed: int = 0,
) -> Run:
    """A short run on random tokens with labels masked differently in every sample, so that means of means would
    show."""
    shape = Layout.parse(layout)
    table: dict[str, Any] = {
        "model": model,
        "layout": layout,
        "training": {
            "steps": steps,
            "seed": seed,
            "precision": dtype,
            "global_batch": shape.dp * shape.micro_batch * MICRO_BATCHES,
            "sequence": math.lcm(16, shape.tp),
            "device": "cpu",
        },
        "learning_rate": {"peak": 1e-3, "schedule": "constant"},
        "data": {"source": "synthetic"},
    }
    return build_run(table, overrides)


def check_provable(run: Run) -> None:
    """bf16 rounds to three digits: a difference of layouts would hide in them."""
    if run.training.precision == "bf16":
        raise UserError("training.precision=bf16 is too coarse for a proof; use --dtype float64 or float32")


def command(
    layout: Annotated[str, typer.Option(help="The layout to prove, e.g. dp=2,tp=2,pp=2,zero=1.")] = "dp=2,tp=2,pp=2",
    model: Annotated[str, typer.Option(help="A model's name, a TOML file or a Hugging Face folder.")] = "tiny-llama",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: model.layers=7.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    dtype: Annotated[Literal["float64", "float32"], typer.Option(help="float64 is the proof.")] = "float64",
    seed: Annotated[int, typer.Option(help="Of the weights and the data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Prove a layout: the loss, every gradient, the gradient norm and the parameters after clipped optimizer steps
    are compared with one plain process from the same seed.

    Example: cuboid verify --layout dp=2,pp=4,zero=3,schedule=zbv --set model.layers=9
    """
    run = verification_run(layout, model, tuple(overrides or ()), steps, dtype, seed)
    check_supported(run)
    check_provable(run)
    check_data(run)
    if not as_json:
        processes = f"{run.layout.world_size} processes"
        print(f"{run.model.name} on {run.layout} ({processes}) against one process, {run.training.precision}")
    with Pool() as pool:
        verdict = pool.run("cuboid.verify.compare:verify_rank", (run,), ranks=run.layout.world_size, timeout=3600)[0]
    if as_json:
        print(json.dumps(verdict))
    else:
        _show(verdict)
    return 0 if verdict["passed"] else 1


def _show(verdict: dict[str, Any]) -> None:
    for name in ("loss", "gradient", "gradient_norm", "parameter"):
        error = verdict[f"{name}_error"]
        worst = f"  ({verdict[f'worst_{name}']})" if f"worst_{name}" in verdict else ""
        mark = "equal" if error <= verdict["tolerance"] else "DIFFERS"
        print(f"  {name.replace('_', ' '):<14} {mark}  largest relative error {error:.1e}{worst}")
    steps = f"{verdict['steps']} clipped optimizer steps"
    if verdict["passed"]:
        print(f"The layout changed nothing but speed: all within {verdict['tolerance']:.0e} over {steps}.")
    else:
        print(f"The layout is NOT equal to one process within {verdict['tolerance']:.0e} over {steps}.")
