"""Messages between the pipeline ranks of a generation: activations from stage to stage, tokens from the last one back.

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
        self.index = ascending.index
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor, target: int) -> None:
        group = self._ascending if self.index < target else self._descending
        x = x.contiguous().to(transport_device(x, group))
        self._sent.append((dist.isend(x, group.ranks[target], group=group.handle), x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, like: Tensor, source: int) -> Tensor:
        group = self._ascending if source < self.index else self._descending
        buffer = torch.empty_like(like, device=transport_device(like, group))
        work = dist.irecv(buffer, group.ranks[source], group=group.handle)
        assert work is not None
        work.wait()
        return buffer.to(like.device)

    def answer(self, tokens: list[int], device: torch.device) -> None:
        """From the rank of the last stage to all others."""
        values = torch.tensor(tokens, dtype=torch.int64).to(device)
        for target in range(self._ascending.size):
            if target != self.index:
                self.send(values, target)

    def receive_answer(self, count: int, source: int, device: torch.device) -> list[int]:
        tokens: list[int] = self.receive(torch.empty(count, dtype=torch.int64, device=device), source).tolist()
        return tokens

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
