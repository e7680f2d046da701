"""Why a plan is what it is: the decision framework, traffic, memory, time and rivals, with formulae and values."""

from dataclasses import dataclass

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.framework import Framework, decision_lines, framework
from cuboid.planning.plan import GIB, WORDS, Plan, error_line, losses, recomputation
from cuboid.planning.question import Question
from cuboid.planning.traffic import Moved, moved, parameters_held, sent
from cuboid.spec.layout import Layout


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
    if not explanation.plan.question.profile.own_exchanges:
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
    row, held = plan.memory[rank], parameters_held(plan)
    shard = layout.shard_size * layout.cp
    lines = [f"The fullest is pipeline rank {rank}, where the widest rank holds {held / 1e9:.4g} billion parameters:"]
    states = (("weights", engine.weight_bytes, 3), ("gradients", engine.gradient_bytes, 2))
    for name, each, stage in (*states, ("optimizer", engine.optimizer_bytes, 1)):
        split = f" / {shard} (zero={layout.zero})" if layout.zero >= stage and shard > 1 else ""
        if name == "optimizer" and plan.host_memory:
            lines.append(f"optimizer: {each:g} bytes a parameter{split}, in CPU memory (offload=true)")
            continue
        count = row[name] / each * (shard if split else 1)
        lines.append(f"{name}: {each:g} bytes × {count / 1e9:.4g} billion{split} = {row[name] / GIB:.2f} GiB")
    own = sum(plan.layers[stage] for stage in layout.stages_of(rank))
    kept = "boundaries of its layers" if layout.recompute == "full" else "what its layers keep for backward"
    if layout.recompute_layers:
        kept = f"what they keep with {recomputation(layout)}"
    lines.append(
        f"activations: {own} layers, {kept}, of the micro-batches in flight under {layout.schedule} = "
        f"{row['activations'] / GIB:.2f} GiB"
    )
    others = sum(row[name] for name in ("logits", "transient", "buffers", "reserve"))
    lines.append(f"logits, transient, buffers, reserve: {others / GIB:.2f} GiB")
    lines.append(f"together {plan.peak / GIB:.2f} GiB of {plan.question.cluster.memory_gib:.1f} GiB, {plan.share:.0%}")
    return lines


def bubble_line(explanation: Explanation) -> str:
    """The bubble, the same number as everywhere."""
    plan = explanation.plan
    layout = plan.layout
    if layout.pp == 1:
        return "no pipeline, no bubble"
    return (
        f"bubble: a rank does nothing in {plan.bubble:.1%} of the pipeline's time on average, simulated with these "
        f"stages and messages ({layout.schedule}, {plan.micro_batches} micro-batches)"
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
        lines.append(f"this layout is over the limit of {plan.question.limit / GIB:.1f} GiB a rank")
    if best is plan:
        lines.append("no other layout searched is faster")
    else:
        gain = plan.seconds / best.seconds - 1
        lines.append(
            f"the planner's own choice, {best.layout}, takes {best.seconds:.4g} s and beats it by {gain:.1%}: "
            f"{losses(best.parts, plan.parts, 3) or 'the same parts'} here"
        )
    for other in explanation.rivals:
        if other is best:
            continue
        change = other.seconds / plan.seconds - 1
        slower = losses(plan.parts, other.parts)
        lines.append(f"{other.layout} takes {other.seconds:.4g} s ({change:+.1%}){f': {slower}' if slower else ''}")
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
