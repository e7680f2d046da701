"""Which change of a layout frees the memory a rank lacks, asked of the planner's own model: the smallest that is
enough, and of those the fastest."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from cuboid.errors import UserError
from cuboid.planning.choose import predict
from cuboid.planning.plan import Plan
from cuboid.planning.question import MEMORY_FRACTION, Question
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.layout import RECOMPUTE
from cuboid.spec.partition import longest_stage
from cuboid.spec.run import Run, check_supported

Changes = dict[str, Any]
LOOKED_AT = 120
"""Layouts of one size of change that are predicted at most: an answer within a few seconds."""


@dataclass(frozen=True)
class Relief:
    """What a change of the layout does for a rank."""

    change: str
    """As `--layout` takes it: recompute=selective."""
    freed: float
    """Bytes, by the planner's model."""
    enough: bool
    slower: float
    """Seconds of a step over what they are now, less one."""


def relief(run: Run, cluster: ClusterSpec, stage: int, used: float, limit: float, base: float = 0.0) -> Relief | None:
    """For the rank of a pipeline stage that wants `used` bytes, `base` of them whatever it trains, and can have
    `limit`. Where no change is enough: the one that frees most; None where nothing is left to change."""
    question = _question(run, cluster)
    wide = 2.0 if run.training.precision == "float64" else 1.0  # which the planner does not know
    now = predict(question, run.layout)
    beyond = base + max(0.0, used - base - wide * _held(now, now, stage))  # what the model does not foresee stays
    best: Relief | None = None
    for size in _sizes(run, question.on_cpu):
        found = []
        for changes, plan in _predicted(run, question, size):
            need = wide * _held(plan, now, stage) + beyond
            freed = wide * (_held(now, now, stage) - _held(plan, now, stage))
            change = ",".join(f"{name}={str(value).lower()}" for name, value in changes.items())
            found.append(Relief(change, freed, need <= MEMORY_FRACTION * limit, plan.seconds / now.seconds - 1))
        enough = [each for each in found if each.enough]
        if enough:
            return min(enough, key=lambda each: each.slower)
        best = max([*found, *([best] if best else [])], key=lambda each: each.freed, default=None)
    return best if best is not None and best.freed > 0 else None


def _question(run: Run, cluster: ClusterSpec) -> Question:
    known = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8" if "fp8" in cluster.peak_tflops else "bf16"}
    return Question(
        model=run.model,
        cluster=cluster,
        global_batch=run.training.global_batch,
        sequence=run.training.sequence,
        precision=known.get(run.training.precision, "float32"),
        optimizer=run.planned_optimizer(),
        average=run.optimizer.average,
        gradient_sums=run.training.gradient_sums,
        fp8_scaling=run.training.fp8_scaling,
        fp8_experts=run.training.fp8_experts,
    )


def _held(plan: Plan, now: Plan, stage: int) -> float:
    """By what is trained, on the same stage where there are as many, else on the fullest."""
    totals = [total - row["buffers"] for total, row in zip(plan.totals, plan.memory, strict=True)]
    return totals[stage] if plan.layout.pp == now.layout.pp else max(totals)


def _sizes(run: Run, on_cpu: bool) -> Iterator[list[Changes]]:
    """Changes from small to large: one field; ranks of data parallelism used otherwise; two fields; both."""
    layout = run.layout
    fields, parts = _recomputed(run)
    if layout.dp * layout.cp > 1:
        fields += [{"zero": stage} for stage in range(layout.zero + 1, 4)]
    smaller = (
        layout.micro_batch // part for part in range(2, layout.micro_batch + 1) if layout.micro_batch % part == 0
    )
    fields += [{"micro_batch": size} for size in smaller]
    if not layout.offload and not on_cpu:
        fields.append({"offload": True})
    if layout.tp > 1 and not layout.sequence_parallel:
        fields.append({"sequence_parallel": True})
    ranks: list[Changes] = [
        {"dp": layout.dp // factor, name: getattr(layout, name) * factor}
        for factor in (2, 4, 8)
        if layout.dp % factor == 0
        for name in ("tp", "pp", "cp")
    ]
    yield [*fields, *parts]
    yield ranks
    yield [{**one, **other} for one, other in combinations(fields, 2) if not one.keys() & other.keys()]
    yield [{**one, **other} for one in ranks for other in fields]


def _recomputed(run: Run) -> tuple[list[Changes], list[Changes]]:
    """More recomputation: of all layers, and of some of each stage."""
    layout = run.layout
    some = layout.recompute_layers
    kinds = RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1 :]
    most = longest_stage(run.model, layout.stages, run.training.sequence, layout.layers)
    numbers = sorted({most * eighths // 8 for eighths in range(1, 8)} - {0})
    whole: list[Changes] = [{"recompute_layers": 0}] if some else []
    whole += [{"recompute": kind, **({"recompute_layers": 0} if some else {})} for kind in kinds]
    parts: list[Changes] = [{"recompute_layers": number} for number in numbers if 0 < some < number]
    parts += [{"recompute": kind, "recompute_layers": number} for kind in kinds for number in numbers]
    return whole, parts


def _predicted(run: Run, question: Question, size: list[Changes]) -> Iterator[tuple[Changes, Plan]]:
    for changes in size[:LOOKED_AT]:
        try:
            changed = replace(run, layout=run.layout.changed(**changes))
            check_supported(changed)
            yield changes, predict(question, changed.layout)
        except UserError:
            continue  # it does not fit the model or the batch
