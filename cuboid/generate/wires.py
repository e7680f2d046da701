"""Messages between the pipeline ranks of a generation: activations from stage to stage, tokens from the last one back.

Every rank knows from its books what comes next and how large it is. Activations only go from stage to stage, over the
links of the pipeline. Tokens are in CPU memory when they are chosen, and are wanted there: they go over a gloo
group of their own. A gloo send never waits for its receive, so that no rank waits for another in a circle."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.parallel.groups import Groups
from cuboid.parallel.p2p import transport_device


class Wires:
    def __init__(self, groups: Groups) -> None:
        self._links, self._ranks = groups.links, groups.pipeline.ranks
        self.index = groups.pipeline.index
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._tokens: dist.ProcessGroup | None = None
        if len(self._ranks) > 1:
            self._tokens = dist.new_group(list(self._ranks), backend="gloo", use_local_synchronization=True)

    def send(self, x: Tensor, target: int) -> None:
        link = self._links[self.index, target]
        x = x.contiguous().to(transport_device(x, link))
        self._keep(dist.isend(x, link.ranks[1], group=link.handle), x)

    def _keep(self, work: Any, x: Tensor) -> None:
        """Until it has left."""
        self._sent.append((work, x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, like: Tensor, source: int) -> Tensor:
        link = self._links[source, self.index]
        buffer = torch.empty_like(like, device=transport_device(like, link))
        work = dist.irecv(buffer, link.ranks[0], group=link.handle)
        assert work is not None
        work.wait()
        return buffer.to(like.device)

    def answer(self, tokens: list[int]) -> None:
        """From the rank of the last stage to all others."""
        values = torch.tensor(tokens, dtype=torch.int64)
        for index, target in enumerate(self._ranks):
            if index != self.index:
                self._keep(dist.isend(values, target, group=self._tokens), values)

    def receive_answer(self, count: int, source: int) -> list[int]:
        values = torch.empty(count, dtype=torch.int64)
        dist.recv(values, self._ranks[source], group=self._tokens)
        tokens: list[int] = values.tolist()
        return tokens

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
