"""`cuboid plan MODEL CLUSTER --global-batch N --seq N`: the best layouts, and why the first one is."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuboid.errors import UserError, nearest_names
from cuboid.outputs import write_output
from cuboid.planning.choose import cheapest, fewest, plans
from cuboid.planning.energy import no_watts, sentence
from cuboid.planning.export.engines import FIXED, export
from cuboid.planning.plan import GIB, Plan, amount, dump_plan, error_line, losses
from cuboid.planning.question import Question, common_precision, parse_fixed, parse_memory, precision_on
from cuboid.schedule.table import uncollected
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.groups import Groups, load_groups
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.strict_json import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from cuboid.planning.generation import GenerationPlan
    from cuboid.planning.islands import Ask
    from cuboid.planning.sensitivity import Change

OBJECTIVES = ("time", "cost", "energy", "memory", "gpus")
TOP = 5
"""Layouts that are shown."""


def command(
    model: Annotated[str, typer.Argument(help="A catalog name, a TOML file or a Hugging Face config.json.")],
    cluster: Annotated[str, typer.Argument(help="A name such as h100x1024, or a TOML file.")],
    global_batch: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "--sequence", help="Tokens per sequence.")] = None,
    purpose: Annotated[str, typer.Option("--for", help="train, or generate.")] = "train",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, for --for generate.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens that follow it.")] = 128,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8 or float32; default: bf16, or fp16 on accelerators without it.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for the matrices of blocks.")] = "adamw",
    average: Annotated[
        float, typer.Option(help="Decay of a moving average of the weights, 4 bytes each; 0: none is kept.")
    ] = 0.0,
    gradient_sums: Annotated[
        str, typer.Option(help="float32, or bf16: half the memory and traffic of gradients.")
    ] = "float32",
    fp8_scaling: Annotated[
        str, typer.Option(help="Of fp8: a scale for each tensor, row or block (block: on Hopper).")
    ] = "tensor",
    fp8_experts: Annotated[bool, typer.Option(help="Of fp8: routed experts too (on Hopper).")] = False,
    top: Annotated[int, typer.Option(min=1, max=100, help="How many layouts to show.")] = TOP,
    objective: Annotated[
        str | None,
        typer.Option(
            help="time, cost, energy, memory, gpus (fewest in time for --deadline); to generate: throughput, latency."
        ),
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Decide a field yourself: tp=8, or tp=8,pp=4.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Most a rank may hold: 60GiB or 90%; default: 95%.")] = None,
    engine: Annotated[str, typer.Option(help="Profile of costs: cuboid, megatron, nanotron, torchtitan, …")] = "cuboid",
    for_engine: Annotated[
        str | None,
        typer.Option(help="Only what the files of megatron, deepspeed, torchtitan or nanotron can say, at its costs."),
    ] = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Also layouts Cuboid's engine cannot train yet.")] = False,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens to train on; says how many days and kWh that takes.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Days to train in.")] = None,
    budget: Annotated[float | None, typer.Option(help="Most it may cost, at the prices of a cluster file.")] = None,
    front: Annotated[
        Path | None, typer.Option(help="Write what it costs over the days it takes as an SVG picture.")
    ] = None,
    islands: Annotated[
        str | None, typer.Option(help="On a file of groups: decide fields of [islands], as in every=64,bits=4.")
    ] = None,
    one_job: Annotated[
        bool,
        typer.Option(
            "--one-job", help="On a file of groups: one job over all, stages and replicas by kind; no islands."
        ),
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also say what faster links, more memory or another GPU would buy.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan as a run file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the best layouts of a model on a cluster. A file of several groups: one training with an island on each, or
    one job over all of them.

    Example: cuboid plan gpt3-175b a100-80gx1024 --global-batch 1536 --seq 2048 -o plan.toml
    Example: cuboid plan llama3-8b ours.toml --one-job --global-batch 256 --seq 4096 -o plan.toml
    Example: cuboid plan llama3-70b h100x8 --for generate --prompt-tokens 1024 --output-tokens 256
    """
    groups = load_groups(cluster)
    several = len(groups.groups) > 1
    if several:
        _check_groups(groups, cluster, purpose, for_engine, engine, objective)
        if top != TOP and not one_job:
            raise UserError(f"top={top} is for accelerators of one group, and {cluster} has several; omit --top")
    elif one_job:
        raise UserError(f"--one-job is for a cluster file with several groups; {cluster} has one")
    elif islands:
        raise UserError(f"--islands {islands} is for a cluster file with several groups; {cluster} has one")
    if one_job:
        asked = {"islands": islands, "sensitivity": sensitivity, "budget": budget, "deadline": deadline, "front": front}
        asked |= {"objective": objective if objective != "time" else None, "top": top if top != TOP else None}
        for name, value in asked.items():
            if value not in (None, False):
                shown = f"{name}={value}" if name != "sensitivity" else "--sensitivity"
                raise UserError(f"{shown} is not for one job over several groups; omit it or --one-job")
    prices = _asks_for_prices(groups, objective, tokens, deadline, budget, front)
    if prices:
        # Objectives, limits and fronts compare parts of the cluster, which have none of these.
        lacks = {"for": purpose if purpose != "train" else None, "top": top if top != TOP else None}
        for name, value in (lacks | {"islands": islands, "sensitivity": sensitivity or None}).items():
            if value is not None:
                shown = f"{name}={value}" if name != "sensitivity" else "--sensitivity"
                raise UserError(f"{shown} is not for objectives and limits of days, cost and energy; omit it, or those")
    place = groups.groups[0].cluster
    if purpose == "generate":
        sizes = (prompt_tokens, output_tokens)
        chosen = precision_on(place, precision)
        answer_generation(load_model(model), place, sizes, chosen, objective or "throughput", top, as_json)
        return
    if purpose != "train":
        raise UserError(f"unknown for={purpose}; use train or generate")
    if global_batch is None or seq is None:
        missing = "--global-batch 512" if global_batch is None else "--seq 4096"
        raise UserError(f"a plan for training needs the batch; add {missing}")
    if fp8_experts and precision != "fp8":
        raise UserError("--fp8-experts is for --precision fp8; add it")
    spec, given = load_model(model), _fixed(for_engine, parse_fixed(fix or []))
    alike = common_precision(groups, precision)

    def ask(place: ClusterSpec, global_batch: int) -> Question:
        return Question(
            model=spec,
            cluster=place,
            global_batch=global_batch,
            sequence=seq or 1,
            precision=alike,
            optimizer=optimizer,
            average=OptimizerSpec(average=average).average,
            gradient_sums=gradient_sums,
            fp8_scaling=fp8_scaling,
            fp8_experts=fp8_experts,
            engine=for_engine or engine,
            target=for_engine or "",
            fixed=given,
            memory_limit=parse_memory(max_memory, place.memory_gib * GIB) if max_memory else None,
            beyond_engine=beyond,
        )

    if prices:
        from cuboid.cli.plan_pareto import Wanted, answer_pareto

        wanted = Wanted(
            objective=objective or "time", tokens=tokens, budget=budget, deadline=deadline, output=output, picture=front
        )
        answer_pareto(groups, ask, global_batch, wanted, as_json)
        return
    if one_job:
        from cuboid.cli.plan_one_job import answer_one_job, plan_one_job

        answer_one_job(plan_one_job(groups, ask, global_batch), output, tokens, as_json)
        return
    if several:
        changes = None
        if sensitivity:
            from cuboid.planning.sensitivity import sensitivity_of_islands

            changes = sensitivity_of_islands(ask, groups, global_batch)
        _answer_islands(groups, ask, global_batch, islands, tokens, output, as_json, changes)
        return
    question = ask(place, global_batch)
    found = _answer(question, objective or "time", top, tokens, deadline)
    if for_engine:
        export(found[0], for_engine)  # names what its files lack: a model, a precision
    if output is not None:
        write_output(output, dump_plan(replace(found[0], train_tokens=tokens or 0.0)))
    changes = _sensitivity(ask, place, global_batch) if sensitivity else None
    if as_json:
        answer: dict[str, object] = {"model": question.model.name, "plans": [as_row(plan) for plan in found]}
        answer |= {"days": found[0].days(tokens), "kwh": found[0].energy(tokens)} if tokens else {}
        answer |= {"omitted": groups.omitted()} if groups.omitted() else {}
        print(json_text(answer | (_as_json(changes) if changes is not None else {})))
        return
    from rich.console import Console

    console = Console(highlight=False)
    show(console, found, output, tokens)
    for note in groups.omitted():
        console.print(f"! {note}", style="yellow", markup=False)
    show_changes(console, changes)


def _sensitivity(ask: Ask, place: ClusterSpec, global_batch: int) -> list[Change]:
    from cuboid.planning.sensitivity import sensitivity

    return sensitivity(ask, place, global_batch)


def _as_json(changes: list[Change]) -> dict[str, object]:
    return {"sensitivity": [asdict(change) for change in changes]}


def show_changes(console: Console, changes: list[Change] | None) -> None:
    """What gains most first."""
    if changes is None:
        return
    console.print("what would change", style="bold")
    for change in changes:
        fits = f"{change.gain:+.1%} tokens/s" if change.tokens_per_second else "does not fit"
        layout = f" ({change.layout})" if change.layout else ""
        console.print(f"· {change.what}: {fits}{layout}", markup=False)


def _check_groups(
    groups: Groups, cluster: str, purpose: str, for_engine: str | None, engine: str, objective: str | None
) -> None:
    one = f"name one group, as in {cluster}:{groups.groups[0].name}"
    asked = {"for": (purpose, "train"), "for-engine": (for_engine, None), "engine": (engine, "cuboid")}
    if objective in ("cost", "energy", "gpus"):
        objective = None
    for name, (value, usual) in (asked | {"objective": (objective or "time", "time")}).items():
        if value != usual:
            raise UserError(f"{name}={value} is for accelerators of one group, and {cluster} has several; {one}")


def _asks_for_prices(
    groups: Groups,
    objective: str | None,
    tokens: float | None,
    deadline: float | None,
    budget: float | None,
    front: Path | None,
) -> bool:
    """Whether parts of the cluster are compared by days and cost; a cluster without prices has its fewest and its
    cheapest accelerators without."""
    if budget is not None or front is not None:
        return True
    if len(groups.groups) > 1:
        return objective in ("cost", "energy", "gpus") or deadline is not None
    priced = any(group.price is not None or group.spot_price is not None for group in groups.groups)
    weighed = priced and objective in ("cost", "energy") and tokens is not None
    return weighed or (deadline is not None and objective != "gpus")


@uncollected()
def _answer_islands(
    groups: Groups,
    ask: Ask,
    global_batch: int,
    islands: str | None,
    tokens: float | None,
    output: Path | None,
    as_json: bool,
    changes: list[Change] | None,
) -> None:
    from cuboid.cli import plan_islands as told
    from cuboid.planning.island_file import dump_islands_plan
    from cuboid.planning.islands import parse_wanted, plan_islands

    found = plan_islands(groups, ask, global_batch, parse_wanted(islands or ""))
    if output is not None:
        write_output(output, dump_islands_plan(found, tokens or 0.0))
    if as_json:
        days = tokens / found.tokens_per_second / 86400 if tokens else None
        ends = {"days": days, "kwh": found.energy(days)} if days else {}
        print(json_text(told.as_json(found) | ends | (_as_json(changes) if changes is not None else {})))
        return
    from rich.console import Console

    console = Console(highlight=False)
    told.show(console, found, str(output) if output else "", tokens)
    show_changes(console, changes)


def _fixed(target: str | None, decided: dict[str, Any]) -> dict[str, Any]:
    """What the user decided and what the target leaves no choice of."""
    if target is None:
        return decided
    if target not in FIXED:
        raise UserError(f"unknown for-engine={target}; use {' or '.join(nearest_names(target, tuple(FIXED), 4))}")
    for name, value in FIXED[target].items():
        if decided.get(name, value) != value:
            raise UserError(f"{name}={decided[name]} has no key in {target}; use {name}={str(value).lower()}")
    return {**FIXED[target], **decided}


@uncollected()
def _answer(question: Question, objective: str, top: int, tokens: float | None, deadline: float | None) -> list[Plan]:
    if objective not in OBJECTIVES:
        raise UserError(f"unknown objective={objective}; use {' or '.join(nearest_names(objective, OBJECTIVES, 4))}")
    if objective == "gpus":
        if not tokens or not deadline or tokens <= 0 or deadline <= 0:
            raise UserError("objective=gpus needs a deadline; add --tokens 300e9 --deadline 30")
        return fewest(question, tokens=tokens, days=deadline, top=top)
    if objective == "energy" and not question.cluster.watts:
        raise no_watts(question.cluster.name)
    if objective in ("cost", "energy"):  # of one kind, both are accelerator-hours
        return cheapest(question, top=top)
    return plans(question, top=top, objective=objective)


def as_row(plan: Plan) -> dict[str, object]:
    """A plan as JSON."""
    return {
        "layout": str(plan.layout),
        "cluster": plan.question.cluster.name,
        "step_seconds": plan.seconds,
        "tokens_per_second_per_gpu": plan.tokens,
        "gpu_hours_per_billion_tokens": plan.hours,
        "mfu": plan.utilization,
        "memory_gib": plan.peak / GIB,
        "memory_fraction": plan.memory_fraction,
        "host_memory_gib": plan.host_memory / GIB,
        "bubble": plan.bubble,
        "layers_per_stage": plan.layers,
        "step": plan.parts,
        "memory": plan.memory,
        "error": asdict(plan.error) if plan.error else None,
        "reasons": plan.reasons,
        "warnings": plan.warnings,
    }


def show(console: Console, plans: list[Plan], written: Path | None = None, tokens: float | None = None) -> None:
    """The table of all of them, and why the first one is first."""
    from rich.table import Table  # here, because --json starts faster without it

    first = plans[0]
    question = first.question
    console.print(
        f"{question.model.name} ({amount(question.model.parameters)} parameters) on {question.cluster.name}, "
        f"global batch {question.global_batch} × {question.sequence} tokens, {question.precision}, "
        f"engine {question.engine}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("step s", "tokens/s/GPU", "MFU", "GiB", "of all", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    # Last, because it is the longest and may be folded.
    table.add_column("layout", style="bold", overflow="fold")
    for plan in plans:
        table.add_row(
            f"{plan.seconds:.4g}",
            f"{plan.tokens:,.0f}",
            f"{plan.utilization:.1%}",
            f"{plan.peak / GIB:.1f}",
            f"{plan.memory_fraction:.0%}",
            f"{plan.bubble:.1%}",
            str(plan.layout),
        )
    console.print(table)
    for reason in first.reasons:
        console.print(f"· {reason}")
    days = f"; {amount(tokens)} take {first.days(tokens):.3g} days on {question.cluster.name}" if tokens else ""
    console.print(f"· a billion tokens cost {first.hours:,.4g} GPU-hours{days}")
    if tokens:
        console.print(f"· {sentence(first.energy(tokens))}")
    if first.alternatives:
        other = first.alternatives[0]
        slower = other.step_seconds / first.seconds - 1
        console.print(f"· next: {other.layout} takes {slower:+.1%} ({losses(first.parts, other.parts) or 'no part'})")
    console.print(f"· {error_line(first)}")
    for warning in first.warnings:
        console.print(f"! {warning}", style="yellow")
    if written is not None:
        console.print(f"written: {written} (cuboid explain, simulate, export or train it)")
        console.print(
            "before you train it, choose the data (data.source), the steps (training.steps), when to save "
            "(checkpoint.every) and the others its first lines name"
        )


def answer_generation(
    model: ModelSpec,
    cluster: ClusterSpec,
    sizes: tuple[int, int],
    precision: str,
    objective: str,
    top: int,
    as_json: bool,
) -> None:
    """`sizes`: tokens of a prompt, and tokens that follow it."""
    from cuboid.planning.generation import GenerationQuestion, generation_plans

    prompt, output = sizes
    question = GenerationQuestion(
        model=model,
        cluster=cluster,
        prompt_tokens=prompt,
        output_tokens=output,
        precision=precision,
        objective=objective,
    )
    found = generation_plans(question, top)
    if as_json:
        print(json_text({"model": model.name, "plans": [_row(plan) for plan in found]}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{model.name} on {cluster.name}, {prompt} + {output} tokens, {precision}, for {objective}")
    table = Table(box=None, pad_edge=False)
    for name in ("first s", "next ms", "tokens/s", "batch", "room for", "weights", "cache GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", style="bold", overflow="fold")
    for plan in found:
        table.add_row(
            f"{plan.first_token_seconds:.4g}",
            f"{1e3 * plan.token_seconds:.4g}",
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.batch:,}",
            f"{plan.sequences:,}",
            f"{plan.weight_bytes / GIB:.2f}",
            f"{plan.cache_bytes / GIB:.2f}",
            plan.written_layout,
        )
    console.print(table)
    console.print("· first, next: time to a prompt's first token, and to each one that follows")
    console.print("· batch: sequences at a time on each of dp replicas; room for: how many the memory holds")


def _row(plan: GenerationPlan) -> dict[str, object]:
    return {
        "layout": plan.written_layout,
        "first_token_seconds": plan.first_token_seconds,
        "token_seconds": plan.token_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "batch": plan.batch,
        "sequences": plan.sequences,
        "weight_bytes": plan.weight_bytes,
        "cache_bytes": plan.cache_bytes,
    }
