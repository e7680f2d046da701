"""Messages between pipeline ranks: one first-in-first-out channel per directed pair.

A send never waits. A receive is posted in the order in which the other rank sends, whatever order this rank consumes
in, because NCCL matches messages by order alone; and one message ahead, so that it travels while this rank computes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.groups import Group
from cuboid.resilience.pulse import PULSE, Track
from cuboid.schedule.program import Message, channels
from cuboid.schedule.table import Schedule


class _Inbox:
    """Receives from one rank."""

    def __init__(self, messages: tuple[Message, ...], source: int, group: Group, like: Tensor) -> None:
        self._expected = deque(enumerate(messages))
        self._source = source
        self._group = group
        self._like = like
        self._posted: dict[Message, tuple[Any, Tensor, int]] = {}
        self._track = _track(source, group.ranks[group.index])
        self._earlier = self._track.count
        """Messages of steps before this one."""
        self._post()

    def _post(self) -> None:
        if self._expected:
            tag, message = self._expected.popleft()
            buffer = torch.empty_like(self._like, device=transport_device(self._like, self._group))
            if self._group.is_imagined:
                buffer.normal_()
            work = dist.irecv(buffer, self._source, group=self._group.handle, tag=tag)
            self._posted[message] = (work, buffer, self._earlier + tag + 1)

    def take(self, message: Message) -> Tensor:
        while message not in self._posted:
            self._post()
        work, buffer, number = self._posted.pop(message)
        if not self._posted:
            self._post()
        self._track.wait("message", number)
        work.wait()
        PULSE.go_on()
        self._track.advance()
        return buffer.to(self._like.device)


def _track(source: int, target: int) -> Track:
    """How far messages of one rank to another have come: as sent at the one, as received at the other."""
    return PULSE.track("message", (source, target))


def transport_device(like: Tensor, group: Group) -> torch.device:
    """Gloo, which serves ranks that share a GPU, sends from host memory only."""
    return torch.device("cpu") if group.is_gloo else like.device


class Channels:
    """All messages of this rank during one step."""

    def __init__(self, schedule: Schedule, rank: int, ascending: Group, descending: Group, like: Tensor) -> None:
        self._stage_rank = schedule.stage_rank
        self._rank = rank
        self._ascending, self._descending = ascending, descending
        self._inboxes: dict[int, _Inbox] = {}
        for (source, target), messages in channels(schedule).items():
            if target == rank:
                group = self._group(source, target)
                self._inboxes[source] = _Inbox(messages, group.ranks[source], group, like)
        self._kept: dict[Message, Tensor] = {}
        self._sent: deque[tuple[Any, Tensor, Track, int]] = deque()
        self._sent_to = [0] * schedule.ranks

    def _group(self, source: int, target: int) -> Group:
        return self._ascending if source < target else self._descending

    def send(self, message: Message, tensor: Tensor) -> None:
        target = self._stage_rank[message.target_stage]
        if target == self._rank:
            self._kept[message] = tensor
            return
        group = self._group(self._rank, target)
        group.count("send", tensor.nbytes)
        if group.is_imagined:  # nobody would ever say that it arrived
            return
        tag = self._sent_to[target]
        self._sent_to[target] += 1
        tensor = tensor.contiguous().to(transport_device(tensor, group))
        track = _track(group.ranks[self._rank], group.ranks[target])
        work = dist.isend(tensor, group.ranks[target], group=group.handle, tag=tag)
        self._sent.append((work, tensor, track, track.advance()))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, message: Message) -> Tensor:
        source = self._stage_rank[message.source_stage]
        return self._kept.pop(message) if source == self._rank else self._inboxes[source].take(message)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            work, _, track, number = self._sent.popleft()
            track.wait("send", number)
            work.wait()
            PULSE.go_on()
