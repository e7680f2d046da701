"""Why a layout is what it is, in a few lines with numbers."""

from cuboid.planning.plan import GIB, Plan
from cuboid.spec.layout import Layout

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
            f"domain; its collectives cost {_share(plan, 'tensor')} of the step"
        )
    if layout.pp > 1:
        found.append(
            f"pp={layout.pp} ({layout.schedule}{f', {layout.vpp} stages a rank' if layout.vpp > 1 else ''}) leaves "
            f"{min(plan.layers)} to {max(plan.layers)} layers a stage; {plan.micro_batches} micro-batches keep the "
            f"bubble at {plan.bubble:.1%}"
        )
    if layout.cp > 1:
        found.append(
            f"cp={layout.cp} ({layout.cp_method}) leaves {question.sequence // layout.cp} tokens of a sequence to a "
            f"rank; bringing their keys together costs {_share(plan, 'context')} of the step"
        )
    if layout.ep > 1:
        found.append(f"ep={layout.ep} spreads the experts; moving tokens costs {_share(plan, 'expert')} of the step")
    if layout.dp > 1:
        split = {0: "nothing", 1: "the optimizer state", 2: "optimizer state and gradients", 3: "all states"}
        found.append(
            f"dp={layout.dp} replicas of {amount(parameters)} parameters share {split[layout.zero]} "
            f"(zero={layout.zero}); their traffic costs {_share(plan, 'data')} of the step"
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
            f"{node / GIB:.1f} GiB a node; bringing it over costs {_share(plan, 'optimizer')} of the step"
        )
    return found


def error_line(plan: Plan) -> str:
    """What the prediction is worth."""
    if plan.error:
        return plan.error.sentence
    question = plan.question
    kind = "mixture" if question.model.mixture else "dense model"
    return (
        f"nobody published a {kind} trained with {question.engine} on {question.cluster.accelerator}: how far this "
        "step time is off is not known"
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


def _share(plan: Plan, part: str) -> str:
    return f"{plan.parts[part] / plan.seconds:.1%}"


def losses(chosen: dict[str, float], other: dict[str, float], count: int = 2) -> str:
    """Where another layout loses most against the chosen one."""
    differences = sorted(((other[name] - chosen[name], name) for name in chosen), reverse=True)
    lost = [f"{difference:+.3g} s {WORDS[name]}" for difference, name in differences[:count] if difference > 0]
    return ", ".join(lost)
