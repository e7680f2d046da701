"""The run on one device, written without any part of the parallel engine: what every layout must equal."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from cuboid.checkpoint.state import AVERAGE
from cuboid.data.source import Source, make_source
from cuboid.kernels.cpu_16bit import fast_matmuls
from cuboid.kernels.precision import wide
from cuboid.model.custom import Model, WholeModel
from cuboid.model.fp8 import Fp8Matmul
from cuboid.model.fp8_experts import multiply_experts_in_fp8
from cuboid.model.initialize import initialize, learning_rate_factor
from cuboid.model.linear import Linear, Matmul, declared_split
from cuboid.model.load_balancing import Balance
from cuboid.model.moe import Experts
from cuboid.model.router import Router
from cuboid.model.split_backward import Deferral
from cuboid.model.transformer import Transformer
from cuboid.parallel.device import choose_device
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.spec.sharding import ShardingRank
from cuboid.spec.training import Batch
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.adamw import named_moments
from cuboid.training.learning_rate import learning_rate
from cuboid.training.own_optimizer import Named, elements_of, numbers_of
from cuboid.training.own_optimizer import Updates as OwnUpdates
from cuboid.training.replicas import Deviation
from cuboid.verification.muon_reference import HeadClip, MuonUpdates
from cuboid.verification.samples import Samples

# One process that rounds its sums as NCCL does between tensor ranks.
#
# NCCL adds the messages of a sum hop by hop, each time in the precision of the message: a sum of bf16 over n ranks is
# rounded n - 1 times in a ring. Shared memory and gloo add in float32 and round once. The sums of 16 bits in a layout
# are those of tensor parallelism: the result of a matmul whose input columns are split, and the input gradient of one
# whose output rows are. Here one process computes both in as many parts as there are ranks, and adds these one after
# another in 16 bits. A ring rounds most often; a tree, or a switch that adds by itself, less.
#
# Gradients of weights are summed in float32. Those of keys and values, which context parallelism sums in 16 bits on any
# backend, are two of the dozen tensors that a block rounds in its backward pass.


def sum_hop_by_hop(model: Transformer, ranks: int) -> None:
    """Let the model compute in parts, as `ranks` tensor ranks do."""
    for name, child in model.named_modules():
        if isinstance(child, Linear):
            weight = f"{name}.weight"
            split = declared_split(model, weight)
            assert split is not None, weight
            cut = split.slice_of(weight, tuple(child.weight.shape), ShardingRank(ranks))
            if cut.sharing != "tensor":  # of which every rank has the whole
                in_parts = _output_rows if cut.dimension == 0 else _input_columns
                child.matmul = in_parts(child.matmul, cut.length)


def _output_rows(matmul: Matmul, length: int) -> Matmul:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.view_as(x)  # where autograd adds the gradients of the parts, in their order and precision
        rows = weight.split(length)
        biases = bias.split(length) if bias is not None else [None] * len(rows)
        return torch.cat([matmul(x, *part) for part in zip(rows, biases, strict=True)], dim=-1)

    return multiply


def _input_columns(matmul: Matmul, length: int) -> Matmul:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(x.split(length, dim=-1), weight.split(length, dim=1), strict=True)
        first, *others = (matmul(part, columns, None) for part, columns in parts)
        for other in others:
            first = first + other
        return first if bias is None else first + bias

    return multiply


DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

Tensors = dict[str, Tensor]


@dataclass
class Trace:
    """What a run computed at each step; every tensor whole, under its name in the single-device model."""

    start: Tensors = field(default_factory=dict)
    """The parameters before the first step; of one process."""
    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    """Without their coefficient; none where they take no part."""
    prediction_losses: list[float] = field(default_factory=list)
    """Of each prediction layer at each step, without their coefficient."""
    gradient_norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Of the loss, before clipping."""
    parameters: list[Tensors] = field(default_factory=list)
    """After the update."""
    averages: list[Tensors] = field(default_factory=list)
    """Of the weights, as `average/…`; none where none is kept."""
    moments: dict[int, Tensors] = field(default_factory=dict)
    """After as many steps as the key says, what the optimizer keeps: `exp_avg/…` and `exp_avg_sq/…` of AdamW."""
    unforeseen: list[str] = field(default_factory=list)
    """Collectives between ranks that are not as the planner counts them."""
    deviations: list[list[str]] = field(default_factory=list)
    """After each step, copies on several ranks that are not equal, and padding that is not zero."""
    unequal: list[list[Deviation]] = field(default_factory=list)
    """The copies among these."""
    routers: list[Tensor] = field(default_factory=list)
    """Of a mixture: a row per layer, assignments of each expert and the sums of its auxiliary losses."""

    def until(self, step: int) -> Trace:
        """What it says up to a step, this included."""
        steps, done = max(len(self.losses), 1), step + 1
        # Of some there are several a step.
        cut: dict[str, Any] = {
            name: value[: len(value) // steps * done] for name, value in vars(self).items() if isinstance(value, list)
        }
        return replace(self, **cut)

    @property
    def all_losses(self) -> list[float]:
        return self.losses + self.z_losses + self.prediction_losses


def known_trace(run: Run, precision: str = "", hops: int = 1) -> Trace:
    """`reference_trace`, computed once for all layouts of a model and its settings that this process compares."""
    return _known(replace(run, layout=Layout()), precision, hops)


@lru_cache(maxsize=8)
def _known(run: Run, precision: str, hops: int) -> Trace:
    return reference_trace(run, precision=precision, hops=hops)


class Watch(Protocol):
    """Sees samples on their way through the model."""

    def attach(self, model: nn.Module) -> None: ...

    def begin_sample(self, step: int, place: int) -> None: ...

    def end_sample(self) -> None: ...


def reference_trace(
    run: Run,
    moments_after: Collection[int] = (),
    precision: str = "",
    hops: int = 1,
    watch: Watch | None = None,
    source: Source | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Trace:
    """`precision`: another than the run's. `hops`: of how many tensor ranks the sums are rounded as NCCL does.
    `source`, `weights`: other samples and initial weights than the run's."""
    process = OneProcess(run, precision, hops, watch, source, weights)
    for step in range(run.training.steps):
        process.step(step, step)
        if step + 1 in moments_after:
            process.keep_moments(step + 1)
    return process.trace


class OneProcess:
    """Trains without a layout, and notes what it computes."""

    def __init__(
        self,
        run: Run,
        precision: str = "",
        hops: int = 1,
        watch: Watch | None = None,
        source: Source | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        precision = precision or run.training.precision
        self._watch = watch
        dtype = DTYPES[precision]
        self._run, self._precision = run, precision
        self._factor = run.training.loss_scale if precision == "fp16" else 1.0
        self._device = device = choose_device(run.training.device, 0)
        model: Transformer | WholeModel
        if isinstance(run.model, PythonModelSpec):
            built = run.model.built
            assert isinstance(built, Model)
            model = WholeModel(built, run.training.seed).to(wide(dtype))
        else:
            model = Transformer(run.model).to(wide(dtype))
            initialize(run.model, model, run.training.seed)
            if run.training.dropout:
                model.drop(run.training.dropout, run.training.seed)
        if weights is not None:
            model.load_state_dict(dict(weights), strict=False)
        self._model = model.to(device)
        self.parameters = dict(model.named_parameters())
        rounds = dtype == torch.bfloat16 and run.training.gradient_sums == "bf16"
        self._computing = computing = Computing(model, dtype, rounds)
        if precision == "fp8" and isinstance(computing.model, Transformer):
            for child in computing.model.layers.modules():
                if isinstance(child, Linear):
                    child.matmul = Fp8Matmul(run.training.fp8_scaling)
                if isinstance(child, Experts) and run.training.fp8_experts:
                    multiply_experts_in_fp8(child, Deferral())
        if hops > 1 and isinstance(computing.model, Transformer):
            sum_hop_by_hop(computing.model, hops)
        kind = UpdatesOfOwn if run.optimizer.is_own else WithMuon if run.optimizer.is_muon else Updates
        self._updates = kind(run, self.parameters)
        self._clip = HeadClip(run, computing.model, model) if run.optimizer.qk_clip else None
        self._balance = _balance(run, computing.model, device)
        if self._balance is not None:
            self._balance.factor = torch.tensor(self._factor, device=device)
        if watch is not None:
            watch.attach(computing.model)
        self._samples = Samples(run, computing.model, source or make_source(run), dtype, device)
        kept = self.parameters.items() if run.optimizer.average else ()
        self._averages = {f"{AVERAGE}/{name}": x.detach().clone() for name, x in kept}
        self.trace = Trace(
            start={name: parameter.detach().cpu().clone() for name, parameter in self.parameters.items()}
        )

    def step(self, step: int, batch: Batch) -> int:
        """On a batch of the global order; returns its tokens with labels."""
        run, trace = self._run, self.trace
        self._model.zero_grad()
        self._computing.begin_step()
        if self._clip is not None:
            self._clip.begin_step()
        places = run.training.places(batch)
        if self._balance is not None:
            self._balance.begin_step(len(places))
        length = run.training.lengths.at(batch) if isinstance(batch, int) else run.training.sequence
        tokens = self._passes(step, places, length)
        if self._balance is not None:
            self._balance.end_passes()
        for parameter in self.parameters.values():
            if parameter.grad is not None and self._factor != 1:
                parameter.grad /= self._factor
        trace.gradients.append({name: _gradient(parameter) for name, parameter in self.parameters.items()})
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in trace.gradients[-1].values()]))
        trace.gradient_norms.append(norm.item())
        if run.training.gradient_clip > 0:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), run.training.gradient_clip)
        self._updates.step(learning_rate(run.learning_rate, step, run.training.steps))
        self._finish_step()
        return tokens

    def _passes(self, step: int, places: Sequence[int], length: int) -> int:
        """Forward and backward, sample by sample; returns the tokens with labels."""
        run, samples = self._run, self._samples
        tokens = sum(samples.counted(place) for place in places)
        depths = range(1, run.model.prediction_layers + 1)
        predicted = [sum(samples.counted_further(place, length, depth) for place in places) for depth in depths]
        loss = z_loss = 0.0
        prediction_losses = [0.0 for _ in depths]
        for place in places:
            HEARTBEAT.do("")  # for a watchdog: a long computation is no silence
            if self._watch is not None:
                self._watch.begin_sample(step, place)
            with fast_matmuls(self._device, self._precision):
                *both, further_losses = samples.loss(place, length)
                part, squares = (each / max(tokens, 1) for each in both)
                whole = part + run.training.z_loss * squares if run.training.z_loss else part
                for depth, each in enumerate(further_losses):
                    mean = each / max(predicted[depth], 1)
                    whole = whole + run.training.prediction_loss / len(depths) * mean
                    prediction_losses[depth] += mean.item()
                (whole * self._factor).backward()
            if self._watch is not None:
                self._watch.end_sample()
            self._computing.collect()
            loss += part.item()
            z_loss += squares.item()
        self.trace.losses.append(loss)
        if run.training.z_loss:
            self.trace.z_losses.append(z_loss)
        self.trace.prediction_losses += prediction_losses
        return tokens

    def _finish_step(self) -> None:
        trace, decay = self.trace, self._run.optimizer.average
        if self._clip is not None:
            self._clip.step()
        if self._balance is not None:
            trace.routers.append(self._balance.statistics.cpu().clone())
            self._balance.end_step(self._balance.statistics)
            _move_biases(self._model, trace.routers[-1])
        trace.parameters.append({name: x.detach().cpu().clone() for name, x in self.parameters.items()})
        for name, average in self._averages.items():
            average.mul_(decay).add_(self.parameters[name.partition("/")[2]].detach(), alpha=1 - decay)
        if self._averages:
            trace.averages.append({name: average.cpu().clone() for name, average in self._averages.items()})

    def keep_moments(self, after: int) -> None:
        """What the optimizer keeps now, after so many steps."""
        kept = {**self._updates.state(), **self._averages}
        self.trace.moments[after] = {name: each.cpu().clone() for name, each in kept.items()}


class Updates:
    """Torch's own AdamW, without its class: the first use of that imports the compiler, two seconds of every proof."""

    def __init__(self, run: Run, parameters: Mapping[str, Tensor]) -> None:
        self._run, self._parameters = run, parameters
        self.moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in parameters.items()}
        self._taken = {name: torch.tensor(0.0) for name in parameters}

    def state(self) -> Tensors:
        return {f"{kind}/{name}": x for name, pair in self.moments.items() for kind, x in named_moments(pair).items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Matrices decay, and by as much whatever multiplies their learning rate."""
        spec = self._run.optimizer
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            factor = learning_rate_factor(self._run.model, name) * spec.rate_of(name)
            first, second = self.moments[name]
            adamw(
                [parameter],
                [parameter.grad],
                [first],
                [second],
                [],
                [self._taken[name]],
                amsgrad=False,
                beta1=spec.beta1,
                beta2=spec.beta2,
                lr=rate * factor,
                weight_decay=spec.weight_decay / factor if parameter.ndim > 1 else 0.0,
                eps=spec.epsilon,
                maximize=False,
            )


class WithMuon:
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, run: Run, parameters: Mapping[str, Tensor]) -> None:
        self._matrices = MuonUpdates(run, parameters)
        self._rest = Updates(run, {name: x for name, x in parameters.items() if name not in self._matrices.names})

    def state(self) -> Tensors:
        return {**self._rest.state(), **self._matrices.state()}

    def step(self, rate: float) -> None:
        self._rest.step(rate)
        self._matrices.step(rate)


class UpdatesOfOwn:
    """An optimizer of one's own on whole parameters, as a program of one process would use it."""

    def __init__(self, run: Run, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = {name: value for name, value in parameters.items() if isinstance(value, nn.Parameter)}
        named = [
            Named(name, tuple(value.shape), learning_rate_factor(run.model, name) * run.optimizer.rate_of(name), value)
            for name, value in self._parameters.items()
        ]
        self._updates = OwnUpdates(run.optimizer, run.learning_rate.peak, named)

    def step(self, rate: float) -> None:
        for value in self._parameters.values():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        self._updates.step(rate)

    def state(self) -> Tensors:
        found: Tensors = {}
        for name in self._parameters:
            state = self._updates.state(name)
            found |= {f"{kind}/{name}": tensor for kind, tensor in elements_of(state).items()}
            numbers = numbers_of(state).items()
            found |= {f"{kind}/{name}": torch.tensor([number], dtype=torch.float64) for kind, number in numbers}
        return found


class Computing:
    """The model that computes: itself, or a copy in 16 bits of weights kept in float32, where gradients are summed."""

    def __init__(self, kept: Transformer | WholeModel, dtype: torch.dtype, rounds: bool = False) -> None:
        """`rounds`: each sum of gradients to the 16 bits."""
        self.model, self._pairs, self._rounds = kept, list[tuple[Tensor, Tensor]](), rounds
        if dtype == wide(dtype):
            return
        self.model = copy.deepcopy(kept).to(dtype)
        for module in self.model.modules():
            if isinstance(module, Router) and module.bias is not None:
                module.bias.data = module.bias.data.to(wide(dtype))  # counts, which no matmul touches
        parameters = dict(kept.named_parameters())
        self._pairs = [(parameters[name], copied) for name, copied in self.model.named_parameters()]

    @torch.no_grad()
    def begin_step(self) -> None:
        for parameter, copied in self._pairs:
            copied.copy_(parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """The gradients of one sample are added to those before it."""
        for parameter, copied in self._pairs:
            if copied.grad is not None:
                own = copied.grad.to(parameter.dtype)
                parameter.grad = own if parameter.grad is None else parameter.grad + own
                if self._rounds:
                    parameter.grad = parameter.grad.to(copied.dtype).to(own.dtype)
                copied.grad = None


def _balance(run: Run, model: Transformer | WholeModel, device: torch.device) -> Balance | None:
    mixture, batch = run.model.mixture, run.training.global_batch
    if mixture is None:
        return None
    balance = Balance(mixture, run.model.routed_layers, batch, batch * run.training.sequence, device, run.training.seed)
    model.balance_with(balance)
    return balance


@torch.no_grad()
def _move_biases(model: nn.Module, statistics: Tensor) -> None:
    for module in model.modules():
        if isinstance(module, Router) and module.bias is not None:
            asked = statistics[module.row, : module.mixture.experts]
            below = (asked < asked.mean()).to(module.bias) - (asked > asked.mean()).to(module.bias)
            module.bias.add_(below, alpha=module.mixture.bias_rate)


def _gradient(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).cpu().clone()
