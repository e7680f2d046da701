"""`cuboid plan MODEL CLUSTER --for generate`: what the verb shows of it."""

import json

from cuboid.planning.generation import GenerationPlan, GenerationQuestion, generation_plans
from cuboid.planning.plan import GIB
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.model import ModelSpec


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
        print(json.dumps({"model": model.name, "plans": [_row(plan) for plan in found]}))
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
