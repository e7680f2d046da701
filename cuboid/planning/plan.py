"""`Plan`: a layout with what is predicted of it, kept in a run file that `cuboid train` takes as it is.

layout = "dp=8,tp=8,pp=16,zero=1"
[model] …
[training] …
[plan]                                # this file's part: what the run was planned for, and what was predicted
cluster = "a100-80gx1024"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from math import ceil
from pathlib import Path
from typing import Literal, cast

from cuboid.cost.estimate import Seen, seen
from cuboid.errors import UserError
from cuboid.planning.energy import kilowatt_hours
from cuboid.planning.question import Question
from cuboid.planning.refine import Refined
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.coding import convert, decode, encode
from cuboid.spec.layout import Layout, format_weights
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import OutputSpec, Run, dump_run, load_run
from cuboid.spec.training import OWN_DATA, TO_CHOOSE, DataSpec, TrainingSpec

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A layout that was not chosen."""

    layout: str
    step_seconds: float
    memory_gib: float
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Plan(Refined):
    """A layout with what it is predicted to cost, what it was chosen for, and why."""

    question: Question
    utilization: float
    """Model FLOPs over the 16-bit peak."""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    train_tokens: float = field(default=0.0, compare=False)
    """Tokens to train on; 0: nobody said."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = {
            "model": self.question.model.name,
            "cluster": self.question.cluster.name,
            "layout": str(self.layout),
            "step": f"{self.seconds:.3f} s",
            "tokens/s a GPU": f"{self.tokens:,.0f}",
            "MFU": f"{self.utilization:.1%}",
            "memory of the fullest rank": f"{self.peak / GIB:.1f} GiB, {self.memory_fraction:.0%}",
            "bubble": f"{self.bubble:.1%}",
        }
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in (*self.reasons, *self.warnings))
        return f"<table>{cells}</table><ul>{reasons}</ul>"

    @property
    def memory_fraction(self) -> float:
        """The fraction of its accelerator's memory that the fullest rank holds."""
        return self.peak / (self.question.cluster.memory_gib * GIB)

    @property
    def tokens(self) -> float:
        """Tokens per second and accelerator."""
        question = self.question
        return question.global_batch * question.sequence / (self.seconds * self.layout.world_size)

    @property
    def error(self) -> Seen | None:
        """How far predictions were off on published runs like this."""
        question = self.question
        return seen(
            question.engine, question.cluster.accelerator, question.model.mixture is not None, self.layout.world_size
        )

    def days(self, tokens: float) -> float:
        """Days to train on so many tokens."""
        return tokens / (self.tokens * self.layout.world_size) / 86400

    def energy(self, tokens: float) -> float | None:
        """Kilowatt-hours that these take at board power; None: not known."""
        return kilowatt_hours([(self.question.cluster, self.layout.world_size)], self.days(tokens))

    @property
    def hours(self) -> float:
        """Accelerator-hours per billion tokens: what a training costs."""
        return 1e9 / self.tokens / 3600

    @property
    def micro_batches(self) -> int:
        """Micro-batches each replica runs per step; where they differ, the one that has most."""
        return self.layout.micro_batches_of(self.layout.busiest_replica, self.question.global_batch)

    @property
    def run(self) -> Run:
        """What `cuboid train` does with the plan."""
        return self.run_with(plan_table(self))

    def run_with(self, table: dict[str, object]) -> Run:
        """The same with less in its `[plan]`, which takes longest to make."""
        question = self.question
        trained = "bf16" if question.lacks_fp8(self.layout) else question.precision
        training = TrainingSpec(
            global_batch=question.global_batch,
            sequence=question.sequence,
            precision=cast(Literal["bf16", "fp16", "fp8", "float32"], trained),
            gradient_sums=cast(Literal["float32", "bf16"], question.gradient_sums),
            fp8_scaling=cast(Literal["tensor", "row", "block"], question.fp8_scaling),
            fp8_experts=question.fp8_experts and trained == "fp8",
        )
        if self.train_tokens:
            training = replace(training, steps=ceil(self.train_tokens / (question.global_batch * question.sequence)))
        own = question.model if isinstance(question.model, PythonModelSpec) else None
        data = DataSpec(source=OWN_DATA if own is not None and own.built.data is not None else TO_CHOOSE)
        output = OutputSpec(folder=f"runs/{question.model.name}")
        optimizer = OptimizerSpec(kind=question.optimizer, average=question.average)
        return Run(
            model=question.model,
            layout=self.layout,
            training=training,
            optimizer=optimizer,
            data=data,
            output=output,
            plan=table,
        )


def dump_plan(plan: Plan) -> str:
    """The run file with the plan in it, headed by what the planner did not choose."""
    return "".join(f"# {line}\n" for line in to_choose(plan.run)) + dump_run(plan.run)


def to_choose(run: Run) -> list[str]:
    """What a person decides before training: these values are only defaults."""
    return [
        f"Choose before you train: data.source (now {run.data.source}), training.steps (now {run.training.steps:,}), "
        f"checkpoint.every (now {run.checkpoint.every}: nothing is saved),",
        f"learning_rate.peak (now {run.learning_rate.peak:g}), learning_rate.warmup_steps (now "
        f"{run.learning_rate.warmup_steps}) and output.folder (now {run.output.folder}).",
    ]


def load_plan(path: str | Path) -> Plan:
    """The plan in a run file; a training that the user changed since keeps its own fields."""
    run = load_run(path)
    if not run.plan:
        raise UserError(f"{path} has no [plan] section; write one with cuboid plan MODEL CLUSTER -o plan.toml")
    return plan_of(run, str(path))


def plan_of(run: Run, where: str = "plan") -> Plan:
    """The plan a run carries."""
    table = run.plan
    if "islands" in table:
        raise UserError(
            f"{where} plans several islands, which explain, simulate and goodput take; plan for one group, as in "
            "sites.toml:oregon"
        )
    if "lines" in table:
        raise UserError(
            f"{where} plans one job over several groups, which train, explain, simulate and map take; plan for one "
            "group, as in sites.toml:oregon"
        )
    try:
        question = Question(
            model=run.model,
            cluster=_cluster(table["cluster"]),
            global_batch=run.training.global_batch,
            sequence=run.training.sequence,
            precision=convert(table["precision"], str, "plan.precision"),
            optimizer=run.planned_optimizer(str(table["engine"])),
            average=run.optimizer.average,
            gradient_sums=run.training.gradient_sums,
            fp8_scaling=run.training.fp8_scaling,
            fp8_experts=run.training.fp8_experts,
            engine=convert(table["engine"], str, "plan.engine"),
        )
        rows = convert(table["memory"], list[dict[str, float]], "plan.memory")
        parts = convert(table["step"], dict[str, float], "plan.step")
        if not rows or sum(parts.values()) <= 0:
            raise UserError(f"{where} predicts no memory or no time; write it anew with cuboid plan … -o")
        return Plan(
            question=question,
            layout=run.layout,
            layers=convert(table["layers"], tuple[int, ...], "plan.layers"),
            parts=parts,
            memory=tuple({name: value for name, value in row.items() if name != "rank"} for row in rows),
            bubble=convert(table["bubble"], float, "plan.bubble"),
            host_memory=GIB * convert(table.get("host_memory_gib", 0.0), float, "plan.host_memory_gib"),
            utilization=convert(table["mfu"], float, "plan.mfu"),
            train_tokens=float(run.training.steps * run.training.global_batch * run.training.sequence),
            reasons=convert(table.get("reasons", []), tuple[str, ...], "plan.reasons"),
            warnings=convert(table.get("warnings", []), tuple[str, ...], "plan.warnings"),
            alternatives=tuple(
                decode(Alternative, entry, "plan.alternatives")
                for entry in convert(table.get("alternatives", []), list[dict[str, object]], "plan.alternatives")
            ),
        )
    except KeyError as missing:
        raise UserError(f"{where} lacks plan.{missing.args[0]}; write it anew with cuboid plan … -o") from None
    except (TypeError, AttributeError):
        raise UserError(f"{where} has a broken [plan] section; write it anew with cuboid plan … -o") from None


def make_plan(question: Question, refined: Refined, utilization: float) -> Plan:
    """A plan without its reasons."""
    return Plan(question=question, utilization=utilization, **vars(refined))


def as_alternative(plan: Plan) -> Alternative:
    """A plan as the other plan that was not chosen."""
    memory = round(plan.peak / GIB, 3)
    return Alternative(layout=str(plan.layout), step_seconds=plan.seconds, memory_gib=memory, parts=dict(plan.parts))


def with_notes(plan: Plan, reasons: list[str], warnings: list[str], others: list[Plan]) -> Plan:
    """The plan with why it was chosen and over what."""
    alternatives = tuple(as_alternative(other) for other in others)
    return replace(plan, reasons=tuple(reasons), warnings=tuple(warnings), alternatives=alternatives)


def plan_table(plan: Plan) -> dict[str, object]:
    question = plan.question
    return {
        "cluster": _cluster_entry(question.cluster),
        "engine": question.engine,
        "precision": question.precision,
        "step_seconds": plan.seconds,
        "tokens_per_second_per_gpu": plan.tokens,
        "mfu": plan.utilization,
        "bubble": plan.bubble,
        "memory_gib": plan.peak / GIB,
        "memory_fraction": plan.memory_fraction,
        "host_memory_gib": plan.host_memory / GIB,
        "layers": list(plan.layers),
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "step": dict(plan.parts),
        "memory": [{"rank": rank, **row} for rank, row in enumerate(plan.memory)],
        "alternatives": [encode(entry) for entry in plan.alternatives],
    }


def _cluster_entry(cluster: ClusterSpec) -> object:
    """The cluster's name where that says it all, else everything."""
    try:
        if load_cluster(cluster.name) == cluster:
            return cluster.name
    except UserError:
        pass  # described by a file of its own
    return {**encode(cluster), "tiers": [encode(tier) for tier in cluster.tiers]}


def planned_cluster(run: Run) -> ClusterSpec | None:
    """What a run was planned for; None where no planner wrote it."""
    return _cluster(run.plan["cluster"]) if "cluster" in run.plan else None


def _cluster(entry: object) -> ClusterSpec:
    if isinstance(entry, Mapping):
        return decode(ClusterSpec, entry, "plan.cluster")
    return load_cluster(str(entry))


# Why a layout is what it is, in a few lines with numbers.


WORDS = {
    "compute": "computing",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel traffic",
    "expert": "tokens to experts",
    "host": "the host",
    "bubble": "waiting for other stages",
    "transfer": "transfers between stages",
    "data": "gradients and parameters between replicas",
    "optimizer": "the optimizer",
    "straggler": "waiting for the slowest node",
}


def reasons(plan: Plan) -> list[str]:
    """What each dimension is for."""
    layout, question = plan.layout, plan.question
    cluster = question.cluster
    domain, parameters = cluster.tiers[0].size, question.model.parameters
    found = []
    if layout.tp > 1:
        inside = "stays within" if layout.tp <= domain else "leaves"
        found.append(
            f"tp={layout.tp} splits every layer and {inside} the {domain} accelerators of one {cluster.tiers[0].name} "
            f"domain; its collectives cost {_percent(plan, 'tensor')} of the step"
        )
    if layout.pp > 1:
        least, most, count = min(plan.layers), max(plan.layers), plan.micro_batches
        layers = f"{least} to {most} layers" if least < most else f"{most} layer{'s' if most > 1 else ''}"
        batches = f"{count} micro-batches leave" if count > 1 else "one micro-batch leaves"
        found.append(
            f"pp={layout.pp} ({layout.schedule}{f', {layout.vpp} stages a rank' if layout.vpp > 1 else ''}) makes "
            f"{layers} a stage; {batches} a bubble of {plan.bubble:.1%}"
        )
    if layout.cp > 1:
        found.append(
            f"cp={layout.cp} ({layout.cp_method}) leaves {question.sequence // layout.cp} tokens of a sequence to a "
            f"rank; bringing their keys together costs {_percent(plan, 'context')} of the step"
        )
    if layout.ep > 1:
        found.append(f"ep={layout.ep} spreads the experts; moving tokens costs {_percent(plan, 'expert')} of the step")
    if layout.dp > 1:
        split = {0: "nothing", 1: "the optimizer state", 2: "optimizer state and gradients", 3: "all states"}
        found.append(
            f"dp={layout.dp} replicas of {amount(parameters)} parameters share {split[layout.zero]} "
            f"(zero={layout.zero}); their traffic costs {_percent(plan, 'data')} of the step"
        )
    if layout.batch_weights:
        what = "sequences in each micro-batch" if layout.has_unequal_sizes else "micro-batches"
        found.append(
            f"batch_weights={format_weights(layout.batch_weights)} gives replicas so many {what} beside one another; "
            "the one that has most decides the time here, where ranks are taken to be equally fast"
        )
    fullest = plan.totals.index(plan.peak)
    found.append(
        f"{recomputation(layout)}: pipeline rank {fullest} is the fullest with {plan.peak / GIB:.1f} of "
        f"{cluster.memory_gib:.1f} GiB"
    )
    if plan.host_memory:
        node = plan.host_memory * min(cluster.accelerators_per_node, layout.world_size)
        found.append(
            f"offload=true keeps {plan.host_memory / GIB:.1f} GiB of optimizer state a rank in CPU memory, "
            f"{node / GIB:.1f} GiB a node; bringing it over costs {_percent(plan, 'optimizer')} of the step"
        )
    return found


def error_line(plan: Plan) -> str:
    """What the prediction is worth."""
    if plan.error:
        return plan.error.sentence
    question = plan.question
    kind = "mixture" if question.model.mixture else "dense model"
    return (
        f"fewer than three published runs of a {kind} with {question.engine} on {question.cluster.accelerator} were "
        "held out: how far this step time is off is not known"
    )


def recomputation(layout: Layout) -> str:
    """What is recomputed, in words."""
    words = {"none": "no", "selective": "selective", "full": "full"}
    if not layout.recompute_layers:
        return f"{words[layout.recompute]} recomputation"
    where = "" if layout.stages == 1 else " of each stage"
    return (
        f"{layout.recompute} recomputation of {layout.recompute_layers} layers{where}, "
        f"{words[layout.recompute_at(layout.recompute_layers)]} recomputation of the others"
    )


def amount(count: float) -> str:
    """A large number in words, for B is a byte too: 174.6 billion."""
    for unit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= unit:
            return f"{count / unit:.4g} {word}"
    return f"{count:g}"


def _percent(plan: Plan, part: str) -> str:
    return f"{plan.parts[part] / plan.seconds:.1%}"


def losses(chosen: dict[str, float], other: dict[str, float], count: int = 2) -> str:
    """Where another layout loses most against the chosen one."""
    differences = sorted(((other[name] - chosen[name], name) for name in chosen), reverse=True)
    lost = [f"{difference:+.3g} s {WORDS[name]}" for difference, name in differences[:count] if difference > 0]
    return ", ".join(lost)
