"""Messages between pipeline ranks: one group of two ranks, and so one communicator, for each direction of a pair.

Sends and receives are issued in the order of `schedule.order`, which is one order for all ranks. Messages of a pair
travel first in, first out, because NCCL matches them by order alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.groups import Group, Groups
from cuboid.schedule.table import Message, Schedule
from cuboid.telemetry.heartbeat import HEARTBEAT, Track


def transport_device(like: Tensor, group: Group) -> torch.device:
    """Gloo sends from host memory only, also between ranks that have GPUs."""
    return torch.device("cpu") if group.is_gloo else like.device


def _track(link: Group) -> Track:
    """How far messages of one rank to another have come: as sent at the one, as received at the other."""
    return HEARTBEAT.track("message", link.ranks)


class PeerToPeer:
    """All messages of this rank during one step."""

    def __init__(self, schedule: Schedule, groups: Groups, like: Tensor) -> None:
        """`like`: shape, dtype and device of every message."""
        self._stage_rank = schedule.stage_rank
        self._groups, self._like = groups, like
        self._rank = groups.pipeline.index
        self._kept: dict[Message, Tensor] = {}
        """What goes from one stage of this rank to the next."""
        self._posted: dict[Message, tuple[Any, Tensor, Track, int]] = {}
        self._sent: deque[tuple[Any, Tensor, Track, int]] = deque()
        self._tags: dict[tuple[int, int], int] = {}
        """How many messages each link has carried in this step."""

    def _link(self, source: int, target: int) -> tuple[Group, int]:
        tag = self._tags.get((source, target), 0)
        self._tags[source, target] = tag + 1
        return self._groups.links[source, target], tag

    def keep(self, message: Message, tensor: Tensor) -> None:
        """For the next action of this rank on the neighbouring stage."""
        self._kept[message] = tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        target = self._stage_rank[message.target_stage]
        self._groups.pipeline.count("send", tensor.nbytes)
        link, tag = self._link(self._rank, target)
        if link.is_fake:  # nobody would ever say that it arrived
            return
        tensor = tensor.contiguous().to(transport_device(tensor, link))
        track = _track(link)
        work = dist.isend(tensor, link.ranks[1], group=link.handle, tag=tag)
        self._sent.append((work, tensor, track, track.advance()))
        # Buffers that have left are dropped in order: a send is never waited for while the step runs.
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def post(self, message: Message) -> None:
        """Begin to receive."""
        source = self._stage_rank[message.source_stage]
        link, tag = self._link(source, self._rank)
        # A fresh buffer a message: it becomes the stage's input, and autograd keeps it until the backward pass.
        buffer = torch.empty_like(self._like, device=transport_device(self._like, link))
        if link.is_fake:
            buffer.normal_()
        track = _track(link)
        posted = sum(waiting[2] is track for waiting in self._posted.values())
        work = dist.irecv(buffer, link.ranks[0], group=link.handle, tag=tag)
        self._posted[message] = (work, buffer, track, track.count + posted + 1)

    def take(self, message: Message) -> Tensor:
        """What was received, or kept; on a GPU it is there for everything issued from now on."""
        if message in self._kept:
            return self._kept.pop(message)
        work, buffer, track, number = self._posted.pop(message)
        # On NCCL the current stream waits and the host continues; on gloo the host waits.
        track.wait("message", number)
        work.wait()
        HEARTBEAT.end_wait()
        track.advance()
        return buffer.to(self._like.device)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            work, _, track, number = self._sent.popleft()
            track.wait("send", number)
            work.wait()
            HEARTBEAT.end_wait()
