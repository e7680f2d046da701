"""Plans of models of one's own. What a block costs is not written in formulas but found by running its modules on
tensors without contents (`model.segment_costs`): operations, bytes kept and alive, collectives.

Memory follows the schedule's own list of actions, segment by segment, as the engine runs them. Seconds are those of
each operation at the rate of the accelerator or of its memory, whichever is slower, and of collectives as for any
model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import log
from typing import Any

import numpy as np

from cuboid.cost.communication import ONE, all_gather, all_reduce, all_to_all, group, reduce_scatter, stage_transfer
from cuboid.cost.inputs import Array, Jobs, single
from cuboid.cost.memory import LIBRARIES
from cuboid.cost.step import PARTS
from cuboid.errors import UserError
from cuboid.planning.plan import Plan, reasons, with_notes
from cuboid.planning.question import Question
from cuboid.planning.refine import Pipeline, StageSeconds, makespans, short_counts
from cuboid.planning.stages import Held, held
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.simulate import StageCosts
from cuboid.schedule.table import Kind
from cuboid.spec.fitting import check
from cuboid.spec.layout import RECOMPUTE, Layout, Recompute
from cuboid.spec.plugin import PythonModelSpec, SegmentRun

LARGEST_MICRO_BATCH = 64
WAITS = {"tp": "tensor", "sequence": "tensor", "ep": "expert"}
"""Dimension of a collective inside a segment -> the part of a step that counts it."""
SLOWER = 1.5
"""How many times the fastest step one may take that is chosen for its memory."""


def own_plans(question: Question, top: int, objective: str) -> list[Plan]:
    """The best plans of the whole cluster, best first."""
    estimates = []
    refused: set[int] = set()
    enough: set[Layout] = set()
    for layout in _layouts(question):
        plain = replace(layout, recompute="none")
        if objective == "time" and plain in enough:
            continue  # it fits with less recomputed, which is faster
        try:
            if layout.tp not in refused:
                estimates.append(_Costs(question, layout, estimated=True).plan())
                enough |= {plain} if estimates[-1].peak <= question.limit else set()
        except UserError:
            if layout.tp == 1:
                raise
            refused.add(layout.tp)  # more tensor ranks than heads, say, which only running the module shows
    if not estimates:
        raise UserError(
            f"model={question.model.name} has no layout on {question.cluster.name} with global_batch="
            f"{question.global_batch}; use another batch or fix less"
        )
    least = min(estimates, key=lambda plan: plan.peak)
    estimates = sorted((plan for plan in estimates if plan.peak <= question.limit), key=_order)
    if objective == "memory" and estimates:
        slowest = SLOWER * estimates[0].seconds
        estimates = sorted((plan for plan in estimates if plan.seconds <= slowest), key=lambda plan: plan.peak)
    fitting: list[Plan] = []
    for estimate in estimates:
        plan = _Costs(question, estimate.layout).plan()
        if plan.peak <= question.limit:
            fitting.append(plan)
        if len(fitting) == max(top, 3):
            break
    if not fitting:
        raise UserError(
            f"model={question.model.name} does not fit {question.cluster.name}: {least.layout} needs least, "
            f"{least.peak / 2**30:.4g} GiB of {question.limit / 2**30:.4g}; use more or larger accelerators"
        )
    first, *others = fitting
    return [with_notes(first, reasons(first), [], others[: max(top - 1, 2)]), *others[: top - 1]]


def _order(plan: Plan) -> tuple[float, ...]:
    """Fastest first; of what is alike to half a percent the simplest."""
    layout = plan.layout
    return round(200 * log(plan.seconds)), layout.pp, layout.tp, layout.zero, plan.peak


def own_plan(question: Question, layout: Layout) -> Plan:
    """The plan of one given layout, whether or not it fits."""
    check(layout, question.model, global_batch=question.global_batch, sequence=question.sequence)
    plan = _Costs(question, layout).plan()
    return with_notes(plan, reasons(plan), [], [])


def own_stage_seconds(question: Question, layout: Layout) -> StageSeconds:
    """Seconds of every stage for one micro-batch."""
    return _Costs(question, layout).stage_seconds


def own_rank_held(question: Question, layout: Layout, rank: int) -> tuple[float, float]:
    """Parameters of a pipeline rank, all but experts and those of experts, before ZeRO splits them."""
    costs = _Costs(question, layout)
    found = [costs.of(prefix) for prefix in costs.prefixes(rank)]
    routed = sum(each.routed for each in found)
    return float(sum(each.parameters for each in found) - routed), float(routed)


def largest_kept(question: Question) -> float:
    """Bytes that a layer keeps of one sequence for its backward pass, of the one that keeps most."""
    model = question.model
    assert isinstance(model, PythonModelSpec)
    run = SegmentRun(1, 1, question.sequence, question.precision, on_gpu=not question.on_cpu)
    return float(max(model.built.costs(f"layers.{layer}", run).kept for layer in range(model.layers)))


def _layouts(question: Question) -> Iterator[Layout]:
    """All that the engine can train on the whole cluster, as far as the user has left them open."""
    world, fixed = question.cluster.accelerators, dict(question.fixed)

    def options(name: str, usual: Sequence[Any]) -> Sequence[Any]:
        return [fixed[name]] if name in fixed else usual

    divisors = [size for size in range(1, world + 1) if world % size == 0]
    widths = [size for size in divisors if size <= question.cluster.tiers[0].size]
    for tp in options("tp", widths):
        for pp in options("pp", [size for size in divisors if size <= question.model.layers]):
            if world % (tp * pp):
                continue
            dp = world // (tp * pp)
            spread = [size for size in divisors if dp * tp % size == 0] if question.model.is_routed else [1]
            several = product(
                options("ep", spread),
                options("zero", [0, 1, 2, 3] if dp > 1 else [0]),
                options("micro_batch", _micro_batches(question, dp)),
                options("recompute", RECOMPUTE),
            )
            for ep, zero, micro_batch, recompute in several:
                chosen = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "zero": zero, "micro_batch": micro_batch}
                chosen |= {"recompute": recompute, "sequence_parallel": False}
                try:
                    layout = Layout(**{**chosen, **fixed})
                    batch, sequence = question.global_batch, question.sequence
                    check(layout, question.model, global_batch=batch, sequence=sequence)
                except UserError:
                    continue
                yield layout


def _micro_batches(question: Question, dp: int) -> list[int]:
    found, size = [], 1
    while size <= LARGEST_MICRO_BATCH and question.global_batch % (dp * size) == 0:
        found.append(size)
        size *= 2
    return found


@dataclass(frozen=True)
class _Rates:
    flops: float
    bandwidth: float
    floor: float

    def seconds(self, work: Sequence[tuple[float, float]]) -> float:
        return sum(max(self.floor, flops / self.flops, moved / self.bandwidth) for flops, moved in work)


@dataclass(frozen=True)
class _Unit:
    """Parameters that the same ranks hold."""

    size: int
    copies: int
    """Ranks that hold them."""
    shards: int
    """Ranks that split ZeRO's state of them."""
    stride: int
    """How far apart these are."""
    keeps_none: bool
    """Whether gradients stay as the backward pass leaves them: of one micro-batch, with nobody to add."""

    @property
    def shard(self) -> float:
        return self.size / self.shards


class _Costs:
    """One layout of a model."""

    def __init__(self, question: Question, layout: Layout, estimated: bool = False) -> None:
        """`estimated`: of large micro-batches, for a search."""
        self._estimated = estimated
        self._question, self._layout = question, layout
        self._engine = question.profile
        chip, wide = question.machine.chip, "float32" if question.precision == "float32" else "bf16"
        share = chip.linear_efficiency.get(wide, chip.linear_efficiency["bf16"])
        self._rates = _Rates(
            chip.peak[wide] * share / self._engine.linear_scale,
            chip.memory_bandwidth * chip.memory_efficiency,
            chip.kernel_floor,
        )
        self._adds_in_place = layout.zero < 2 and question.precision == "float32"
        self._element = 4 if question.precision == "float32" else 2
        self._known: dict[str, Any] = {}
        self._micro_batches = question.global_batch // (layout.dp * layout.micro_batch)

    @cached_property
    def _part(self) -> Held:
        layout = self._layout
        return held(self._question.model, layout, self._question.sequence)

    @cached_property
    def _stages(self) -> list[list[str]]:
        """Names of the segments of every stage."""
        found: list[list[str]] = []
        layer = 0
        for count in self._part.counts:
            found.append([f"layers.{layer + place}" for place in range(count)])
            layer += count
        found[0].insert(0, "embedding")
        found[-1].append("head")
        return found

    @cached_property
    def _recompute(self) -> dict[str, Recompute]:
        """Of every layer."""
        return {
            prefix: self._layout.recompute_at(place)
            for stage in self._stages
            for place, prefix in enumerate(each for each in stage if each.startswith("layers."))
        }

    @cached_property
    def _splits_backward(self) -> bool:
        layout = self._layout
        return make_schedule(layout.schedule, layout.pp, self._counted, layout.vpp).splits_backward

    def of(self, prefix: str) -> Any:
        """What a segment costs (`SegmentCosts`)."""
        if prefix not in self._known:
            model, layout, question = self._question.model, self._layout, self._question
            assert isinstance(model, PythonModelSpec)
            run = SegmentRun(
                layout.tp,
                layout.micro_batch,
                question.sequence,
                question.precision,
                self._recompute.get(prefix, "none"),
                self._splits_backward,
                adds_in_place=self._adds_in_place,
                on_gpu=not question.on_cpu,
                expert=layout.ep,
            )
            find = model.built.estimated_costs if self._estimated else model.built.costs
            self._known[prefix] = find(prefix, run)
        return self._known[prefix]

    def plan(self) -> Plan:
        parts, bubble = self._parts()
        memory = tuple(self._memory(rank) for rank in range(self._layout.pp))
        layout, question = self._layout, self._question
        flops = sum(self.of(prefix).flops for stage in self._stages for prefix in stage)
        peak = question.machine.chip.peak["float32" if question.precision == "float32" else "bf16"]
        whole = flops * self._micro_batches * layout.dp * layout.tp
        used = whole / (sum(parts.values()) * layout.world_size * peak)
        return Plan(
            question=question,
            layout=layout,
            layers=self._part.counts,
            parts=parts,
            memory=memory,
            bubble=bubble,
            utilization=used,
        )

    # Seconds.

    @cached_property
    def _passes(self) -> tuple[Array, dict[str, Array]]:
        """Seconds of the forward and backward pass of each stage, and by part of a step those of them that wait for
        other ranks: (2, stages)."""
        layout, shape = self._layout, (2, self._layout.stages)
        compute, waits = np.zeros(shape), {part: np.zeros(shape) for part in WAITS.values()}
        for stage, prefixes in enumerate(self._stages):
            for costs in map(self.of, prefixes):
                host = self._engine.host_mixture if costs.routed else 0.0  # routing takes it no less
                compute[:, stage] += [max(host, self._rates.seconds(work)) for work in (costs.forward, costs.backward)]
                for way, collectives in enumerate((costs.forward_collectives, costs.backward_collectives)):
                    for dimension, kind, size in collectives:
                        ranks = layout.ep if dimension == "ep" else layout.tp
                        waits[WAITS[dimension]][way, stage] += self._collective(kind, size, ranks)
        return compute + sum(waits.values()), waits

    def _collective(self, kind: str, size: float, ranks: int) -> float:
        """Seconds that ranks beside one another wait in one."""
        fabric, whole = self._question.machine.fabric, np.asarray(float(size))
        members = group(fabric, np.asarray(float(ranks)), ONE)
        if kind == "all-to-all":
            away = all_to_all(fabric, whole, members, whole * (1 - 1 / members.nodes))
            return single(away) * (1 - self._engine.expert_overlap)
        return single((all_gather if kind == "all-gather" else all_reduce)(fabric, whole, members))

    @cached_property
    def stage_seconds(self) -> StageSeconds:
        layout, fabric = self._layout, self._question.machine.fabric
        forward, backward = self._passes[0]
        weight = backward / 2  # of one pass, whose halves the simulator adds
        if self._splits_backward:
            weight = np.array(
                [sum(self._rates.seconds(self.of(each).weight) for each in stage) for stage in self._stages]
            )
        jobs = Jobs.of([layout], global_batch=self._question.global_batch, sequence=self._question.sequence)
        message = single(stage_transfer(fabric, np.asarray(float(self.of("layers.0").flow)), jobs))
        costs = StageCosts(
            forward=tuple(forward), input_backward=tuple(backward - weight), weight_backward=tuple(weight)
        )
        return StageSeconds(costs, message if layout.pp > 1 else 0.0)

    def _parts(self) -> tuple[dict[str, float], float]:
        layout, count = self._layout, self._micro_batches
        seconds, waits = self._passes
        busy = self._part.by_rank(list(seconds.sum(axis=0))) * count
        slowest = int(busy.argmax())
        alone = delayed = float(busy.max())
        if layout.pp > 1:
            ((alone, delayed),) = makespans([Pipeline(layout, self.stage_seconds, count, alone / count)])
        parts = dict.fromkeys(PARTS, 0.0)
        for part, each in waits.items():
            parts[part] = float(self._part.by_rank(list(each.sum(axis=0)))[slowest]) * count
        parts["compute"] = float(busy.max()) - sum(parts.values())
        parts["bubble"] = max(alone - float(busy.max()), 0.0)
        parts["transfer"] = max(delayed - alone, 0.0)
        parts["data"] = max(self._data(rank, busy[rank] / count) for rank in range(layout.pp))
        held_here = max(sum(each.shard for each in self._held(rank)) for rank in range(layout.pp))
        engine = self._engine
        touched = 2 * (engine.weight_bytes + engine.optimizer_bytes) + engine.gradient_bytes
        parts["optimizer"] = held_here * touched / self._rates.bandwidth
        parts = {name: float(seconds) for name, seconds in parts.items()}
        return parts, float(1 - busy.mean() / max(delayed, float(busy.max())))

    def _data(self, rank: int, one: float) -> float:
        """Seconds of collectives between replicas that `one`, a micro-batch's passes, do not hide."""
        layout, engine, fabric = self._layout, self._engine, self._question.machine.fabric
        summed = scattered = gathered = 0.0
        for each in self._held(rank):
            if each.copies == 1:
                continue
            members = group(fabric, np.asarray(float(each.copies)), np.asarray(float(each.stride)))
            wires = engine.gradient_wire, engine.parameter_wire
            gradients, weights = (np.asarray(each.size * wire) for wire in wires)
            summed += single(all_reduce(fabric, gradients, members))
            scattered += single(reduce_scatter(fabric, gradients, members))
            gathered += single(all_gather(fabric, weights, members))
        if layout.zero == 0:
            return max(summed - one, 0.0)
        if layout.zero < 3:
            often = self._micro_batches if layout.zero == 2 else 1
            return often * max(scattered - one, 0.0) + gathered
        return self._micro_batches * max(2 * gathered + scattered - one, 0.0)

    # Bytes.

    def prefixes(self, rank: int) -> list[str]:
        """The segments of a pipeline rank."""
        return [
            prefix for stage, where in enumerate(self._part.rank) if where == rank for prefix in self._stages[stage]
        ]

    def _units(self, prefix: str) -> list[_Unit]:
        """The experts of a segment are one of their own, because other ranks hold the same ones."""
        layout, costs = self._layout, self.of(prefix)
        once = self._micro_batches == 1 and not self._adds_in_place
        alone = once and layout.dp * layout.tp == 1 and not self._question.model.tie_embeddings
        rest = _Unit(costs.parameters - costs.routed, layout.dp, layout.shard_size, layout.tp, alone)
        holders = layout.dp * layout.tp // layout.ep
        routed = _Unit(costs.routed, holders, layout.expert_shard_size, layout.ep, once and holders == 1)
        return [each for each in (rest, routed) if each.size]

    def _held(self, rank: int) -> list[_Unit]:
        return [unit for prefix in self.prefixes(rank) for unit in self._units(prefix)]

    def _memory(self, rank: int) -> dict[str, float]:
        layout, engine = self._layout, self._engine
        units = self._held(rank)

        def split(each: float, stage: int, units: list[_Unit] = units) -> float:
            return each * sum(unit.shard if layout.zero >= stage else unit.size for unit in units)

        kept, more = self._fullest(rank)
        # From each neighbour one message is received ahead; on a GPU one is also on its way to the next.
        on_cpu = self._question.on_cpu
        after, before = (self._neighbours(rank, side) for side in (1, -1))
        messages = self._flow * (after + before + (0 if on_cpu else after))
        if on_cpu:  # of micro-batches beyond those that `_fullest` follows
            messages += self._flow * (self._micro_batches - self._counted) * (after + before)
        row = {
            "weights": split(engine.weight_bytes, 3),
            "gradients": split(engine.gradient_bytes, 2, [unit for unit in units if not unit.keeps_none]),
            "optimizer": split(engine.optimizer_bytes, 1),
            "activations": kept + messages,
            "logits": 0.0,
            "transient": more + (0.0 if on_cpu else LIBRARIES),
            "buffers": 0.0 if on_cpu else float(engine.fixed),
        }
        reserve = 1.0 if on_cpu else engine.reserve
        return {**row, "reserve": (reserve - 1) * sum(row.values())}

    def _neighbours(self, rank: int, side: int) -> int:
        """Stages before or after one of this rank's that are on another one."""
        where = self._part.rank
        beside = [stage + side for stage, holder in enumerate(where) if holder == rank]
        return sum(0 <= stage < len(where) and where[stage] != rank for stage in beside)

    def _fullest(self, rank: int) -> tuple[float, float]:
        """Bytes that are kept, and that are there for a moment, when they are most together."""
        layout = self._layout
        schedule = make_schedule(layout.schedule, layout.pp, self._counted, layout.vpp)
        live, most = 0.0, (0.0, 0.0)
        # Gradients of a segment on their way, as long as the next one computes; on CPUs the sum is there at once.
        whole = 0.0 if self._question.on_cpu else 1.0
        sent, last = 0.0, self._counted - 1

        def see(more: float) -> None:
            nonlocal most
            if live + more > sum(most):
                most = live, more

        def reduce(prefix: str, before: list[str], micro_batch: int) -> None:
            """Its gradients are whole."""
            nonlocal live, sent
            left, sent = self._element * self.of(prefix).parameters, 0.0
            for unit in self._units(prefix):
                if unit.keeps_none:
                    left -= self._element * unit.size
                    live += self._element * unit.size
                elif layout.zero >= 2:
                    see(left + sent + 4 * unit.size + self._gathered(before))
                    left -= self._element * unit.size
                    sent += 4 * (whole * unit.size + unit.shard)
                elif micro_batch == last and unit.copies > 1:
                    copies = 1 + self._question.on_cpu  # of a sum through shared memory
                    see(4 * unit.shard * copies)
                    live += 4 * unit.shard * (layout.zero == 1)

        for action in schedule.actions[rank]:
            prefixes = self._stages[action.stage]
            neighbour = action.stage + (1 if action.kind is Kind.FORWARD else -1)
            if self._question.on_cpu and action.kind is not Kind.WEIGHT and 0 <= neighbour < layout.stages:
                # Gloo says of a message only at the end of the step that it has left.
                live += self._flow * (self._part.rank[neighbour] != rank)
            if action.kind is Kind.FORWARD:
                for place, prefix in enumerate(prefixes):
                    following = prefixes[place + 1 : place + 2]
                    see(self.of(prefix).forward_peak + self._gathered([prefix, *following]))
                    live += self.of(prefix).kept
                continue
            for place in reversed(range(len(prefixes))):
                prefix, before = prefixes[place], prefixes[max(place - 1, 0) : place]
                costs = self.of(prefix)
                if action.kind is Kind.WEIGHT:
                    see(costs.weight_peak - costs.postponed + sent)
                else:
                    live -= costs.kept
                    peak = costs.input_peak if action.kind is Kind.INPUT else costs.backward_peak
                    see(peak + sent + self._gathered([prefix, *before]))
                if action.kind is Kind.INPUT:
                    live += costs.postponed
                else:
                    reduce(prefix, before, action.micro_batch)
            if action.kind is Kind.WEIGHT:  # all of a stage is let go of at once
                live -= sum(self.of(prefix).postponed for prefix in prefixes)
        if layout.zero in (1, 2):  # what was updated is copied, to be sent to all
            updated = [self._element * unit.shard for unit in self._held(rank)]
            live = sum(updated)
            see(max(updated))
        return most

    @property
    def _counted(self) -> int:
        """Micro-batches after which a rank's list of actions only repeats itself."""
        return short_counts(self._layout.pp, self._micro_batches, self._layout.schedule == "gpipe")[1]

    @property
    def _flow(self) -> float:
        """Bytes of a message between stages."""
        return float(self.of("layers.0").flow) if self._layout.pp > 1 else 0.0

    def _gathered(self, prefixes: list[str]) -> float:
        if self._layout.zero < 3:
            return 0.0
        return float(self._element * sum(self.of(prefix).parameters for prefix in prefixes))
