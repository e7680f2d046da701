"""How many bytes each dimension of a layout moves in a step, over which links, with the formula that says so."""

from dataclasses import dataclass
from math import lcm

from cuboid.plan.plan import Plan
from cuboid.spec.cluster import LinkTier
from cuboid.spec.layout import V_SHAPED


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one rank sends for one dimension in a step."""

    dimension: str
    tier: LinkTier
    """The slowest link between the ranks of its first group."""
    bytes: float
    formula: str

    @property
    def seconds(self) -> float:
        """What the links alone would need at their printed bandwidth."""
        return self.bytes / (self.tier.bandwidth * 1e9)


def moved(plan: Plan) -> list[Moved]:
    """Every dimension that has more than one rank."""
    layout = plan.layout
    makers = {"tp": _tensor, "cp": _context, "ep": _expert, "pp": _pipeline, "dp": _data}
    return [maker(plan) for name, maker in makers.items() if getattr(layout, name) > 1]


def _tier(plan: Plan, size: int, stride: int) -> LinkTier:
    return plan.question.cluster.tier_of([0, (size - 1) * stride])


def _layers(plan: Plan) -> int:
    """Layers of the rank that has most."""
    held: dict[int, int] = {}
    layout = plan.layout
    for rank in range(layout.pp):
        held[rank] = sum(plan.layers[stage] for stage in layout.stages_of(rank))
    return max(held.values())


def _micro_tokens(plan: Plan) -> int:
    return plan.layout.micro_batch * plan.question.sequence // plan.layout.cp


def _tensor(plan: Plan) -> Moved:
    """Two sums forward and two backward in every layer; full recomputation repeats those forward."""
    layout, model = plan.layout, plan.question.model
    times = 6 if layout.recompute == "full" else 4
    layers, tokens = _layers(plan), _micro_tokens(plan)
    size = plan.micro_batches * layers * times * 2 * (layout.tp - 1) / layout.tp * 2 * tokens * model.hidden
    formula = (
        f"{plan.micro_batches} micro-batches × {layers} layers × {times} sums × 2·({layout.tp}−1)/{layout.tp} × "
        f"2 B × {tokens} tokens × {model.hidden} hidden"
    )
    return Moved(dimension="tp", tier=_tier(plan, layout.tp, 1), bytes=size, formula=formula)


def _context(plan: Plan) -> Moved:
    """Heads exchanged for tokens inside; keys and values passed on between, forward and again backward with their
    gradients. Full recomputation repeats what is forward."""
    layout, model = plan.layout, plan.question.model
    layers, tokens, again = _layers(plan), _micro_tokens(plan), int(layout.recompute == "full")
    inner, outer = layout.cp_inner, layout.cp // layout.cp_inner
    heads, shared = model.heads // layout.tp, lcm(max(model.kv_heads // layout.tp, 1), inner)
    parts = []
    if inner > 1:
        parts.append((2 + again, (inner - 1) / inner, f"({inner}−1)/{inner}", 2 * heads + 2 * shared, "heads"))
    if outer > 1:
        parts.append((3 + again, outer - 1, f"({outer}−1)", 2 * shared, "key and value heads"))
    each = 2 * plan.micro_batches * layers * tokens * model.head_dim
    size = sum(each * passes * share * count for passes, share, _, count, _ in parts)
    shown = " + ".join(f"{passes} passes × {text} × {count} {what}" for passes, _, text, count, what in parts)
    formula = (
        f"{plan.micro_batches} micro-batches × {layers} layers × 2 B × {tokens} tokens × {model.head_dim} per head × "
        f"({shown})"
    )
    return Moved(dimension="cp", tier=_tier(plan, layout.cp, layout.tp), bytes=size, formula=formula)


def _expert(plan: Plan) -> Moved:
    """Each token goes to its experts and back, forward and backward."""
    layout, model = plan.layout, plan.question.model
    top_k = model.mixture.top_k if model.mixture else 1
    layers, tokens = _layers(plan), _micro_tokens(plan) // layout.tp
    size = plan.micro_batches * layers * 4 * (layout.ep - 1) / layout.ep * 2 * tokens * top_k * model.hidden
    formula = (
        f"{plan.micro_batches} micro-batches × {layers} layers × 4 moves × ({layout.ep}−1)/{layout.ep} × 2 B × "
        f"{tokens} tokens × {top_k} experts × {model.hidden} hidden"
    )
    return Moved(dimension="ep", tier=_tier(plan, layout.ep, 1), bytes=size, formula=formula)


def _pipeline(plan: Plan) -> Moved:
    """An activation forward and a gradient back across every boundary of the rank's stages."""
    layout, model = plan.layout, plan.question.model
    split = layout.tp if layout.sequence_parallel else 1
    tokens = _micro_tokens(plan)
    boundaries = layout.vpp
    size = plan.micro_batches * 2 * boundaries * 2 * tokens * model.hidden / split
    formula = (
        f"{plan.micro_batches} micro-batches × 2 directions × {boundaries} stage{'s' if boundaries > 1 else ''} × "
        f"2 B × {tokens} tokens × {model.hidden} hidden{f' / {split}' if split > 1 else ''}"
    )
    stride = layout.world_size // layout.pp
    # Looped stages also go from the last rank to the first, the longest way of all.
    far = layout.pp if layout.vpp > 1 and layout.schedule not in V_SHAPED else 2
    return Moved(dimension="pp", tier=_tier(plan, far, stride), bytes=size, formula=formula)


def parameters_held(plan: Plan) -> float:
    """Parameters of the fullest pipeline rank by its weights, before ZeRO splits them."""
    return max(row["weights"] for row in plan.memory) / plan.question.profile.weight_bytes * _split(plan, 3)


def _split(plan: Plan, from_stage: int) -> int:
    layout = plan.layout
    return layout.shard_size * layout.cp if layout.zero >= from_stage else 1


def _data(plan: Plan) -> Moved:
    """Gradients summed over replicas; sharded states are gathered too."""
    layout, engine = plan.layout, plan.question.profile
    replicas = layout.dp * layout.cp
    gradient, parameter = engine.gradient_wire, engine.parameter_wire
    held = parameters_held(plan)
    repeated = plan.micro_batches
    around = f"({replicas}−1)/{replicas}"
    count = f"{held / 1e9:.4g} B parameters"
    if layout.zero == 0:
        per, text = 2 * gradient, f"2 × {gradient:g} B × {count} × {around}"
    elif layout.zero == 1:
        per, text = gradient + parameter, f"({gradient:g} B + {parameter:g} B) × {count} × {around}"
    elif layout.zero == 2:
        per = repeated * gradient + parameter
        text = f"({repeated} micro-batches × {gradient:g} B + {parameter:g} B) × {count} × {around}"
    else:
        per = repeated * (gradient + 2 * parameter)
        text = f"{repeated} micro-batches × ({gradient:g} B + 2 × {parameter:g} B) × {count} × {around}"
    size = per * held * (replicas - 1) / replicas
    return Moved(dimension="dp", tier=_tier(plan, layout.dp, layout.tp * layout.cp), bytes=size, formula=text)
