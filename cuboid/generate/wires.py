"""Messages between the pipeline ranks of a generation: activations go up, tokens come back from the last rank.

Every rank knows from its books what comes next and how large it is. A send never waits."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.channel import transport_device
from cuboid.parallel.groups import Group


class Wires:
    def __init__(self, ascending: Group, descending: Group) -> None:
        self._ascending, self._descending = ascending, descending
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def index(self) -> int:
        return self._ascending.index

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self._ascending.size

    def send_up(self, x: Tensor) -> None:
        self._send(x, self._ascending, self.index + 1)

    def receive_from_below(self, like: Tensor) -> Tensor:
        return self._receive(like, self._ascending, self.index - 1)

    def answer(self, tokens: list[int], device: torch.device) -> None:
        """From the last rank to all others."""
        values = torch.tensor(tokens, dtype=torch.int64).to(device)
        for index in range(self.index):
            self._send(values, self._descending, index)

    def receive_answer(self, count: int, device: torch.device) -> list[int]:
        like = torch.empty(count, dtype=torch.int64, device=device)
        tokens: list[int] = self._receive(like, self._descending, self._descending.size - 1).tolist()
        return tokens

    def _send(self, x: Tensor, group: Group, index: int) -> None:
        x = x.contiguous().to(transport_device(x, group))
        self._sent.append((dist.isend(x, group.ranks[index], group=group.handle), x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _receive(self, like: Tensor, group: Group, index: int) -> Tensor:
        buffer = torch.empty_like(like, device=transport_device(like, group))
        work = dist.irecv(buffer, group.ranks[index], group=group.handle)
        assert work is not None
        work.wait()
        return buffer.to(like.device)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
