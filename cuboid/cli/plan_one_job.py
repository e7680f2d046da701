"""What `cuboid plan --one-job`, `explain`, `simulate` and `map` say of one job over several groups."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cuboid.errors import UserError, either
from cuboid.outputs import check_output, write_output
from cuboid.planning.choose import fastest
from cuboid.planning.energy import kilowatt_hours, sentence
from cuboid.planning.heterogeneous import (
    HeterogeneousJob,
    Machines,
    PipelineRank,
    layer_seconds,
    line_timeline,
    predict_job,
)
from cuboid.planning.heterogeneous_file import (
    dump_job_plan,
    job_run,
    load_job_plan,
    node_groups,
    node_size,
    start_lines,
)
from cuboid.planning.heterogeneous_search import TRIED, heterogeneous_job
from cuboid.planning.picture import chrome_trace, svg
from cuboid.planning.plan import GIB, amount
from cuboid.schedule.simulate import draw
from cuboid.schedule.table import uncollected
from cuboid.spec.groups import Groups
from cuboid.spec.layout import Layout, format_weights
from cuboid.spec.plugin import PythonModelSpec
from cuboid.strict_json import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from cuboid.planning.islands import Ask


@dataclass(frozen=True)
class Found:
    machines: Machines
    job: HeterogeneousJob
    alone: tuple[tuple[str, float], ...]
    """The fastest group by itself, with its tokens a second; nothing where none fits the model."""

    def days(self, tokens: float) -> float:
        return tokens / self.job.tokens_per_second / 86400

    def energy(self, tokens: float) -> float | None:
        """Kilowatt-hours at board power of the ranks of every group; None: of one it is not known."""
        layout, groups = self.job.layout, self.machines.groups.groups
        each = layout.world_size // (layout.dp * layout.pp)
        parts = [(groups[at].cluster, line.replicas * each) for line in self.job.lines for at in line.groups]
        return kilowatt_hours(parts, self.days(tokens))


@uncollected()
def plan_one_job(groups: Groups, ask: Ask, global_batch: int) -> Found:
    """The best over two groups or more; refused where none fits."""
    questions = tuple(ask(group.cluster, global_batch) for group in groups.groups)
    if isinstance(questions[0].model, PythonModelSpec):
        raise UserError(
            f"model={questions[0].model.name} is one's own, which is planned for accelerators of one kind; name one "
            f"group, as in {groups.name}.toml:{groups.groups[0].name}"
        )
    for name, value in questions[0].fixed.items():
        if value not in TRIED.get(name, (value,)):
            near = either(f"{name}={other}" for other in TRIED[name])
            raise UserError(f"{name}={value} is not tried for one job over several groups; use {near}")
    job = heterogeneous_job(groups, questions, global_batch)
    if job is None:
        raise UserError(
            f"no job over {' and '.join(group.name for group in groups.groups)} fits {questions[0].model.name} with "
            f"global batch {global_batch}; use another --global-batch, less in --fix, or no --one-job"
        )
    alone = []
    for group, question in zip(groups.groups, questions, strict=True):
        try:
            alone.append((group.name, fastest(question).tokens * group.cluster.accelerators))
        except UserError:
            continue
    best = sorted(alone, key=lambda each: -each[1])[:1]
    return Found(Machines(groups, questions), job, tuple(best))


def answer_one_job(found: Found, output: Path | None, tokens: float | None, as_json: bool) -> None:
    """What was found, and the run file."""
    if output is not None:
        write_output(output, dump_job_plan(found.machines, found.job, tokens or 0.0))
    if as_json:
        more = {"days": found.days(tokens), "kwh": found.energy(tokens)} if tokens else {}
        print(json_text(table_of(found.machines, found.job) | {"alone": dict(found.alone)} | more))
        return
    from rich.console import Console

    console = Console(highlight=False)
    show(console, found.machines, found.job)
    for name, rate in found.alone:
        console.print(f"· {name} alone: {rate:,.0f} tokens/s, {rate / found.job.tokens_per_second - 1:+.0%}")
    if tokens:
        told = sentence(found.energy(tokens))
        console.print(f"· {amount(tokens)} tokens take {found.days(tokens):.3g} days, {told}")
    for note in found.machines.groups.omitted():
        console.print(f"! {note}", style="yellow", markup=False)
    if output is not None:
        console.print(f"written: {output} (cuboid explain, simulate and map read it); start it with")
        for line in start_lines(job_run(found.machines, found.job), str(output)):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def table_of(machines: Machines, job: HeterogeneousJob) -> dict[str, object]:
    """As JSON."""
    names = machines.names
    return {
        "model": machines.first.model.name,
        "groups": machines.groups.name,
        "layout": str(job.layout),
        "step_seconds": job.step_seconds,
        "tokens_per_second": job.tokens_per_second,
        "spans": list(job.spans),
        "gradients": job.gradients,
        "crossing": job.crossing,
        "update": job.update,
        "fits": job.fits,
        "lines": [{"replicas": line.replicas, "groups": [names[each] for each in line.groups]} for line in job.lines],
        "pipeline_ranks": [asdict(here) for here in job.pipeline_ranks],
        "nodes": [names[group] for group in node_groups(job.layout, job.lines, node_size(machines))],
        "ranks_per_node": node_size(machines),
        "reasons": reasons(machines, job),
    }


def show(console: Console, machines: Machines, job: HeterogeneousJob) -> None:
    """Which stage of which replicas sits on which kind, with its layers, seconds and memory; and why."""
    from rich.table import Table

    question = machines.first
    console.print(
        f"{question.model.name} ({amount(question.model.parameters)} parameters) as one job on {machines.groups.name}, "
        f"global batch {question.global_batch} × {question.sequence} tokens, {question.precision}"
    )
    console.print(str(job.layout), style="bold", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("replicas", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    table.add_column("group", style="bold", no_wrap=True)
    for name in ("layers", "micro-batches", "ms each", "idle", "GiB", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    starts = _starts(job)
    for (line, *_), rows in _merged(job.pipeline_ranks):
        first, last = rows[0], rows[-1]
        fullest = max(rows, key=lambda here: here.memory / here.room)
        table.add_row(
            _span(starts[line], starts[line] + first.replicas - 1),
            _span(first.rank, last.rank),
            first.group,
            str(first.layers),
            f"{first.micro_batches}" + (f" × {first.sequences}" if first.sequences > 1 else ""),
            f"{1e3 * max(here.seconds for here in rows):.4g}",
            f"{sum(here.idle for here in rows) / len(rows):.0%}",
            f"{fullest.memory / GIB:.1f}",
            f"{fullest.room / GIB:.1f}",
        )
    console.print(table)
    for reason in reasons(machines, job):
        console.print(f"· {reason}", markup=False)
    if not job.fits:
        full = max(job.pipeline_ranks, key=lambda here: here.memory / here.room)
        console.print(
            f"! stage {full.rank} on {full.group} would hold {full.memory / GIB:.1f} of {full.room / GIB:.1f} GiB: "
            "this plan does not fit",
            style="yellow",
        )


def reasons(machines: Machines, job: HeterogeneousJob) -> list[str]:
    """Why it is what it is, with numbers."""
    layout, found = job.layout, []
    rate = job.tokens_per_second
    found.append(
        f"a step takes {job.step_seconds:.4g} s ({rate:,.0f} tokens/s): {max(job.spans):.4g} s for its micro-batches, "
        f"{job.gradients:.3g} s for gradients within groups, {job.crossing:.3g} s for those between groups, "
        f"{job.update:.3g} s for the optimizer"
    )
    each = layer_seconds(machines, job)
    if layout.layers and len(each) > 1:
        times = ", ".join(f"{1e3 * seconds:.3g} ms on {group}" for group, seconds in each.items())
        found.append(f"layers={format_weights(layout.layers)}: a layer of a sequence takes {times}")
    if layout.batch_weights:
        what = "sequences a micro-batch" if layout.has_unequal_sizes else "micro-batches"
        spans = " and ".join(f"{span:.4g}" for span in dict.fromkeys(round(span, 4) for span in job.spans))
        found.append(
            f"batch_weights={format_weights(layout.batch_weights)} gives replicas so many {what} beside one another: "
            f"they are done after {spans} s"
        )
    if layout.shard_weights:
        found.append(
            f"shard_weights={format_weights(layout.shard_weights)} gives replicas so much of what ZeRO splits, by the "
            "memory that their kinds have left"
        )
    equal = equal_job(machines, job)
    if equal is not None and equal.step_seconds > 1.005 * job.step_seconds:
        found.append(
            f"with equal stages and equal parts of the batch a step would take {equal.step_seconds:.4g} s "
            f"({equal.step_seconds / job.step_seconds - 1:+.0%})" + ("" if equal.fits else ", and would not fit")
        )
    return found


def equal_job(machines: Machines, job: HeterogeneousJob) -> HeterogeneousJob | None:
    """The same without unequal layers, batches and shards; None where there are none, or the batch does not divide."""
    equal = job.layout.changed(layers=(), batch_weights=(), shard_weights=())
    if equal == job.layout or machines.first.global_batch % equal.batch_unit:
        return None
    return predict_job(machines, equal, job.lines)


def _starts(job: HeterogeneousJob) -> list[int]:
    """The first replica of each line."""
    found = [0]
    for line in job.lines:
        found.append(found[-1] + line.replicas)
    return found


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _merged(pipeline_ranks: tuple[PipelineRank, ...]) -> list[tuple[tuple[int, str, int], list[PipelineRank]]]:
    """Neighbours of one line that are alike."""
    return [
        (key, list(same))
        for key, same in groupby(pipeline_ranks, key=lambda here: (here.line, here.group, here.layers))
    ]


# Of a plan file.


def job_in_plan(
    plan: str, cluster: str | None, layout: str | None = None, **others: object
) -> tuple[Machines, HeterogeneousJob] | None:
    """One job over several groups, where a plan file has one; `layout`: in place of its own, on the same lines.
    `others`: options that are not for it."""
    if cluster is not None or not plan.endswith(".toml"):
        return None
    found = load_job_plan(plan)
    if found is None:
        return None
    for name, value in others.items():
        if value is not None:
            raise UserError(
                f"{name.replace('_', '-')}={value} is not for a plan of one job over several groups; omit it"
            )
    if layout is None:
        return found
    machines, job = found
    other = Layout.parse(layout)
    if (other.dp, other.pp, other.tp, other.cp) != (job.layout.dp, job.layout.pp, job.layout.tp, job.layout.cp):
        raise UserError(f"layout={layout} does not sit on the same ranks as {job.layout}; keep dp, tp and pp")
    from cuboid.spec.fitting import check

    check(other, machines.first.model, global_batch=machines.first.global_batch, sequence=machines.first.sequence)
    return machines, predict_job(machines, other, job.lines)


def explain_job(found: tuple[Machines, HeterogeneousJob], in_json: bool) -> None:
    machines, job = found
    if in_json:
        print(json_text(table_of(machines, job)))
        return
    from rich.console import Console

    show(Console(highlight=False), machines, job)


def simulate_job(
    found: tuple[Machines, HeterogeneousJob],
    micro_batches: int | None,
    width: int,
    in_json: bool,
    trace: Path | None,
    picture: Path | None,
) -> None:
    """One step of a replica of each line; trace and picture are of the line that takes longest."""
    machines, job = found
    for path in (trace, picture):
        if path is not None:
            check_output(path)
    slowest = job.spans.index(max(job.spans))
    name = f"{machines.first.model.name} on {machines.groups.name}: {job.layout}"
    if trace is not None:
        every = next(here.micro_batches for here in job.pipeline_ranks if here.line == slowest)
        write_output(trace, json_text(chrome_trace(line_timeline(machines, job, slowest, every), name)))
    rows = []
    for place, line in enumerate(job.lines):
        count = next(here.micro_batches for here in job.pipeline_ranks if here.line == place)
        shown = min(count, micro_batches or max(2 * job.layout.pp, 4))
        drawn = line_timeline(machines, job, place, shown)
        names = [machines.names[group] for group in line.groups]
        if picture is not None and place == slowest:
            write_output(picture, svg(drawn, name, f"{shown} of {count} micro-batches; {', '.join(names)}"))
        rows.append({"groups": names, "replicas": line.replicas, "span": job.spans[place], "micro_batches": count})
        if not in_json:
            told = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(names))
            print(f"{line.replicas} replicas ({told}): {count} micro-batches in {job.spans[place]:.4g} s")
            print(draw(drawn, width).rpartition("\n")[0])
    if in_json:
        print(json_text({"layout": str(job.layout), "step_seconds": job.step_seconds, "lines": rows}))
        return
    waits = f"; replicas that are done first wait {job.waiting:.1%} of that" if len(job.lines) > 1 else ""
    print(f"{job.layout}: a step takes {job.step_seconds:.4g} s{waits}")
    for what, written in (("trace", trace), ("picture", picture)):
        if written is not None:
            print(f"{what}: {written}")


def map_job(found: tuple[Machines, HeterogeneousJob], in_json: bool) -> None:
    """Which node of which group has which ranks."""
    machines, job = found
    size, names = node_size(machines), machines.names
    order = node_groups(job.layout, job.lines, size)
    rows: list[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]]] = []
    start, each = 0, job.layout.world_size // job.layout.pp
    for group, same in groupby(order):
        stop = start + len(list(same))
        first, last = start * size, stop * size - 1
        rows.append((names[group], (start, stop - 1), (first, last), (first // each, last // each)))
        start = stop
    if in_json:
        heads = ("group", "nodes", "ranks", "pipeline_ranks")
        told = [dict(zip(heads, row, strict=True)) for row in rows]
        print(json_text({"layout": str(job.layout), "ranks_per_node": size, "nodes": told}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{job.layout} on {machines.groups.name}: {size} ranks a node", style="bold", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("nodes", "group", "ranks", "pipeline ranks"):
        table.add_column(name, no_wrap=True)
    for name, *spans in rows:
        nodes, ranks, stages = (_span(*span) for span in spans)
        table.add_row(nodes, name, ranks, stages)
    console.print(table)
