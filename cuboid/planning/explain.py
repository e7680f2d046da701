"""Why a plan is what it is: the decision framework, traffic, memory, time and rivals, with formulae and values."""

from dataclasses import dataclass

import numpy as np

from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.memory import kept_per_layer
from cuboid.cost.sharding import rank_parameters
from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.own_models import largest_kept, own_rank_held
from cuboid.planning.plan import GIB, WORDS, Plan, error_line, losses, recomputation
from cuboid.planning.question import Question
from cuboid.planning.space import Space
from cuboid.planning.stages import held
from cuboid.planning.traffic import Moved, moved, sent
from cuboid.spec.layout import Layout, format_weights
from cuboid.spec.plugin import PythonModelSpec

# The decision framework, computed: does a layer fit an accelerator, does the model fit a node, what is left for data.
#
# States by the textbook rule for Adam in mixed precision: 2 B of weights, 2 B of gradients and 12 B of optimizer state
# per parameter; a line says so where the engine keeps others. Gigabytes are decimal here, as in the papers.


TEXTBOOK = (2.0, 2.0, 12.0)
STATES = sum(TEXTBOOK)
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The three questions and their answers for one layout; bytes."""

    accelerator: float
    """Memory of one accelerator."""
    node_size: int
    parameters: int
    layer_parameters: int
    """Of the largest layer."""
    layer_states: float
    layer_activations: float
    """One sequence in one layer."""
    tensor_needed: int
    """Least ranks that hold a layer between them."""
    states: float
    nodes_needed: int
    """Least nodes that hold all states."""
    replica: int
    """Accelerators of one replica: tp × pp × cp."""
    replicas: int
    each: tuple[float, float, float]
    """Bytes of a parameter's weight, gradient and optimizer state as the engine keeps them."""
    weights: float
    """Per rank, after tp × pp."""
    gradients: float
    optimizer: float

    @property
    def layer_fits(self) -> bool:
        """Whether one layer with its activations fits one accelerator."""
        return self.tensor_needed == 1

    @property
    def node_fits(self) -> bool:
        """Whether all states fit one node."""
        return self.nodes_needed == 1


def framework(question: Question, layout: Layout) -> Framework:
    """The framework for one layout of the question."""
    model, cluster = question.model, question.cluster
    memory = cluster.memory_gib * 2**30
    layer = max(model.layer_parameters(index) for index in (0, model.layers - 1))
    if isinstance(model, PythonModelSpec):
        layer, kept = max(map(model.layer_parameters, range(model.layers))), largest_kept(question)
    else:
        jobs = Jobs.make(global_batch=1, sequence=question.sequence, sequence_parallel=0)
        kept = max(float(value) for value in kept_per_layer(Shape.of(model), jobs, question.profile))
    engine = question.profile
    layer_bytes = STATES * layer + kept
    rank = layout.tp * layout.pp
    node = min(cluster.tiers[0].size, cluster.accelerators)
    states = STATES * model.parameters
    weights, gradients, optimizer = (each * model.parameters / rank for each in TEXTBOOK)
    return Framework(
        accelerator=memory,
        node_size=node,
        parameters=model.parameters,
        layer_parameters=layer,
        layer_states=STATES * layer,
        layer_activations=kept,
        tensor_needed=_least(layer_bytes, memory),
        states=states,
        nodes_needed=_least(states, node * memory),
        replica=rank * layout.cp,
        replicas=layout.dp,
        each=(engine.weight_bytes, engine.gradient_bytes, engine.optimizer_bytes),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
    )


def _least(needed: float, available: float) -> int:
    return max(-(-int(needed) // int(available)), 1)


def decision_lines(found: Framework, layout: Layout, cluster: str) -> list[str]:
    """The three steps as sentences a reader can check by hand."""
    layer = (
        f"1. One layer: {STATES:g} bytes × {found.layer_parameters / GB:.4g} billion parameters = "
        f"{found.layer_states / GB:.4g} GB of states + {found.layer_activations / GB:.3g} GB of activations for one "
        f"sequence, on {found.accelerator / GB:.4g} GB: "
    )
    layer += (
        "fits, so tensor parallelism is a choice"
        if found.layer_fits
        else f"does not fit, so tensor parallelism must split it at least {found.tensor_needed} ways"
    )
    node = (
        f"2. The model: {STATES:g} bytes × {found.parameters / GB:.4g} billion parameters = "
        f"{found.states / 1e12:.4g} TB of states, on a node of {found.node_size} × {found.accelerator / GB:.4g} GB = "
        f"{found.node_size * found.accelerator / 1e12:.4g} TB: "
    )
    node += (
        "fits, so pipeline parallelism is a choice"
        if found.node_fits
        else f"does not fit; at least {found.nodes_needed} nodes must share it, by pipeline stages or by ZeRO"
    )
    context = f" × cp={layout.cp}" if layout.cp > 1 else ""
    data = (
        f"3. The rest: tp={layout.tp} × pp={layout.pp}{context} = {found.replica} accelerators hold one replica, and "
        f"{cluster} has room for {found.replicas}, so dp={layout.dp}"
    )
    textbook, own = ("{:g}, {:g} and {:g}".format(*each) for each in (TEXTBOOK, found.each))
    later = f"ZeRO, ep={layout.ep}" if layout.ep > 1 else "ZeRO"
    states = (
        f"States per rank: {textbook} bytes × {found.parameters / GB:.4g} billion / {layout.tp * layout.pp} "
        f"= {found.weights / GB:.1f} GB of weights + {found.gradients / GB:.1f} GB of gradients + "
        f"{found.optimizer / GB:.1f} GB of optimizer state (before {later} and rounding up of stages)"
    )
    if own != textbook:
        states += f"; this engine keeps {own} bytes, which the memory below is made of"
    return [layer, node, data, states]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan with everything that decides it."""

    plan: Plan
    framework: Framework
    moved: list[Moved]
    rivals: list[Plan]
    """Other plans of the same question, best first; empty where nothing else fits."""

    @property
    def best(self) -> Plan:
        """The fastest plan known, this one among them."""
        fitting = [plan for plan in (self.plan, *self.rivals) if plan.peak <= plan.question.limit]
        return min(fitting or [self.plan], key=lambda plan: plan.seconds)


def explain(question: Question, layout: Layout, rivals: int = 3) -> Explanation:
    """Predict the layout anew, and the best other layouts with it."""
    plan = predict(question, layout)
    try:
        others = [other for other in plans(question, top=rivals + 1) if other.layout != layout][:rivals]
    except UserError:
        others = []  # the layout is over the limit and so is everything else
    return Explanation(plan=plan, framework=framework(question, layout), moved=moved(plan), rivals=others)


def decision(explanation: Explanation) -> list[str]:
    """The three questions of the framework."""
    plan = explanation.plan
    return decision_lines(explanation.framework, plan.layout, plan.question.cluster.name)


def traffic_lines(explanation: Explanation) -> list[str]:
    """What travels where, with the formulas of all that is worth a line."""
    lines = []
    if not explanation.plan.question.profile.own_collectives:
        lines.append("as Cuboid's own engine would send it; times below are those of another engine:")
    total = sum(entry.seconds for entry in explanation.moved)
    for entry in explanation.moved:
        if entry.seconds < 0.005 * total:
            continue
        lines.append(
            f"{entry.dimension} over {entry.tier.name} ({entry.tier.bandwidth:g} GB/s): {entry.bytes / 1e9:.4g} GB a "
            f"rank and step, at least {entry.seconds:.3g} s with all ports of the group"
        )
        shown = [part for part in entry.parts if sent(part) > 0.01 * entry.bytes]
        lines += [f"  {formula}" for formula in entry.formulas[: len(shown)]]
    return lines


def memory_lines(explanation: Explanation) -> list[str]:
    """The fullest rank's states and activations by formula."""
    plan = explanation.plan
    layout, engine = plan.layout, plan.question.profile
    rank = plan.totals.index(plan.peak)
    row, parameters = plan.memory[rank], rank_held(plan, rank)
    of_experts = f", {parameters[1] / GB:.4g} of them of experts" if parameters[1] else ""
    lines = [f"The fullest is pipeline rank {rank}, with {sum(parameters) / GB:.4g} billion parameters{of_experts}:"]
    states = (("weights", engine.weight_bytes, 3), ("gradients", engine.gradient_bytes, 2))
    for name, each, stage in (*states, ("optimizer", engine.optimizer_bytes, 1)):
        count, formula = after_zero(layout, parameters, stage)
        if name == "optimizer" and plan.host_memory:
            lines.append(f"optimizer: {each:g} bytes × {formula}, in CPU memory (offload=true)")
            continue
        more = row[name] - each * count
        why = "of AdamW's second moments" if name == "optimizer" else "not yet summed"
        beside = f" + {more / GIB:.2f} GiB {why}" if more > 0.01 * row[name] else ""
        beside = " of which none is kept" if more < -0.01 * each * count else beside
        lines.append(f"{name}: {each:g} bytes × {formula}{beside} = {row[name] / GIB:.2f} GiB")
    own = sum(plan.layers[stage] for stage in layout.stages_of(rank))
    kept = "boundaries of its layers" if layout.recompute == "full" else "what its layers keep for backward"
    if layout.recompute_layers:
        kept = f"what they keep with {recomputation(layout)}"
    predicted = plan.question.model.prediction_layers * (layout.stages - 1 in layout.stages_of(rank))
    beside = f" and {predicted} prediction {'layer' if predicted == 1 else 'layers'}" if predicted else ""
    lines.append(
        f"activations: {own} layers{beside}, {kept}, of the micro-batches in flight under {layout.schedule} = "
        f"{row['activations'] / GIB:.2f} GiB"
    )
    others = sum(row[name] for name in ("logits", "transient", "buffers", "reserve"))
    lines.append(f"logits, transient, buffers, reserve: {others / GIB:.2f} GiB")
    lines.append(
        f"together {plan.peak / GIB:.2f} GiB of {plan.question.cluster.memory_gib:.1f} GiB, {plan.memory_fraction:.0%}"
    )
    return lines


def rank_held(plan: Plan, rank: int) -> tuple[float, float]:
    """Parameters of a pipeline rank, all but experts and those of experts, before ZeRO splits them."""
    layout, question = plan.layout, plan.question
    if isinstance(question.model, PythonModelSpec):
        return own_rank_held(question, layout, rank)
    part = held(question.model, layout, question.sequence)
    jobs = Space.of([layout], question).jobs
    found = rank_parameters(Shape.of(question.model), jobs, part.layers, *part.ends())
    plain, routed = (np.broadcast_to(each, layout.pp)[rank] for each in (found.plain, found.routed))
    return float(plain), float(routed)


def after_zero(layout: Layout, held: tuple[float, float], stage: int) -> tuple[float, str]:
    """How many parameters a rank keeps something of that ZeRO splits from a stage on, and the formula."""
    shard = layout.shard_size * layout.cp
    if layout.zero < stage or shard * layout.tp == 1:
        return sum(held), f"{sum(held) / GB:.4g} billion"
    experts = max(shard * layout.tp // layout.ep, 1)
    fuller = layout.fuller_shard
    kept = fuller * (held[0] / shard + held[1] / experts)
    largest = f" × {fuller:.3g}, the largest of shard_weights={format_weights(layout.shard_weights)}"
    zero = f"(zero={layout.zero}{largest if fuller > 1 else ''})"
    if not held[1]:
        return kept, f"{held[0] / GB:.4g} billion / {shard} {zero}"
    return kept, f"({held[0] / GB:.4g} / {shard} + {held[1] / GB:.4g} / {experts}) billion {zero}"


def bubble_line(explanation: Explanation) -> str:
    """The bubble, the same number as everywhere."""
    plan = explanation.plan
    layout = plan.layout
    if layout.pp == 1:
        return "no pipeline, no bubble"
    return (
        f"bubble: a rank does nothing in {plan.bubble:.1%} of the pipeline's time on average, simulated with these "
        f"stages and messages ({layout.schedule}, {plan.micro_batches} micro-batches); the times are the busiest rank's"
    )


def time_lines(explanation: Explanation) -> list[str]:
    """Where the seconds go."""
    plan = explanation.plan
    order = sorted(plan.parts.items(), key=lambda item: -item[1])
    lines = [
        f"{seconds:8.3f} s {seconds / plan.seconds:6.1%}  {WORDS[name]}" for name, seconds in order if seconds > 5e-4
    ]
    return [
        *lines,
        f"{plan.seconds:8.3f} s 100.0%  a step; {plan.tokens:,.0f} tokens/s/GPU, MFU {plan.utilization:.1%}",
    ]


def rival_lines(explanation: Explanation) -> list[str]:
    """What the others lose, or win."""
    plan, best = explanation.plan, explanation.best
    lines = []
    if plan.peak > plan.question.limit:
        more = (plan.peak - plan.question.limit) / GIB
        lines.append(f"this layout is {more:.1f} GiB over the limit of {plan.question.limit / GIB:.1f} GiB a rank")
    if best is plan:
        lines.append("no other layout searched is faster")
    else:
        change = best.seconds / plan.seconds - 1
        lines.append(
            f"the planner's own choice, {best.layout}, takes {best.seconds:.4g} s ({change:+.1%}): "
            f"{losses(best.parts, plan.parts, 3) or 'the same parts'} here"
        )
    for other in explanation.rivals:
        if other is best:
            continue
        change = other.seconds / plan.seconds - 1
        told = losses(plan.parts, other.parts) if change >= 0 else f"{losses(other.parts, plan.parts)} here"
        lines.append(f"{other.layout} takes {other.seconds:.4g} s ({change:+.1%}){f': {told}' if told else ''}")
    return lines


def sections(explanation: Explanation) -> dict[str, list[str]]:
    """All of it, by title, in the order of reading."""
    return {
        "Decision": decision(explanation),
        "Traffic": traffic_lines(explanation) or ["one rank talks to nobody"],
        "Memory": memory_lines(explanation),
        "Time": [bubble_line(explanation), *time_lines(explanation)],
        "Rivals": rival_lines(explanation),
        "Notes": [error_line(explanation.plan), *explanation.plan.warnings],
    }
