"""`cuboid simulate plan.toml`: when every stage does what with every micro-batch: drawing, trace, picture."""

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.explain import asked, islands_of
from cuboid.cli.options import ModelsBatch, ModelsCluster, ModelsSequence, PlanOrModel, PlansEngine, PlansPrecision
from cuboid.cli.plan_one_job import job_in_plan, simulate_job
from cuboid.cost.rounds import summary
from cuboid.errors import UserError
from cuboid.outputs import check_output, write_output
from cuboid.planning import island_picture
from cuboid.planning.choose import pipeline_seconds, predict
from cuboid.planning.islands import IslandsPlan
from cuboid.planning.picture import chrome_trace, svg
from cuboid.planning.plan import Plan, load_plan
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import Timeline, draw, simulate
from cuboid.strict_json import json_text

MOST_ACTIONS = 500_000
"""Forward passes of a simulated step: more take minutes and gigabytes."""


def command(
    plan: PlanOrModel,
    cluster: ModelsCluster = None,
    layout: Annotated[str | None, typer.Option(help="Simulate this layout, e.g. dp=8,tp=8,pp=16.")] = None,
    global_batch: ModelsBatch = None,
    seq: ModelsSequence = None,
    precision: PlansPrecision = None,
    engine: PlansEngine = None,
    island: Annotated[int | None, typer.Option(help="Of a plan of islands: one step of this one, from 0.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for Perfetto or chrome://tracing.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as an SVG picture.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Draw so many micro-batches; default: two rounds of the pipeline.")
    ] = None,
    width: Annotated[int, typer.Option(min=20, help="Columns of the drawing in the terminal.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate one step of a plan's pipeline, or the rounds of a plan of islands. The trace holds every micro-batch.

    A row is a pipeline rank, time goes to the right: F3 is the forward of micro-batch 3, B its backward, dots are idle.

    Example: cuboid simulate plan.toml --trace trace.json --picture step.svg
    Example: cuboid simulate llama3-8b h100x64 --layout dp=8,tp=2,pp=4 --global-batch 256 --seq 8192
    """
    options = {"global_batch": global_batch, "seq": seq, "precision": precision, "engine": engine, "island": island}
    if job := job_in_plan(plan, cluster, layout, **options):
        simulate_job(job, micro_batches, width, as_json, trace, picture)
        return
    if islands := islands_of(plan, cluster, island):
        _simulate_islands(islands, trace, picture, width, as_json)
        return
    given = (cluster, layout, global_batch, seq, precision, engine, island)
    if plan.endswith(".toml") and all(each is None for each in given):
        loaded = load_plan(plan)
    else:
        loaded = predict(*asked("simulate", plan, cluster, layout, global_batch, seq, precision, engine, island))
    used, every = loaded.layout, loaded.micro_batches
    if every * used.stages > MOST_ACTIONS:
        raise UserError(
            f"micro-batches={every} on {used.stages} stages are too many to simulate one by one; use a --global-batch "
            f"that makes {MOST_ACTIONS // used.stages} or less"
        )
    seconds = pipeline_seconds(loaded.question, used)
    name = f"{loaded.question.model.name} on {loaded.question.cluster.name}: {used}"

    def timeline(count: int) -> Timeline:
        schedule = make_schedule(used.schedule, used.pp, count, used.vpp)
        return simulate(schedule, seconds.costs, seconds.message)

    for path in (trace, picture):
        if path is not None:
            check_output(path)
    full = timeline(every)
    if trace is not None:
        write_output(trace, json_text(chrome_trace(full, name)))
    shown = min(every, micro_batches or max(2 * used.pp, 4))
    drawn = timeline(shown)
    subtitle = f"{shown} of {every} micro-batches, bubble {loaded.bubble:.1%} with all of them"
    if picture is not None:
        write_output(picture, svg(drawn, name, subtitle))
    if as_json:
        print(json_text(_as_json(full, loaded)))
        return
    print(name)
    print(draw(drawn, width).rpartition("\n")[0])  # without the bubble of those that are drawn: one is said, of all
    print(f"{subtitle}; the pipeline takes {full.makespan:.4g} s of a step of {loaded.seconds:.4g} s")
    for what, written in (("trace", trace), ("picture", picture)):
        if written is not None:
            print(f"{what}: {written}")


INTERVALS = 2
"""That are drawn of a plan of islands: the first, and one that begins with rounds in flight."""


def _simulate_islands(plan: IslandsPlan, trace: Path | None, picture: Path | None, width: int, as_json: bool) -> None:
    spec, steps = plan.spec, INTERVALS * plan.spec.every
    timeline = plan.timeline(steps)
    name = f"{plan.plans[0].question.model.name} on {len(plan.names)} islands of {plan.groups.name}"
    settings = f"every={spec.every}, fragments={spec.fragments}, delay={spec.delay}, bits={spec.bits}"
    for path in (trace, picture):
        if path is not None:
            check_output(path)
    if trace is not None:
        write_output(trace, json_text(island_picture.chrome_trace(timeline, plan.names, name)))
    if picture is not None:
        write_output(picture, island_picture.svg(timeline, plan.names, name, f"{steps} steps, {settings}"))
    if as_json:
        print(json_text(_rounds_as_json(plan, steps)))
        return
    print(f"{name}: {settings}")
    print(island_picture.draw(timeline, plan.names, width))
    print("; ".join(f"{sign} {island_picture.WORDS[kind]}" for kind, sign in island_picture.SIGNS.items()))
    print(
        f"{steps} steps in {max(starts[-1] for starts in timeline.starts):.4g} s, the last rounds included; in a long "
        f"training the slowest island computes {plan.computing:.1%} of the time"
    )
    for what, written in (("trace", trace), ("picture", picture)):
        if written is not None:
            print(f"{what}: {written}")


def _rounds_as_json(plan: IslandsPlan, steps: int) -> dict[str, object]:
    timeline = plan.timeline(steps)
    found = summary(timeline, 0, steps)
    return {
        "islands": list(plan.names),
        "steps": steps,
        "makespan_seconds": max(starts[-1] for starts in timeline.starts),
        "computing": found.computing,
        "step_starts": [list(starts) for starts in timeline.starts],
        "rounds": [
            {
                "round": each.round,
                "fragment": each.fragment,
                "due": each.due,
                "arrived": list(each.arrived),
                "fetched": list(each.fetched),
                "done": each.done,
                "applied": list(each.applied),
                "waited": list(each.waited),
            }
            for each in timeline.rounds
        ],
    }


def _as_json(full: Timeline, plan: Plan) -> dict[str, object]:
    return {
        "layout": str(plan.layout),
        "micro_batches": plan.micro_batches,
        "step_seconds": plan.seconds,
        "makespan_seconds": full.makespan,
        "bubble": plan.bubble,
        "bubble_by_rank": full.bubble,
        "busy_seconds_by_rank": full.busy,
        "peak_in_flight_by_rank": full.peak_in_flight,
    }
