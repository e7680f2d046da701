"""Pipeline parallelism: runs this rank's actions of a schedule table, in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cuboid.model.precision import wide
from cuboid.parallel.channel import Channels
from cuboid.parallel.deferral import Deferral
from cuboid.parallel.groups import Group
from cuboid.parallel.share import Share
from cuboid.parallel.stage import Stage
from cuboid.resilience.pulse import PULSE, Activity
from cuboid.schedule.program import Message
from cuboid.schedule.table import Action, Kind, Schedule


@dataclass(frozen=True)
class TimedAction:
    action: Action
    start: float
    ready: float
    """When what it waited for from another rank was there; its start where it waits for nothing."""
    end: float


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Every rank takes all micro-batches through its first stage, then its next; sends never wait, so this ends."""
    actions = tuple(
        tuple(
            Action(Kind.FORWARD, stage, micro_batch)
            for stage in schedule.stages_of(rank)
            for micro_batch in range(micro_batches)
        )
        for rank in range(schedule.ranks)
    )
    return replace(schedule, micro_batches=micro_batches, actions=actions)


ACTIVITIES: dict[Kind, Activity] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input backward",
    Kind.WEIGHT: "weight backward",
}


class Pipeline:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, Stage],
        groups: tuple[Group, Group],
        deferral: Deferral,
        like: Tensor,
        keep_timing: bool = False,
        products: AbstractContextManager[object] | None = None,
    ) -> None:
        """`stages`: those of this rank by index; `groups`: ascending, descending; `like`: shape of what stages
        exchange. `products`: entered to compute in, again and again."""
        self.schedule = schedule
        self.rank = rank
        self.stages = stages
        self._groups = groups
        self._deferral = deferral
        self._like = like
        self._keep_timing = keep_timing
        self._products = products or nullcontext()
        self._loss_dtype = wide(like.dtype)
        self.timing: list[TimedAction] = []
        self._runners: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input_backward,
            Kind.WEIGHT: self._weight_backward,
        }

    def run(self, micro_batches: list[Share], scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. `scale` multiplies the summed loss before its gradient is taken.

        Returns the summed loss of this rank's micro-batches, unscaled: zero on a rank without the last stage."""
        self._micro_batches = micro_batches
        self._scale = scale
        self._loss = torch.zeros((), dtype=self._loss_dtype, device=scale.device)
        self._channels = Channels(self.schedule, self.rank, *self._groups, self._like)
        self._in_flight: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        self._postponed: dict[tuple[int, int], dict[Any, list[Callable[[], None]]]] = {}
        self.timing.clear()
        for action in self.schedule.actions[self.rank]:
            start = self._ready = self._now()
            PULSE.do(ACTIVITIES[action.kind], action.stage, action.micro_batch)
            with self._products:
                self._runners[action.kind](action.stage, action.micro_batch)
            if self._keep_timing:
                self.timing.append(TimedAction(action, start, self._ready, self._now()))
        self._channels.finish()
        return self._loss

    @torch.no_grad()
    def evaluate(self, micro_batches: list[Share]) -> Tensor:
        """Forward only: the summed loss of this rank's micro-batches, zero on a rank without the last stage."""
        schedule = forward_only(self.schedule, len(micro_batches))
        self._micro_batches = micro_batches
        self._loss = torch.zeros((), dtype=self._loss_dtype, device=self._like.device)
        self._channels = Channels(schedule, self.rank, *self._groups, self._like)
        for action in schedule.actions[self.rank]:
            PULSE.do("forward", action.stage, action.micro_batch)
            with self._products:
                self._forward(action.stage, action.micro_batch)
        self._channels.finish()
        return self._loss

    def _now(self) -> float:
        if self._keep_timing and self._like.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _receive(self, message: Message) -> Tensor:
        received = self._channels.receive(message)
        self._ready = self._now()
        return received

    def _forward(self, stage: int, index: int) -> None:
        share = self._micro_batches[index]
        received = stage > 0
        x = self._receive(Message(stage - 1, stage, index)).requires_grad_() if received else share.tokens
        y = self.stages[stage].forward(x, share)
        if y.requires_grad:
            # Where the backward pass enters, and not what went out: once it is sent, nobody needs that.
            self._in_flight[stage, index] = (x, get_gradient_edge(y))
        if stage + 1 < self.schedule.stages:
            self._channels.send(Message(stage, stage + 1, index), y.detach())
        else:
            self._loss += y.detach()

    def _backward(self, stage: int, index: int) -> None:
        x, output = self._in_flight.pop((stage, index))
        last = stage + 1 == self.schedule.stages
        gradient = self._scale if last else self._receive(Message(stage + 1, stage, index))
        self.stages[stage].backward(output, gradient)
        if stage > 0:
            assert x.grad is not None
            self._channels.send(Message(stage, stage - 1, index), x.grad)

    def _input_backward(self, stage: int, index: int) -> None:
        self._deferral.active = True
        self._backward(stage, index)
        self._deferral.active = False
        self._postponed[stage, index] = self._deferral.take()

    def _weight_backward(self, stage: int, index: int) -> None:
        self.stages[stage].weight_backward(self._postponed.pop((stage, index)))
