"""The recipe: a run's model and layout made into the stages, units and pipeline of this rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
from torch import Tensor, nn

from cuboid.console import say
from cuboid.errors import UserError
from cuboid.kernels.cpu_16bit import fast_matmuls
from cuboid.kernels.precision import LossScale, wide
from cuboid.kernels.recompute import Memory, with_recompute
from cuboid.model.custom import Model
from cuboid.model.fp8 import Fp8Matmul, require_fp8
from cuboid.model.fp8_experts import multiply_experts_in_fp8
from cuboid.model.initialize import initial_tensor, learning_rate_factor
from cuboid.model.linear import Linear, declared_split
from cuboid.model.load_balancing import Balance
from cuboid.model.moe import Experts, MoE, RoutedExperts
from cuboid.model.router import Router
from cuboid.model.split_backward import (
    UNTOUCHED,
    Deferral,
    defer_matmuls,
    deferrable_grouped_matmul,
    deferrable_matmul,
    split_matmul,
)
from cuboid.model.transformer import Block, Head, Prediction, drop_in
from cuboid.parallel.async_tp import compiler_options
from cuboid.parallel.compiled import compiled_attention, compiled_block, is_compiled
from cuboid.parallel.context import ContextMix
from cuboid.parallel.cross_entropy import ZLoss, fused_cross_entropy, split_cross_entropy
from cuboid.parallel.custom import Carrier, carry_buffers, initial_tensors, runner
from cuboid.parallel.expert import join_sequences, make_balance, spread_experts, stay_on, watched
from cuboid.parallel.fused_block import fuse_matmuls, fused_add_norm
from cuboid.parallel.groups import Group, Groups, Holders, connect_groups, make_groups
from cuboid.parallel.pipeline import DualPipePair, Pipeline
from cuboid.parallel.predictions import PredictionLosses, predict
from cuboid.parallel.qk_clip import LayerPeaks
from cuboid.parallel.rank_batch import BatchSharder, RankBatch
from cuboid.parallel.stage import Activations, Reduction, Segment, Stage
from cuboid.parallel.tensor import connect_region, make_block, make_embedding, make_head
from cuboid.parallel.tensor_region import Region
from cuboid.parallel.zero import Unit
from cuboid.schedule.order import pairs_overlap
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.table import Schedule
from cuboid.spec.layout import Recompute
from cuboid.spec.partition import held_layers
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import coordinates, shard_weights
from cuboid.spec.run import Run
from cuboid.spec.sharding import (
    BALANCES,
    EXPERTS,
    REPLICATED,
    Declared,
    Part,
    ShardingRank,
    embedding_is_shared,
    is_block_linear,
    kv_part_count,
    lay_out,
    parameter_name,
    unit_of,
)
from cuboid.spec.train_state import Course
from cuboid.telemetry.communication_ledger import Ledger

DTYPES = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Engine:
    """Everything one rank needs to compute gradients."""

    run: Run
    groups: Groups
    device: torch.device
    units: list[Unit]
    pipeline: Pipeline
    partition: list[range]
    batches: BatchSharder
    """What this rank sees of its replica's micro-batches."""
    compiled: bool
    balance: Balance | None
    """The losses and statistics of the routers, in a model that has them."""
    activations: Activations
    """How large they are."""
    loss_scale: LossScale | None = None
    """In fp16."""
    ledger: Ledger | None = None
    """What this rank communicated, if that is counted."""
    peaks: LayerPeaks | None = None
    """Of queries and keys, where their heads are clipped."""
    z_loss: ZLoss | None = None
    """Of the logits, where it takes part in training."""
    predictions: PredictionLosses | None = None
    """Of prediction layers, in a model that has them."""
    course: Course = field(default_factory=Course)
    """Which batches are omitted, and what the latest steps were like."""

    @property
    def holds_loss(self) -> bool:
        """Whether this rank computes the loss, counted once per replica."""
        schedule = self.pipeline.schedule
        return schedule.stage_rank[-1] == self.pipeline.rank and self.groups.tensor.index == 0


def build_engine(run: Run, rank: int, device: torch.device, draw: bool = True) -> Engine:
    """`draw`: the initial weights; else they are zero until something fills them."""
    layout, model = run.layout, run.model
    micro_batches = run.micro_batches_of(coordinates(rank, layout).dp)
    schedule = make_schedule(layout.schedule, layout.pp, micro_batches, layout.vpp)
    layers = held_layers(model, layout, run.training.sequence)
    tied_apart = embedding_is_shared(model) and schedule.stage_rank[0] != schedule.stage_rank[-1]
    groups = make_groups(
        layout,
        rank,
        kv_part_count(model, layout.tp),
        tied_apart,
        model.is_routed,
        device.type == "cpu",
        run.optimizer.is_muon or run.islands.count > 1,
    )
    connect_groups(groups, device)
    ledger = Ledger() if run.output.count_communication else None
    if ledger is not None:
        groups = groups.counted(ledger)
    # Groups before modules: every rank makes the same groups in the same order, whatever its stages hold.
    builder = _Builder(run, groups, device, schedule)
    stages = {index: builder.stage(index, layers[index]) for index in schedule.stages_of(groups.coordinates.pp)}
    builder.reduction.keep_order(stages)
    pipeline = Pipeline(
        schedule,
        stages,
        groups,
        builder.deferral,
        torch.empty(builder.flow, dtype=builder.dtype, device=device),
        run.output.keep_timing,
        None if builder.compiled else fast_matmuls(device, run.training.precision),
        builder.pair,
    )
    batches = BatchSharder(run, groups.coordinates.cp, groups.tensor.index, builder.dtype, device)
    units = list(builder.units.values())
    factor = None
    if run.training.precision == "fp16":
        factor = LossScale(run.training.loss_scale, run.training.loss_scale_steps, device)
    compiled, balance = builder.compiled, builder.balance
    parts = (pipeline, layers, batches, compiled, balance, builder.activations, factor, ledger, builder.peaks)
    engine = Engine(run, groups, device, units, *parts, builder.z_loss, builder.predictions)
    if draw:
        draw_weights(engine)
    return engine


def draw_weights(engine: Engine) -> None:
    """Set all parameters to what the seed says."""
    run = engine.run
    if isinstance(run.model, PythonModelSpec):
        _draw_custom(engine, custom_model(run.model))
        return

    def held(part: Part) -> Tensor:
        cut = (part.slice.dimension, range(part.slice.start, part.slice.stop))
        return initial_tensor(run.model, part.name, part.full_shape, run.training.seed, cut, engine.device)

    for unit in engine.units:
        unit.fill(held)


def custom_model(model: PythonModelSpec) -> Model:
    built = model.built
    assert isinstance(built, Model)
    return built


def _draw_custom(engine: Engine, model: Model) -> None:
    """As each module initialises itself."""
    drawn: dict[str, Tensor] = {}

    def held(part: Part) -> Tensor:
        if part.name not in drawn:
            drawn.clear()
            prefix = next(known for known in model.prefixes if part.name.startswith(f"{known}."))
            drawn.update(initial_tensors(model, prefix, engine.run.training.seed))
        cut = part.slice
        return drawn[part.name].narrow(cut.dimension, cut.start, cut.stop - cut.start)

    for unit in engine.units:
        unit.fill(held)


@dataclass(frozen=True)
class Alone:
    """One segment as a single process has it."""

    run: Run
    segment: Segment
    units: list[Unit]
    dtype: torch.dtype
    batches: BatchSharder
    balance: Balance | None


def build_alone(run: Run, name: str, device: torch.device) -> Alone:
    """The segment `name` of a run without parallelism, whose weights are zero until something fills them."""
    one = Group((0,), 0)
    named: dict[str, object] = {each.name: one for each in fields(Groups)}
    nobody: dict[str, object] = {"routed": Holders(one, one, one), "embedding": None, "links": {}}
    nobody["coordinates"] = coordinates(0, run.layout)
    groups = Groups(**named | nobody)  # type: ignore[arg-type]
    schedule = make_schedule(run.layout.schedule, 1, run.micro_batches, run.layout.vpp)
    builder = _Builder(run, groups, device, schedule)
    make = {"embedding": builder._embedding, "head": builder._head}
    layer = name.rpartition(".")[2]
    segment = make[name]() if name in make else builder._block(int(layer), "none")
    batches = BatchSharder(run, 0, 0, builder.dtype, device)
    return Alone(run, segment, list(builder.units.values()), builder.dtype, batches, builder.balance)


class _Builder:
    """Makes stages out of modules: tensor and context parallel, then recompute, then the units of data parallelism."""

    def __init__(self, run: Run, groups: Groups, device: torch.device, schedule: Schedule) -> None:
        self.run, self.groups, self.device, self.schedule = run, groups, device, schedule
        self.model, self.layout = run.model, run.layout
        self.dtype = DTYPES[run.training.weights]
        self.dropout = run.training.dropout
        self.fp8 = run.training.fp8_scaling if run.training.precision == "fp8" else None
        """The scales of the blocks' linears; None is not in fp8."""
        if self.fp8 is not None:
            require_fp8(device, self.fp8, run.training.fp8_experts)
        tensor, expert = groups.tensor, groups.expert
        sequence_parallel = self.layout.sequence_parallel
        self.place = ShardingRank(tensor.size, tensor.index, expert.size, expert.index, sequence_parallel)
        self.deferral = Deferral()
        self.reduction = Reduction(in_order=self.layout.has_unequal_counts and self.layout.zero < 2)
        self.compiled = is_compiled(run, device)
        self.units: dict[str, Unit] = {}
        # Gloo, through which ranks that share a GPU speak, takes its sums from CPU memory only (it would crash);
        # collectives that continue overlapped with matmuls do not go through it.
        reachable = device.type != "cuda" or not groups.tensor.is_gloo or run.training.overlap_tensor == "on"
        self.custom = custom_model(self.model) if isinstance(self.model, PythonModelSpec) else None
        traced = self.compiled and self.custom is None and not run.output.count_communication and reachable
        self.region = Region(groups.tensor, self.layout.sequence_parallel, traced) if groups.tensor.size > 1 else None
        seen = self.region is not None and self.region.traced
        self.options = compiler_options(run, groups.tensor, device, seen)
        if self.region is not None:
            # Where the compiler takes matmuls beside collectives apart, it has to see both. Those of slices it leaves.
            self.region.overlaps_slices = not schedule.splits_backward
            self.region.overlaps = self.options is None and not schedule.splits_backward
        if schedule.splits_backward:
            self.options = {**(self.options or {}), **UNTOUCHED}
        self.balance = make_balance(run, device) if self.model.mixture is not None else None
        sequences = self.layout.micro_batch_of(groups.coordinates.dp)
        self.carrier = None if self.custom is None else Carrier(self.custom, sequences, run.training.sequence)
        clips = run.optimizer.qk_clip > 0
        self.peaks = LayerPeaks(self.model, self.dtype, device) if clips else None
        coefficient = run.training.z_loss
        self.z_loss = ZLoss(coefficient, self.dtype, device) if coefficient else None
        depths, coefficient = self.model.prediction_layers, run.training.prediction_loss
        self.predictions = PredictionLosses(coefficient, depths, wide(self.dtype), device) if depths else None
        self.activations = Activations(run, groups, wide(self.dtype), device, math.prod(self.flow))
        # Without experts elsewhere nothing in a pass would hand over.
        self.pair = DualPipePair() if self.layout.ep > 1 and pairs_overlap(schedule) else None
        if self.pair is not None:
            self.pair.carried = [(Memory, "current")]
            if self.balance is not None:
                self.pair.carried.append((self.balance, "recording"))

    @property
    def flow(self) -> tuple[int, ...]:
        """The shape of what stages send one another."""
        if self.carrier is not None:
            return self.carrier.packed_shape
        layout, sequence = self.layout, self.run.training.sequence
        tokens = layout.micro_batch_of(self.groups.coordinates.dp) * sequence // layout.cp
        tokens //= layout.tp if layout.sequence_parallel else 1
        return tokens, self.model.hidden

    def stage(self, index: int, layers: range) -> Stage:
        stage = Stage()
        if index == 0:
            stage.append(self._embedding())
        for place, layer in enumerate(layers):
            stage.append(self._block(layer, self.layout.recompute_at(place)))
        if index + 1 == self.schedule.stages:
            stage.append(self._head())
        return stage

    def _custom(self, prefix: str, recompute: Recompute = "none") -> Segment:
        assert self.custom is not None and self.carrier is not None
        module = self.custom.segment(prefix, self.run.training.seed)
        for name, parameter in module.named_parameters():
            if not parameter.ndim:
                raise UserError(f"{prefix}.{name} is a parameter without dimensions; give it the shape (1,)")
        if self.region is not None:
            connect_region(module, self.region)
        if self.schedule.splits_backward:
            defer_matmuls(module, self.deferral)
        carry_buffers(module, self.dtype, self.device)
        if self.compiled and prefix.startswith("layers."):
            if prefix == "layers.0" and self.groups.world.index == 0 and self.custom.loops(prefix):
                say(
                    f"{prefix} loops over the sequence, which the compiler unrolls: compiling takes long; use "
                    "training.compile=off",
                    as_warning=True,
                )
            module.compile(dynamic=False)
        run = with_recompute(runner(module, prefix, self.carrier, wide(self.dtype)), recompute)
        run = self._routed(module, prefix, run)
        if prefix.startswith("layers."):
            measured = partial(self.activations.add, int(prefix.partition(".")[2]))
            return self._segment(module, prefix, lambda x, batch: measured(run(x, batch.fields)))
        return self._segment(module, prefix, lambda x, batch: run(x, batch.fields))

    def _embedding(self) -> Segment:
        if self.custom is not None:
            return self._custom("embedding")
        embedding = make_embedding(self.model, self.region)
        if self.dropout:
            drop_in(embedding, "embedding", self.dropout, self.run.training.seed, self.device)
        return self._segment(embedding, "embedding", lambda x, batch: embedding(x, batch.positions))

    def _block(self, layer: int, recompute: Recompute) -> Segment:
        if self.custom is not None:
            return self._custom(f"layers.{layer}", recompute)
        # Without memory: `_segment` puts views of the unit's buffer in place.
        block = make_block(self.model, layer, self.region, self.device)
        if self.dropout:
            drop_in(block, f"layers.{layer}", self.dropout, self.run.training.seed, self.device)
        if self.fp8 is not None:
            for child in block.modules():
                if isinstance(child, Linear):
                    child.matmul = Fp8Matmul(self.fp8)
                if isinstance(child, Experts) and self.run.training.fp8_experts:
                    multiply_experts_in_fp8(child, self.deferral)
        # Outside in: attention over ranks, then recompute around the block, then experts and measures around that.
        if self.layout.cp > 1:
            gathers = self.layout.cp_method == "allgather"
            cap = self.model.attention_softcap
            block.attention.mix = ContextMix(self.groups, gathers, self.model.window_of(layer), cap)
        routed = isinstance(block.feed_forward, MoE)
        # The compiler stops at these, and gives up what it would have to stop in while it recomputes.
        stops = self.layout.cp > 1 or (self.model.qk_norm_whole and self.region is not None)
        traced = self.region is None or self.region.traced
        if not self.compiled or (stops and recompute == "selective"):
            run = with_recompute(block, recompute)
        elif routed and recompute == "selective":
            run = compiled_attention(block, traced, self.options)
        else:
            run = compiled_block(block, recompute, traced and not stops and not routed, self.options)
        run = self._routed(block, f"layers.{layer}", run)
        measured = partial(self.activations.add, layer)
        if isinstance(block, Prediction):
            depth = layer - self.model.layers
            whole = partial(predict, block, depth, lambda x, positions: measured(run(x, positions)))
            segment = self._segment(block, f"layers.{layer}", whole)
        else:
            segment = self._segment(block, f"layers.{layer}", lambda x, batch: measured(run(x, batch.positions)))
        if self.peaks is not None:
            block.attention.peaks = self.peaks.of(layer, self.units[f"layers.{layer}"].parts)
        # After the unit exists: fused weights are views of its buffer.
        if self.compiled:
            self._rework(block, self.units[f"layers.{layer}"])
        return segment

    def _routed(self, module: nn.Module, prefix: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run`, the forward pass of `module`, with its experts spread over ranks and its router's losses."""
        for child in module.modules():
            if isinstance(child, RoutedExperts):
                spread_experts(child, self.groups.expert, self.pair.hand_over if self.pair else stay_on)
            if isinstance(child, Router) and self.balance is not None:
                join_sequences(child, self.balance, self.groups, self.run)
                run = watched(child, self.balance, int(prefix.partition(".")[2]), run)
        return run

    def _rework(self, block: Block, unit: Unit) -> None:
        """Of a block that is compiled: what the compiler does not find."""
        waits = self.deferral if self.schedule.splits_backward else None
        if self.fp8 in (None, "block"):  # in the others the compiler fuses what rounds
            fuse_matmuls(block, unit, self.model.positions == "rope", waits, self.region)
            if self.model.norm == "rmsnorm" and self.dtype != torch.float64:
                block.add_norm = fused_add_norm
        if waits is not None:
            for child in block.modules():
                if isinstance(child, Linear):
                    child.matmul = split_matmul(child, waits, self.fp8)

    def _head(self) -> Segment:
        if self.custom is not None:
            return self._custom("head")
        head, predictions = make_head(self.model, self.region), self.predictions
        read = self._reader(head)
        if predictions is None:
            return self._segment(head, "head", lambda x, batch: read(x, batch.labels, True))
        return self._segment(head, "head", lambda x, batch: predictions.total(x, batch, read))

    def _reader(self, head: Head) -> Callable[[Tensor, Tensor, bool], Tensor]:
        """The summed loss of hidden states; the z-loss is of the model's own alone."""
        group, vocabulary, z_loss = self.groups.tensor, self.model.vocab, self.z_loss
        if self.compiled:
            deferral, region = self.deferral, self.region
            fused = partial(
                fused_cross_entropy, head, vocabulary=vocabulary, group=group, region=region, deferral=deferral
            )
            return lambda x, labels, own: fused(x, labels, z_loss=z_loss if own else None)
        if z_loss is None:
            return lambda x, labels, _: head.loss(x, labels)

        def read(x: Tensor, labels: Tensor, own: bool) -> Tensor:
            logits = head(x)
            return split_cross_entropy(logits, labels.flatten(), vocabulary, group, z_loss if own else None)

        return read

    def _segment(self, module: nn.Module, prefix: str, run: Callable[[Tensor, RankBatch], Tensor]) -> Segment:
        in_block = prefix.startswith("layers.")
        if self.schedule.splits_backward and self.custom is None:
            for child in module.modules():
                if isinstance(child, Linear) and not (self.compiled and in_block):
                    child.matmul = deferrable_matmul(self.deferral, self.fp8 if in_block else None)
                if isinstance(child, Experts) and not self.run.training.fp8_experts:
                    child.matmul = deferrable_grouped_matmul(self.deferral)
        # A module of one's own may use one parameter under several names.
        aliases: dict[int, list[str]] = {}
        for path, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(path)
        inside: dict[str, list[str]] = {}
        members: dict[str, dict[str, Declared]] = {}
        for inner, parameter in module.named_parameters():
            name = parameter_name(self.model, prefix, inner)
            if self.custom is not None:
                name = self.custom.called(f"{prefix}.{inner}")
            inside[name] = aliases[id(parameter)]
            split = declared_split(module, inner)
            if split is None and self.region is not None:
                raise UserError(f"{name} does not say how it is split; declare it in the `sharding` of its module")
            declared = Declared(tuple(parameter.shape), split or REPLICATED)
            members.setdefault(unit_of(prefix, name, declared.split), {})[name] = declared
        used = []
        for unit_name, table in members.items():
            unit = self._unit(unit_name, table)
            for name in table:
                for path in inside[name]:
                    set_parameter(module, path, unit.parameters[name])
            if not unit_name.endswith(BALANCES):  # always whole, and no gradient ever comes to it
                used.append(unit)
        return Segment(prefix, run, used, self.deferral, self.reduction, module)

    def _unit(self, name: str, table: dict[str, Declared]) -> Unit:
        if name not in self.units:
            one_scale = self.fp8 == "tensor"
            experts, balance = name.endswith(EXPERTS), name.endswith(BALANCES)
            self.units[name] = Unit(
                name,
                [replace(part, rate_factor=self._rate_factor(part.name)) for part in lay_out(table, self.place)],
                0 if balance else self.layout.zero,
                self.groups.routed if experts else self.groups,
                wide(self.dtype) if balance else self.dtype,
                self.device,
                [part for part, declared in table.items() if one_scale and is_block_linear(name, declared)],
                torch.bfloat16 if self.run.training.gradient_sums == "bf16" and not balance else None,
                self.layout.has_unequal_counts and self.layout.zero >= 2 and not balance,
                shard_weights(self.groups.world.index, self.layout, experts)[0],
            )
        return self.units[name]

    def _rate_factor(self, name: str) -> float:
        return learning_rate_factor(self.model, name) * self.run.optimizer.rate_of(name)


def set_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)
