"""Pipelines end under NCCL's rules, however early or late anything runs; and the model can tell one that would not."""

from __future__ import annotations

from collections import deque

import pytest

from cuboid.schedule.order import pairs_overlap
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.table import Message, Schedule, needed, produced
from tests.parallel.nccl_model import Call, Communicators, Recorder, issued_by, run

FAMILIES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb1p", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0]}-{family[1]}")
def test_no_schedule_deadlocks(family: tuple[str, int], ranks: int) -> None:
    for batches in (1, 2 * ranks + 1) if ranks < 16 else (2 * ranks,):
        schedule = make_schedule(family[0], ranks, batches, family[1])
        for paired in {False, pairs_overlap(schedule)}:
            rows = [issued_by(schedule, rank, paired) for rank in range(ranks)]
            _check(rows)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0]}-{family[1]}")
def test_no_evaluation_deadlocks(family: tuple[str, int]) -> None:
    schedule = make_schedule(family[0], 4, 10, family[1])
    _check([issued_by(schedule, rank, evaluates=True) for rank in range(4)])


def _check(rows: list[list[Call]]) -> None:
    communicators: tuple[Communicators, ...] = ("per link", "one")
    for kind in communicators:
        for synchronises in (False, True):
            assert run(rows, synchronises, kind) == []


def posted_ahead(schedule: Schedule, rank: int) -> list[Call]:
    """How this engine's pipelines once issued their messages: one group for each direction of the whole pipeline, the
    first receive from every rank at the beginning of the step, and always one receive ahead."""
    recorder = Recorder(rank)
    inboxes: dict[int, deque[Message]] = {}
    for source, actions in enumerate(schedule.actions):
        sent = [message for action in actions if (message := produced(action, schedule)) is not None]
        mine = deque(message for message in sent if schedule.stage_rank[message.target_stage] == rank)
        if mine:
            inboxes[source] = mine
    posted: dict[Message, tuple[int, object]] = {}

    def post(source: int) -> None:
        if inboxes[source]:
            posted[inboxes[source].popleft()] = (source, recorder.message("receive", source, _way(source, rank)))

    for source in inboxes:
        post(source)
    for action in schedule.actions[rank]:
        message = needed(action, schedule)
        if message is not None:
            source = schedule.stage_rank[message.source_stage]
            while message not in posted:
                post(source)
            _, work = posted.pop(message)
            if not any(known == source for known, _ in posted.values()):
                post(source)
            work.wait()  # type: ignore[attr-defined]
        recorder.compute()
        message = produced(action, schedule)
        if message is not None:
            target = schedule.stage_rank[message.target_stage]
            recorder.message("send", target, _way(rank, target))
    return recorder.calls


def _way(source: int, target: int) -> tuple[bool, int, int]:
    """The communicator that torch makes for two ranks of the group of one direction."""
    return source < target, min(source, target), max(source, target)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0]}-{family[1]}")
def test_the_model_finds_what_hung_on_real_gpus(family: tuple[str, int], ranks: int) -> None:
    """Receives posted ahead hung in the first step of every pipeline over real NCCL: while communicators were made, and
    at the first synchronisation of the device where they were there already."""
    schedule = make_schedule(family[0], ranks, 4 * ranks, family[1])
    rows = [posted_ahead(schedule, rank) for rank in range(ranks)]
    assert len(run(rows, synchronises=False)) == ranks
    assert run(rows, synchronises=True)
