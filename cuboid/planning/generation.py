"""Layouts for generation: how many sequences the cache holds, how soon the first token comes, and how many follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from cuboid.cost.communication import stage_transfer
from cuboid.cost.compute import kernels
from cuboid.cost.constants import engine_for
from cuboid.cost.estimate import Machine, machine_of
from cuboid.cost.inputs import Jobs, Shape, number, single
from cuboid.cost.layers import layer_times
from cuboid.errors import UserError
from cuboid.planning.question import MEMORY_FRACTION
from cuboid.planning.space import divisors
from cuboid.spec.cluster import ClusterSpec
from cuboid.spec.fitting import check_model
from cuboid.spec.generation import DIMENSIONS, cache_bytes
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.partition import partition
from cuboid.spec.sharding import ShardingRank, units

ITEM_BYTES = {"bf16": 2, "float32": 4}
OBJECTIVES = ("throughput", "latency")
CHUNK = 512
"""Tokens of prompts in one forward pass."""
LARGEST_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class GenerationQuestion:
    model: ModelSpec
    cluster: ClusterSpec
    prompt_tokens: int
    output_tokens: int
    precision: str = "bf16"
    objective: str = "throughput"
    """throughput: most tokens per second over all sequences the cache holds; latency: the least time from one token of
    a sequence to its next, alone."""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UserError(f"unknown objective={self.objective}; use {' or '.join(OBJECTIVES)}")
        if self.precision not in ITEM_BYTES:
            raise UserError(f"precision={self.precision} cannot be generated in; use {' or '.join(ITEM_BYTES)}")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise UserError("prompt-tokens and output-tokens must be at least 1; use --prompt-tokens 512")
        if self.length > self.model.max_positions:
            raise UserError(
                f"prompt-tokens={self.prompt_tokens} and output-tokens={self.output_tokens} are more than "
                f"max_positions={self.model.max_positions} of {self.model.name}; use fewer"
            )

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @cached_property
    def machine(self) -> Machine:
        return machine_of(self.cluster)


@dataclass(frozen=True)
class GenerationPlan:
    layout: Layout
    first_token_seconds: float
    """From a prompt to its first token, alone."""
    token_seconds: float
    """From one token of a sequence to its next, with `batch` of them in flight on each replica."""
    tokens_per_second: float
    """Written by all replicas, prompts read in between."""
    batch: int
    sequences: int
    """How many of this length the cache of one replica holds beside the weights."""
    weight_bytes: int
    """Of the fullest rank,"""
    cache_bytes: int
    """and of its cache for `batch` sequences."""

    @property
    def written_layout(self) -> str:
        """As `cuboid generate --layout` takes it."""
        return ",".join(f"{name}={size}" for name in DIMENSIONS if (size := getattr(self.layout, name)) > 1) or "dp=1"


def weight_bytes(model: ModelSpec, layout: Layout, layers: range, first: bool, last: bool, item_bytes: int) -> int:
    """What a rank with these layers holds."""
    rank = ShardingRank(layout.tp, 0, layout.ep, 0)
    return item_bytes * sum(
        prod(split.slice_of(name, shape, rank).local_shape(shape))
        for unit in units(model, layers, first, last)
        for name, (shape, split) in unit.parameters.items()
    )


def generation_plans(question: GenerationQuestion, top: int = 5) -> list[GenerationPlan]:
    """The best layouts for the whole cluster, best first."""
    found = [plan for layout in _layouts(question) if (plan := plan_generation(question, layout)) is not None]
    if not found:
        raise UserError(
            f"{question.model.name} with {question.length} tokens fits no layout of {question.cluster.name}; "
            "use more accelerators, or precision=bf16"
        )
    if question.objective == "latency":
        return sorted(found, key=lambda plan: (plan.token_seconds, -plan.tokens_per_second))[:top]
    return sorted(found, key=lambda plan: (-plan.tokens_per_second, plan.token_seconds))[:top]


def _layouts(question: GenerationQuestion) -> Iterator[Layout]:
    world, model = question.cluster.accelerators, question.model
    for tp in divisors(world):
        for pp in divisors(world // tp):
            dp = world // (tp * pp)
            for ep in divisors(dp * tp) if model.mixture is not None else [1]:
                layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, sequence_parallel=False)
                try:
                    check_model(layout, model)
                except UserError:
                    continue
                yield layout


def plan_generation(question: GenerationQuestion, layout: Layout) -> GenerationPlan | None:
    """None where not one sequence fits."""
    model, item = question.model, ITEM_BYTES[question.precision]
    stages = partition(model, layout.pp, question.length)
    ends = [(index == 0, index + 1 == layout.pp) for index in range(layout.pp)]
    weights = [weight_bytes(model, layout, held, *end, item) for held, end in zip(stages, ends, strict=True)]
    each = [cache_bytes(model, layout, held, 1, question.length, item) for held in stages]
    limit = MEMORY_FRACTION * question.machine.chip.memory
    engine = engine_for("cuboid", question.machine.chip)
    fixed = engine.fixed if question.cluster.accelerator != "cpu" else min(engine.fixed, 0.25 * 2**30)
    spare = limit - fixed - _working_bytes(model, layout, item)
    room = [(spare - held) / cache for held, cache in zip(weights, each, strict=True)]
    sequences = int(min(room))
    if sequences < 1:
        return None
    batch = 1 if question.objective == "latency" else min(sequences, LARGEST_BATCH)
    flights = min(layout.pp, batch)
    step = _stage_seconds(question, layout, batch / flights, 1, question.length - question.output_tokens / 2)
    alone = _stage_seconds(question, layout, 1, question.prompt_tokens, 0)
    # Batches in flight follow one another through the slowest stage; one that is alone waits for all stages.
    token = max(sum(step), max(step) * flights)
    reading = batch * max(alone)
    written = layout.dp * batch * question.output_tokens
    fullest = max(range(layout.pp), key=lambda index: weights[index] + batch * each[index])
    return GenerationPlan(
        layout,
        sum(alone),
        token,
        written / (reading + token * question.output_tokens),
        batch,
        sequences,
        weights[fullest],
        batch * each[fullest],
    )


def _working_bytes(model: ModelSpec, layout: Layout, item_bytes: int) -> float:
    """What one forward pass holds besides: a few activations of a chunk, and logits in float32."""
    inner = max(model.ffn, model.mixture.top_k * model.mixture.expert_ffn if model.mixture else 0) // layout.tp
    return CHUNK * (6 * model.hidden + 4 * inner) * item_bytes + 3 * 4 * CHUNK * model.vocab


def _stage_seconds(
    question: GenerationQuestion, layout: Layout, batch: float, sequence: int, before: float
) -> list[float]:
    """Seconds of each stage for so many tokens of each sequence, which see `before` tokens in the cache."""
    model, chip, fabric = question.model, question.machine.chip, question.machine.fabric
    shape = Shape.of(model)
    # The host's floors are those of a training's compiled blocks.
    engine = replace(engine_for("cuboid", chip), host_forward=0.0, host_collective=0.0)
    jobs = Jobs.make(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        micro_batch=batch,
        sequence=sequence,
        global_batch=batch * layout.dp,
        sequence_parallel=0,
    )
    parts = kernels(shape, jobs, chip, engine, question.precision)
    times = layer_times(shape, jobs, fabric, engine, parts, question.precision)
    dense, mixture = (single(np.asarray(kind[0].total)) for kind in (times.dense, times.mixture))
    item = ITEM_BYTES[question.precision]
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    sent = number(batch * sequence * model.hidden * item)
    hop = single(stage_transfer(fabric, sent, jobs)) if layout.pp > 1 else 0.0
    leading = model.layers if model.mixture is None else model.mixture.first_dense_layers
    # Of a prompt only the last token is asked for.
    last = Jobs.make(tp=layout.tp, micro_batch=batch, sequence=1, global_batch=batch)
    head = single(kernels(shape, last, chip, engine, question.precision).head_forward)
    seconds = []
    for index, held in enumerate(partition(model, layout.pp, question.length)):
        plain = max(0, min(held.stop, leading) - held.start)
        kept = cache_bytes(model, layout, held, 1, max(1, int(before)), item) if before else 0
        stage = plain * dense + (len(held) - plain) * mixture + batch * kept / bandwidth
        seconds.append(stage + (head if index + 1 == layout.pp else hop))
    return seconds
