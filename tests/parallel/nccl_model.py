"""A model of how ProcessGroupNCCL treats point-to-point messages, run on what the real pipeline executor issues.

Each rank is a host that issues calls in order and a device with one compute stream and one stream per communicator:

- the first message of a communicator blocks the host until the other rank makes its first call on it too;
- a send or receive is a kernel. It starts when everything issued before it on the compute stream and on its own
  communicator has ended, and ends when its partner has started: a send may wait for its receive;
- `work.wait()` lets the compute stream wait, not the host;
- a device synchronisation blocks the host until every kernel it has issued has ended.

A synchronisation only adds waiting. So a program that ends with one before every call also ends with fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.model.split_backward import Deferral
from cuboid.parallel.groups import Group, Groups
from cuboid.parallel.pipeline import DualPipePair, Pipeline
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Entrance, Reduction, Segment, Stage
from cuboid.schedule.table import Schedule

Communicators = Literal["per link", "one"]
"""One per link, as the engine makes them, or the worst there could be: one that all messages of the job share, so that
each waits for all that its rank issued before."""


@dataclass(eq=False)
class Call:
    """One call of a host: a kernel of a kind, or a wait of the compute stream for an earlier one."""

    kind: Literal["compute", "send", "receive", "wait"]
    rank: int
    peer: int = -1
    link: Any = None
    awaited: Call | None = None


@dataclass
class Recorder:
    """What one host calls, in order."""

    rank: int
    calls: list[Call] = field(default_factory=list)

    def message(self, kind: Literal["send", "receive"], peer: int, link: Any) -> _Work:
        self.calls.append(Call(kind, self.rank, peer, link))
        return _Work(self, self.calls[-1])

    def compute(self) -> None:
        self.calls.append(Call("compute", self.rank))


class _Work:
    def __init__(self, recorder: Recorder, call: Call) -> None:
        self._recorder, self._call = recorder, call

    def wait(self) -> None:
        self._recorder.calls.append(Call("wait", self._recorder.rank, awaited=self._call))

    def is_completed(self) -> bool:
        return False


class _RecordedStage(Stage):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def forward(self, x: Tensor, share: RankBatch) -> Tensor:
        self._recorder.compute()
        return super().forward(x, share)

    def backward(self, output: Entrance, gradient: Tensor) -> None:
        self._recorder.compute()
        super().backward(output, gradient)

    def weight_backward(self, postponed: dict[Any, list[Callable[[], None]]]) -> None:
        self._recorder.compute()
        super().weight_backward(postponed)


@contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    """NCCL cannot run without GPUs: its two calls are taken down instead."""
    real = dist.isend, dist.irecv
    dist.isend = lambda tensor, peer, group, tag=0: recorder.message("send", peer, group)  # type: ignore[assignment]
    dist.irecv = lambda tensor, peer, group, tag=0: recorder.message("receive", peer, group)  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.isend, dist.irecv = real


@dataclass(frozen=True)
class _Link(Group):
    """A group of two ranks that no process group stands behind."""

    is_fake = False  # type: ignore[assignment]
    is_gloo = False  # type: ignore[assignment]


def issued_by(schedule: Schedule, rank: int, paired: bool = False, evaluates: bool = False) -> list[Call]:
    """What the real executor issues on one rank in one step: real stages, autograd and channels, of one number each."""
    recorder = Recorder(rank)
    ranks = range(schedule.ranks)
    links: dict[tuple[int, int], Group] = {
        (source, target): _Link((source, target), int(rank == target), handle=(source, target))  # type: ignore[arg-type]
        for source in ranks
        for target in ranks
    }
    groups: Any = object.__new__(Groups)
    vars(groups).update(pipeline=Group(tuple(ranks), rank), links=links)
    deferral, reduction = Deferral(), Reduction()
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(rank):
        stage = stages[index] = _RecordedStage(recorder)
        weight = torch.ones(1, requires_grad=True)
        stage.append(Segment("only", lambda x, share, weight=weight: x * weight, [], deferral, reduction))
        if index + 1 == schedule.stages:
            stage.append(Segment("head", lambda x, share: x.sum(), [], deferral, reduction))
    pair = DualPipePair() if paired else None
    pipeline = Pipeline(schedule, stages, groups, deferral, torch.zeros(1), pair=pair)
    one: Any = RankBatch(torch.ones(1), torch.ones(1), None)  # type: ignore[arg-type]
    with _recorded(recorder):
        batches = [one] * schedule.micro_batches
        pipeline.evaluate(batches) if evaluates else pipeline.run(batches, torch.ones(()))
    return recorder.calls


class _Host:
    def __init__(self, calls: list[Call], synchronises: bool, communicators: Communicators) -> None:
        self.calls, self.synchronises = calls, synchronises
        self.issued = 0
        self.compute: list[Call] = []
        self.computed = 0
        """Of the compute stream, how many have ended."""
        self.streams: dict[Any, list[Call]] = {}
        self.before: dict[Call, int] = {}
        """Of each kernel how many calls of the compute stream it waits for."""
        self.met: set[Any] = set()
        """Communicators that exist here."""
        self._one = communicators == "one"

    def communicator(self, call: Call) -> Any:
        return "one" if self._one else call.link


def run(rows: Sequence[list[Call]], synchronises: bool, communicators: Communicators = "per link") -> list[str]:
    """Run all hosts and devices until nothing moves; who stands still, and where. Nobody: the step has ended."""
    hosts = [_Host(calls, synchronises, communicators) for calls in rows]
    partner = _partners(rows)
    started: set[Call] = set()
    ended: set[Call] = set()

    def reaches(host: _Host, key: Any) -> bool:
        """Whether a host stands at, or has passed, its first call on a communicator."""
        if key in host.met:
            return True
        call = host.calls[host.issued] if host.issued < len(host.calls) else None
        return call is not None and call.link is not None and host.communicator(call) == key and may_issue(host)

    def may_issue(host: _Host) -> bool:
        if not host.synchronises:
            return True
        return host.computed == len(host.compute) and all(
            call in ended for calls in host.streams.values() for call in calls
        )

    def issue(host: _Host) -> bool:
        call = host.calls[host.issued]
        if not may_issue(host):
            return False
        if call.link is not None:
            key = host.communicator(call)
            if key not in host.met and key != "one" and not reaches(hosts[call.peer], key):
                return False
            host.met.add(key)
            host.streams.setdefault(key, []).append(call)
            host.before[call] = len(host.compute)
        else:
            host.compute.append(call)
        host.issued += 1
        return True

    def device(host: _Host) -> bool:
        moved = False
        while host.computed < len(host.compute):
            awaited = host.compute[host.computed].awaited
            if awaited is not None and awaited not in ended:
                break
            host.computed += 1
            moved = True
        for calls in host.streams.values():
            first = next((call for call in calls if call not in ended), None)
            if first is not None and first not in started and host.computed >= host.before[first]:
                started.add(first)
                moved = True
            if first is not None and first in started and partner[first] in started:
                ended.update((first, partner[first]))
                moved = True
            calls[:] = [call for call in calls if call not in ended]
        return moved

    moved = True
    while moved:
        moved = False
        for host in hosts:
            while host.issued < len(host.calls) and issue(host):
                moved = True
            while device(host):
                moved = True
    return [
        f"rank {rank} at call {host.issued} of {len(host.calls)}"
        for rank, host in enumerate(hosts)
        if host.issued < len(host.calls) or host.computed < len(host.compute) or any(host.streams.values())
    ]


def _partners(rows: Sequence[list[Call]]) -> dict[Call, Call]:
    """NCCL matches the first send of a link with its first receive, and so on."""
    sent: dict[Any, list[Call]] = {}
    received: dict[Any, list[Call]] = {}
    for call in (call for calls in rows for call in calls):
        if call.kind == "send":
            sent.setdefault((call.link, call.rank, call.peer), []).append(call)
        elif call.kind == "receive":
            received.setdefault((call.link, call.peer, call.rank), []).append(call)
    assert sent.keys() == received.keys()
    found: dict[Call, Call] = {}
    for key, calls in sent.items():
        for left, right in zip(calls, received[key], strict=True):
            found[left], found[right] = right, left
    return found
