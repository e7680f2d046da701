"""Pipeline parallelism: runs this rank's actions of a schedule table, and its messages, in the order of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.model.split_backward import Deferral
from cuboid.parallel.groups import Groups
from cuboid.parallel.p2p import PeerToPeer
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Entrance, Stage
from cuboid.schedule.order import UNITS, Receive, Send, instructions
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.table import Action, Kind, Message, Schedule
from cuboid.telemetry.heartbeat import HEARTBEAT, Activity


@dataclass(frozen=True)
class TimedAction:
    action: Action
    start: float
    ready: float
    """When what it waited for from another rank was there; its start where it waits for nothing."""
    end: float


@lru_cache(maxsize=8)
def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """As many micro-batches as there are ranks go through a rank's first stage, then its next; then the next so many.
    So a rank with several stages keeps few messages."""
    actions = tuple(
        tuple(
            Action(Kind.FORWARD, stage, micro_batch)
            for first in range(0, micro_batches, schedule.ranks)
            for stage in schedule.stages_of(rank)
            for micro_batch in range(first, min(first + schedule.ranks, micro_batches))
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


class _Clock:
    """Moments of a step. On a GPU they are events in the stream, so that nothing waits while messages are on their way;
    the host's clock is set against the last of them when the step has ended."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moments: list[Any]) -> list[float]:
        """On the host's clock. Waits for the device, and so never where no times are kept: the step may be a graph."""
        if not self._on_gpu or not moments:
            return moments
        last = self.now()
        last.synchronize()
        end = time.perf_counter()
        return [end - moment.elapsed_time(last) / 1e3 for moment in moments]


class Pipeline:
    def __init__(
        self,
        schedule: Schedule,
        stages: dict[int, Stage],
        groups: Groups,
        deferral: Deferral,
        like: Tensor,
        keep_timing: bool = False,
        matmuls: AbstractContextManager[object] | None = None,
        pair: DualPipePair | None = None,
    ) -> None:
        """`stages`: those of this rank by index; `like`: shape of what stages send one another. `matmuls`: entered to
        compute in, again and again. `pair`: runs the pairs of DualPipeV together; None: one after the other."""
        self.schedule = schedule
        self._schedules = {schedule.micro_batches: schedule}
        self.rank = groups.pipeline.index
        self.stages = stages
        self._groups = groups
        self._deferral = deferral
        self._like = like
        self._keep_timing = keep_timing
        self._matmuls = matmuls or nullcontext()
        self._pair = pair
        self._loss_dtype = wide(like.dtype)
        self.timing: list[TimedAction] = []
        self._clock = _Clock(like.device)
        self.runners: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input_backward,
            Kind.WEIGHT: self._weight_backward,
        }
        """What computes an action of each kind, of a stage and a micro-batch."""

    @property
    def pairs(self) -> bool:
        """Whether two passes may run together."""
        return self._pair is not None

    def run(self, micro_batches: list[RankBatch], scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. `scale` multiplies the summed loss before its gradient is taken.

        Returns the summed loss of this rank's micro-batches, unscaled: zero on a rank without the last stage."""
        self._scale = scale
        self._in_flight: dict[tuple[int, int], tuple[Tensor, Entrance]] = {}
        self._postponed: dict[tuple[int, int], dict[Any, list[Callable[[], None]]]] = {}
        self.timing = self._follow(self._schedule_of(len(micro_batches)), micro_batches)
        return self._loss

    def _schedule_of(self, micro_batches: int) -> Schedule:
        """That of a smaller batch is made when it first comes."""
        if micro_batches not in self._schedules:
            name, ranks = self.schedule.name, self.schedule.ranks
            self._schedules[micro_batches] = make_schedule(name, ranks, micro_batches, self.schedule.stages // ranks)
        return self._schedules[micro_batches]

    @torch.no_grad()
    def evaluate(self, micro_batches: list[RankBatch]) -> Tensor:
        """Forward only: the summed loss of this rank's micro-batches, zero on a rank without the last stage."""
        self._follow(forward_only(self.schedule, len(micro_batches)), micro_batches)
        return self._loss

    def _follow(self, schedule: Schedule, micro_batches: list[RankBatch]) -> list[TimedAction]:
        """Issue this rank's part of the order that all ranks follow (`schedule.order`); its times, if they are kept."""
        self._micro_batches = micro_batches
        self._loss = torch.zeros((), dtype=self._loss_dtype, device=self._like.device)
        self._channels = channels = PeerToPeer(schedule, self._groups, self._like)
        self._made: dict[Message, Tensor] = {}
        timed: list[tuple[tuple[Action, ...], Any, Any, Any]] = []
        for instruction in instructions(schedule, self._pair is not None)[self.rank]:
            # Receives are posted ahead of the compute that needs them, in one order on both ends: NCCL matches by order
            # alone.
            if isinstance(instruction, Receive):
                channels.post(instruction.message)
            elif isinstance(instruction, Send):
                channels.send(instruction.message, self._made.pop(instruction.message))
            else:
                start = self._ready = self._clock.now() if self._keep_timing else None
                self._compute(instruction.actions)
                if self._keep_timing:
                    timed.append((instruction.actions, start, self._ready, self._clock.now()))
        channels.finish()
        return self._timed(timed)

    def _compute(self, actions: tuple[Action, ...]) -> None:
        first = actions[0]
        HEARTBEAT.do(ACTIVITIES[first.kind], first.stage, first.micro_batch)
        if len(actions) == 1:
            self._act(first)
            return
        assert self._pair is not None
        self._pair.run(partial(self._act, first), partial(self._act, actions[1]), self._like.device)

    def _act(self, action: Action) -> None:
        with self._matmuls:
            self.runners[action.kind](action.stage, action.micro_batch)

    def _timed(self, timed: list[tuple[tuple[Action, ...], Any, Any, Any]]) -> list[TimedAction]:
        """The time of a pair is divided between its two actions as the order does it."""
        seconds = iter(self._clock.seconds([moment for _, *moments in timed for moment in moments]))
        result = []
        for actions, *_ in timed:
            start, ready, end = next(seconds), next(seconds), next(seconds)
            whole, spent = sum(UNITS[action.kind] for action in actions), 0
            for action in actions:
                spent += UNITS[action.kind]
                until = ready + (end - ready) * spent / whole
                result.append(TimedAction(action, start, ready, until))
                start = ready = until
        return result

    def _receive(self, message: Message) -> Tensor:
        received = self._channels.take(message)
        if self._keep_timing:
            self._ready = self._clock.now()
        return received

    def _give(self, message: Message, tensor: Tensor) -> None:
        """To the neighbouring stage: at once if that is on this rank, else when the order says so."""
        if self.schedule.stage_rank[message.target_stage] == self.rank:
            self._channels.keep(message, tensor)
        else:
            self._made[message] = tensor

    def _forward(self, stage: int, index: int) -> None:
        batch = self._micro_batches[index]
        received = stage > 0
        x = self._receive(Message(stage - 1, stage, index)).requires_grad_() if received else batch.tokens
        # x is a leaf, so the graph ends at the stage's border and x.grad is what the stage before gets.
        y = self.stages[stage].forward(x, batch)
        if y.requires_grad:
            self._in_flight[stage, index] = (x, Entrance(y))
        if stage + 1 < self.schedule.stages:
            self._give(Message(stage, stage + 1, index), y.detach())
        else:
            self._loss += y.detach()

    def _backward(self, stage: int, index: int) -> None:
        x, output = self._in_flight.pop((stage, index))
        last = stage + 1 == self.schedule.stages
        gradient = self._scale if last else self._receive(Message(stage + 1, stage, index))
        self.stages[stage].backward(output, gradient)
        if stage > 0:
            assert x.grad is not None
            self._give(Message(stage, stage - 1, index), x.grad)

    def _input_backward(self, stage: int, index: int) -> None:
        # Zero-bubble's B: input gradients only. Matmuls leave their weight gradients with `deferral`; W computes them
        # later.
        self._deferral.active = True
        self._backward(stage, index)
        self._deferral.active = False
        self._postponed[stage, index] = self._deferral.take()

    def _weight_backward(self, stage: int, index: int) -> None:
        self.stages[stage].weight_backward(self._postponed.pop((stage, index)))


# A forward and a backward pass that run together: while one waits for a collective the other computes (DualPipe).
#
# Both passes are ordinary code. Wherever one has issued a collective and would wait for it, it hands over; the other
# runs until it does the same. Only one runs at a time, so the order of all calls is fixed by the model alone and is the
# same on every rank, as collectives of one group must be. Kernels of both go to one stream: what the second pass
# computes is queued before the first one's wait, and so runs during the transfer.


class DualPipePair:
    def __init__(self) -> None:
        self.active = False
        self.carried: list[tuple[object, str]] = []
        """(object, attribute) that each pass sees as it left it, or as it was before both, whatever the other does."""
        self._running = 0
        self._ended = [False, False]
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))

    def run(self, first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """`second` runs in a thread of its own; an error of either is raised here when both have ended."""
        errors: list[BaseException] = []
        before = self._carried()
        self.active, self._running, self._ended = True, 0, [False, False]

        def one(side: int, work: Callable[[], None]) -> None:
            # Semaphores pass one baton: exactly one of the two threads runs, so Python and CUDA calls have one order.
            self._may_run[side].acquire()
            try:
                if side == 1:
                    self._restore(before)
                    if device.type == "cuda":  # a thread begins with the first one
                        torch.cuda.set_device(device)
                work()
            except BaseException as error:
                errors.append(error)
            self._ended[side] = True
            self._running = 1 - side
            self._may_run[1 - side].release()

        helper = threading.Thread(target=one, args=(1, second), name="overlapped backward")
        helper.start()
        self._may_run[0].release()
        one(0, first)
        helper.join()
        for semaphore in self._may_run:  # what the side that ended last has released
            while semaphore.acquire(blocking=False):
                pass
        self.active = False
        if errors:
            raise errors[0]

    def hand_over(self) -> None:
        """Called by a pass that would wait now. Returns when the other pass hands over in turn, or has ended."""
        if not self.active or self._ended[1 - self._running]:
            return
        kept = self._carried()
        side = self._running
        self._running = 1 - side
        self._may_run[1 - side].release()
        self._may_run[side].acquire()
        self._restore(kept)

    def _carried(self) -> list[Any]:
        return [getattr(owner, name) for owner, name in self.carried]

    def _restore(self, values: list[Any]) -> None:
        for (owner, name), value in zip(self.carried, values, strict=True):
            setattr(owner, name, value)
