"""`cuboid explain plan.toml`: why a plan is what it is, with formulae a reader can check by hand."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cuboid.cli.options import ModelsBatch, ModelsCluster, ModelsSequence, PlanOrModel, PlansEngine, PlansPrecision
from cuboid.cli.plan_islands import explain_islands
from cuboid.cli.plan_one_job import explain_job, job_in_plan
from cuboid.errors import UserError
from cuboid.planning.explain import Explanation, explain, sections
from cuboid.planning.island_file import load_any_plan
from cuboid.planning.islands import IslandsPlan
from cuboid.planning.plan import GIB, Plan, load_plan
from cuboid.planning.question import Question, precision_on
from cuboid.spec.cluster import load_cluster
from cuboid.spec.fitting import check_world_size
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.plugin import layout_for
from cuboid.strict_json import json_text

if TYPE_CHECKING:
    from rich.table import Table

KINDS = {
    "weights": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "transient": "work",
    "buffers": "fixed",
    "reserve": "reserve",
}
"""Kind of memory -> the head of its column."""


def command(
    plan: PlanOrModel,
    cluster: ModelsCluster = None,
    layout: Annotated[str | None, typer.Option(help="Explain this layout, e.g. dp=8,tp=8,pp=16.")] = None,
    global_batch: ModelsBatch = None,
    seq: ModelsSequence = None,
    precision: PlansPrecision = None,
    engine: PlansEngine = None,
    island: Annotated[int | None, typer.Option(help="Of a plan of islands: this one, from 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a plan: what must be split and why, what travels where, what fills memory and time, what rivals lose.

    Example: cuboid explain plan.toml
    Example: cuboid explain llama3-70b h100x64 --layout dp=4,tp=8,pp=2 --global-batch 64 --seq 4096 --precision fp8
    """
    options = {"global_batch": global_batch, "seq": seq, "precision": precision, "engine": engine, "island": island}
    if job := job_in_plan(plan, cluster, layout, **options):
        explain_job(job, as_json)
        return
    if islands := islands_of(plan, cluster, island):
        explain_islands(islands, as_json)
        return
    question, chosen = asked("explain", plan, cluster, layout, global_batch, seq, precision, engine, island)
    found = explain(question, chosen)
    if as_json:
        print(json_text(_as_json(found)))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{question.model.name} on {question.cluster.name}: {chosen}", style="bold")
    for title, lines in sections(found).items():
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(line, markup=False)
        if title == "Memory":
            console.print(_memory_table(found))


def asked(
    verb: str,
    plan: str,
    cluster: str | None,
    layout: str | None,
    global_batch: int | None,
    seq: int | None,
    precision: str | None,
    engine: str | None,
    island: int | None = None,
) -> tuple[Question, Layout]:
    """The question and the layout that a plan file, or a model, a cluster and a layout mean."""
    question, chosen = _asked(verb, plan, cluster, layout, global_batch, seq, island)
    kept = None if cluster else question.precision
    chosen_precision = precision_on(question.cluster, precision or kept)
    check_world_size(chosen, question.cluster.accelerators)
    return replace(question, precision=chosen_precision, engine=engine or question.engine), chosen


def _asked(
    verb: str,
    plan: str,
    cluster: str | None,
    layout: str | None,
    global_batch: int | None,
    seq: int | None,
    island: int | None,
) -> tuple[Question, Layout]:
    if cluster is None:
        if not plan.endswith(".toml"):
            raise UserError(f"{plan} is not a plan file; write cuboid {verb} {plan} h100x64 --layout dp=8,tp=8 …")
        loaded = load_plan(plan) if island is None else load_any_plan(plan, island)
        assert isinstance(loaded, Plan)
        return loaded.question, layout_for(loaded.question.model, layout) if layout else loaded.layout
    for name, value in (("layout", layout), ("global-batch", global_batch), ("seq", seq)):
        if value is None:
            raise UserError(f"--{name} is missing; a model and a cluster need --layout, --global-batch and --seq")
    question = Question(
        model=load_model(plan), cluster=load_cluster(cluster), global_batch=global_batch or 1, sequence=seq or 1
    )
    return question, layout_for(question.model, layout or "")


def islands_of(plan: str, cluster: str | None, island: int | None) -> IslandsPlan | None:
    """All islands of a plan file, where it plans some and none is asked for."""
    if cluster is not None or not plan.endswith(".toml") or island is not None:
        return None
    found = load_any_plan(plan, None)
    return found if isinstance(found, IslandsPlan) else None


def _memory_table(found: Explanation) -> "Table":
    from rich.table import Table

    plan = found.plan
    kinds = [kind for kind in KINDS if any(row[kind] > 0.005 * GIB for row in plan.memory)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("rank", "layers", *(KINDS[kind] for kind in kinds), "GiB", "of all"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = sorted({*range(min(4, plan.layout.pp)), plan.totals.index(plan.peak), plan.layout.pp - 1})
    for rank in shown:
        row, total = plan.memory[rank], plan.totals[rank]
        layers = sum(plan.layers[stage] for stage in plan.layout.stages_of(rank))
        cells = [f"{row[kind] / GIB:.2f}" for kind in kinds]
        share = total / (plan.question.cluster.memory_gib * GIB)
        table.add_row(str(rank), str(layers), *cells, f"{total / GIB:.2f}", f"{share:.0%}")
    return table


def _as_json(found: Explanation) -> dict[str, object]:
    from cuboid.cli.plan import as_row

    best = found.best
    return {
        **as_row(found.plan),
        "framework": {**asdict(found.framework), "layer_fits": found.framework.layer_fits},
        "traffic": [
            {"dimension": entry.dimension, "tier": entry.tier.name, "bytes": entry.bytes, "formulas": entry.formulas}
            | {"seconds": entry.seconds, "links": entry.links}
            for entry in found.moved
        ],
        "best": {"layout": str(best.layout), "step_seconds": best.seconds},
        "rivals": [{"layout": str(plan.layout), "step_seconds": plan.seconds} for plan in found.rivals],
        "sections": sections(found),
    }
