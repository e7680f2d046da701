"""`cuboid plan MODEL CLUSTER --global-batch N --seq N`: the best layouts, and why the first one is."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.cli.options import write_output
from cuboid.errors import UserError, nearest_names
from cuboid.planning.choose import cheapest, fewest, plans
from cuboid.planning.export.limits import FIXED
from cuboid.planning.export.targets import export
from cuboid.planning.plan import GIB, Plan, dump_plan
from cuboid.planning.question import Question, parse_fixed, parse_memory, precision_on
from cuboid.spec.cluster import load_cluster
from cuboid.spec.model import load_model

OBJECTIVES = ("time", "cost", "memory", "gpus")


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
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 5,
    objective: Annotated[
        str | None,
        typer.Option(help="time, cost, memory, gpus (the fewest that meet --days); to generate: throughput, latency."),
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Decide a field yourself: tp=8, or tp=8,pp=4.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Most a rank may hold: 60GiB or 90%; default: 95%.")] = None,
    engine: Annotated[str, typer.Option(help="Profile of costs: cuboid, megatron, nanotron, torchtitan, …")] = "cuboid",
    for_engine: Annotated[
        str | None,
        typer.Option(help="Only what the files of megatron, deepspeed, torchtitan or nanotron can say, at its costs."),
    ] = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Also layouts Cuboid's engine cannot train yet.")] = False,
    tokens: Annotated[float | None, typer.Option(help="Tokens to train on; says how many days that takes.")] = None,
    days: Annotated[float | None, typer.Option(help="Days to train in, for --objective gpus.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan as a run file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the best layouts of a model on a cluster.

    Example: cuboid plan gpt3-175b a100-80gx1024 --global-batch 1536 --seq 2048 -o plan.toml
    Example: cuboid plan llama3-70b h100x8 --for generate --prompt-tokens 1024 --output-tokens 256
    """
    place = load_cluster(cluster)
    if purpose == "generate":
        from cuboid.cli.plan_generation import answer_generation

        sizes = (prompt_tokens, output_tokens)
        chosen = precision_on(place, precision)
        answer_generation(load_model(model), place, sizes, chosen, objective or "throughput", top, as_json)
        return
    if purpose != "train":
        raise UserError(f"unknown for={purpose}; use train or generate")
    if global_batch is None or seq is None:
        missing = "--global-batch 512" if global_batch is None else "--seq 4096"
        raise UserError(f"a plan for training needs the batch; add {missing}")
    question = Question(
        model=load_model(model),
        cluster=place,
        global_batch=global_batch,
        sequence=seq,
        precision=precision_on(place, precision),
        engine=for_engine or engine,
        target=for_engine or "",
        fixed=_fixed(for_engine, parse_fixed(fix or [])),
        memory_limit=parse_memory(max_memory, place.memory_gib * GIB) if max_memory else None,
        beyond_engine=beyond,
    )
    found = _answer(question, objective or "time", top, tokens, days)
    if for_engine:
        export(found[0], for_engine)  # names what its files lack: a model, a precision
    if output is not None:
        write_output(output, dump_plan(replace(found[0], train_tokens=tokens or 0.0)))
    if as_json:
        answer = {"model": question.model.name, "plans": [as_row(plan) for plan in found]}
        print(json.dumps(answer | ({"days": found[0].days(tokens)} if tokens else {})))
        return
    from rich.console import Console

    from cuboid.cli.plan_table import show

    show(Console(highlight=False), found, output, tokens)


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


def _answer(question: Question, objective: str, top: int, tokens: float | None, days: float | None) -> list[Plan]:
    if objective not in OBJECTIVES:
        raise UserError(f"unknown objective={objective}; use {' or '.join(nearest_names(objective, OBJECTIVES, 4))}")
    if objective == "gpus":
        if not tokens or not days or tokens <= 0 or days <= 0:
            raise UserError("objective=gpus needs a deadline; add --tokens 300e9 --days 30")
        return fewest(question, tokens=tokens, days=days, top=top)
    if objective == "cost":
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
        "memory_share": plan.share,
        "host_memory_gib": plan.host_memory / GIB,
        "bubble": plan.bubble,
        "layers_per_stage": plan.layers,
        "step": plan.parts,
        "memory": plan.memory,
        "error": asdict(plan.error) if plan.error else None,
        "reasons": plan.reasons,
        "warnings": plan.warnings,
    }
