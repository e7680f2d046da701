"""The proof of islands: a set of them, each on a layout of its own, against all of them simulated in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.islands.outer import OuterState
from cuboid.islands.sync import Islands, Site
from cuboid.parallel.device import joined_device
from cuboid.parallel.parallelize import Engine, build_engine
from cuboid.spec.block_owners import wire_bytes
from cuboid.spec.islands import BLOCK, fragments_of
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from cuboid.telemetry.heartbeat import HEARTBEAT
from cuboid.training.learning_rate import learning_rate
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import train_step
from cuboid.verification.compare import TOLERANCE, gathered, relative_error, tensor_error, whole
from cuboid.verification.reference import OneProcess, Tensors

Places = tuple[tuple[str, int], ...]
"""Where islands meet."""

# The islands, observed.


@dataclass
class Observed:
    """What an island computed."""

    losses: list[float]
    parameters: Tensors
    """After the last step."""
    middle: Tensors
    """After the step in the middle, where islands differ."""
    outer: Tensors
    """Outer weights and momentum, as checkpoints call them."""
    sent: list[tuple[int, int]]
    """Of each rank the bytes that it sent and received."""


def train_island(rank: int, run: Run, number: int, places: Places, secret: bytes) -> Observed | None:
    """What each rank of an island does; rank 0 returns what it computed."""
    device = joined_device(run.training.device)
    engine = build_engine(run, rank, device)
    optimizer = Optimizer(engine, run.optimizer)
    outer = OuterState(engine)
    outer.begin()
    islands = Islands(outer, Site(number, places, "127.0.0.1", secret), {})
    done, losses, middle = islands.enter(0), list[float](), Tensors()
    source = make_source(run)
    while done < run.training.steps:
        HEARTBEAT.enter("step", done + 1)
        batches = micro_batches(source, run, islands.next_batch(done), engine.groups.coordinates.dp, device)
        result = train_step(engine, optimizer, batches, learning_rate(run.learning_rate, done, run.training.steps))
        losses.append(result.loss)
        islands.count(result.tokens)
        done, _ = islands.after(done + 1)
        if done == run.training.steps // 2:
            middle = whole(engine, lambda shard: shard.master)
    counted = gathered(engine, (islands.counts.sent, islands.counts.received))
    parameters, kept = whole(engine, lambda shard: shard.master), _outer(engine, outer)
    islands.close(for_good=True)
    return Observed(losses, parameters, middle, kept, [each for _, each in counted]) if rank == 0 else None


def _outer(engine: Engine, outer: OuterState) -> Tensors:
    own = [
        (name, held.full_shape, [(each.start, values.clone().flatten()) for each, values in held.slices])
        for name, held in outer.state().items()
    ]
    found: Tensors = {}
    for _, parts in gathered(engine, own):
        for name, shape, slices in parts:
            flat = found.setdefault(name, torch.zeros(shape, dtype=outer.dtype)).view(-1)
            for start, values in slices:
                flat[start : start + len(values)] = values
    return found


# All islands in one process.


def _round(values: Tensor, bits: int) -> Tensor:
    """What arrives of blocks, (blocks, 256), that travel in so many bits."""
    if bits == 32:
        return values
    if bits == 16:
        return values.bfloat16().to(values.dtype)
    levels = 2 ** (bits - 1) - 1
    scales = (values.abs().max(dim=1, keepdim=True).values / levels).float().to(values.dtype)
    return torch.where(scales == 0, 0.0, torch.round(values / scales).clamp(-levels, levels) * scales).nan_to_num(0.0)


class Simulation:
    """Islands, one run each, whose batches are dealt in turn and of which none is ever late."""

    def __init__(self, runs: Sequence[Run]) -> None:
        run = self._run = runs[0]
        self._spec = run.islands
        self.islands = [OneProcess(each) for each in runs]
        self.outer = {name: x.detach().clone() for name, x in self.islands[0].parameters.items()}
        self.momentum = {name: torch.zeros_like(x) for name, x in self.outer.items()}
        self._errors = [{name: torch.zeros_like(x) for name, x in self.outer.items()} for _ in self.islands]
        self._tokens = [[0] * self._spec.fragments for _ in self.islands]
        self._fragments = [[each.name for each in one.tensors] for one in fragments_of(run.model, self._spec.fragments)]
        self._flying: list[int] = []
        self.middle: list[Tensors] = []

    def train(self) -> None:
        steps, spec, fresh = self._run.training.steps, self._spec, 0
        for step in range(1, steps + 1):
            for number, island in enumerate(self.islands):
                fresh, first = fresh + spec.weight_of(number), fresh
                seen = island.step(step - 1, tuple(range(first, fresh)))
                self._tokens[number] = [tokens + seen for tokens in self._tokens[number]]
            self._apply(step)
            for round_ in spec.rounds_due(step, steps):
                self._synchronise(round_)
                self._flying.append(round_)
            self._apply(step)
            if step == steps // 2:
                self.middle = [self.parameters(number) for number in range(len(self.islands))]

    def parameters(self, number: int) -> Tensors:
        return {name: x.detach().cpu().clone() for name, x in self.islands[number].parameters.items()}

    @torch.no_grad()
    def _synchronise(self, round_: int) -> None:
        spec, fragment = self._spec, self._spec.fragment_of(round_)
        rate, momentum = spec.outer_optimizer(round_)
        weights = [own[fragment] / sum(each[fragment] for each in self._tokens) for own in self._tokens]
        for name in self._fragments[fragment]:
            mean = torch.zeros_like(self.outer[name])
            for weight, island, errors in zip(weights, self.islands, self._errors, strict=True):
                moved = self.outer[name] - island.parameters[name] + errors[name]
                flat = torch.nn.functional.pad(moved.flatten(), (0, -moved.numel() % BLOCK)).view(-1, BLOCK)
                arrived = _round(flat, spec.bits).flatten()[: moved.numel()].view_as(moved)
                if spec.bits < 16:
                    errors[name] = moved - arrived
                mean += weight * arrived
            self.momentum[name] = momentum * self.momentum[name] + mean
            self.outer[name] = self.outer[name] - rate * (mean + momentum * self.momentum[name])
        for own in self._tokens:
            own[fragment] = 0

    @torch.no_grad()
    def _apply(self, step: int) -> None:
        spec, steps = self._spec, self._run.training.steps
        while self._flying and spec.applied(self._flying[0], steps) <= step:
            round_ = self._flying.pop(0)
            at_once = spec.applied(round_, steps) == spec.due(round_, steps)
            mix = 1.0 if at_once else spec.mix
            for name in self._fragments[spec.fragment_of(round_)]:
                for island in self.islands:
                    own = island.parameters[name]
                    own.copy_(mix * self.outer[name] + (1 - mix) * own)


# Both compared.


@dataclass(frozen=True)
class IslandsVerdict:
    layouts: list[str]
    model: str
    steps: int
    dtype: str
    islands: dict[str, Any]
    loss_error: float
    parameter_error: float
    outer_error: float
    worst_parameter: str
    between_islands: float
    """The largest difference of outer weights and momentum between two islands."""
    wire_bytes: int
    """That all islands sent."""
    unforeseen: list[str]
    """Ranks that sent or received other than planned."""
    tolerance: float
    passed: bool


def planned_bytes(runs: Sequence[Run], number: int, rank: int) -> tuple[int, int]:
    """That a rank of an island sends and receives over the whole training."""
    spec, steps = runs[number].islands, runs[number].training.steps
    rounds = [spec.fragment_of(each) for step in range(1, steps + 1) for each in spec.rounds_due(step, steps)]
    total = [0, 0]
    for there, other in enumerate(runs):
        if there != number:
            for fragment in range(spec.fragments):
                for side, size in enumerate(wire_bytes(runs[number], fragment, rank, other)):
                    total[side] += size * rounds.count(fragment)
    return total[0], total[1]


def judge(rank: int, runs: list[Run], found: list[Observed]) -> dict[str, Any]:
    """Against a simulation, in this process."""
    run = runs[0]
    simulation = Simulation([replace(each, layout=Layout()) for each in runs])
    simulation.train()
    floor = run.learning_rate.peak
    losses = max(
        relative_error(*pair)
        for seen, island in zip(found, simulation.islands, strict=True)
        for pair in zip(seen.losses, island.trace.losses, strict=True)
    )
    errors = [(0.0, "")]
    for number, seen in enumerate(found):
        pairs = [(seen.parameters, simulation.parameters(number))]
        pairs += [(seen.middle, simulation.middle[number])] if simulation.middle else []
        errors += [(tensor_error(own[name], x, floor), name) for own, expected in pairs for name, x in expected.items()]
    expected = {f"outer/{name}": x.cpu() for name, x in simulation.outer.items()}
    expected |= {f"outer_momentum/{name}": x.cpu() for name, x in simulation.momentum.items()}
    outer = max(tensor_error(seen.outer[name], x, floor) for seen in found for name, x in expected.items())
    between = max(float((seen.outer[name] - found[0].outer[name]).abs().max()) for seen in found for name in expected)
    surprises = [
        f"island {number} rank {place} sent and received {seen} bytes, planned {planned}"
        for number, own in enumerate(found)
        for place, seen in enumerate(own.sent)
        if seen != (planned := planned_bytes(runs, number, place))
    ]
    tolerance = TOLERANCE[run.training.precision]
    worst = max(errors)
    return asdict(
        IslandsVerdict(
            layouts=[str(each.layout) for each in runs],
            model=run.model.name,
            steps=run.training.steps,
            dtype=run.training.precision,
            islands=asdict(run.islands),
            loss_error=losses,
            parameter_error=worst[0],
            outer_error=outer,
            worst_parameter=worst[1],
            between_islands=between,
            wire_bytes=sum(sent for own in found for sent, _ in own.sent),
            unforeseen=surprises,
            tolerance=tolerance,
            passed=max(losses, worst[0], outer) <= tolerance and between == 0 and not surprises,
        )
    )
