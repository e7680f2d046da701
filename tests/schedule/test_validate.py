"""A broken schedule is refused by a sentence that names what is wrong; first-in first-out channels are run for real."""

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.schedule.make import make_schedule
from cuboid.schedule.program import Message, channels, needed, produced
from cuboid.schedule.table import Action, Kind, Schedule
from cuboid.schedule.validate import validate


def parse(text: str) -> tuple[Action, ...]:
    def action(word: str) -> Action:
        stage, batch = word[1:].split(".")
        return Action(Kind(word[0]), int(stage), int(batch))

    return tuple(map(action, text.split()))


def two_ranks(first: str, second: str, micro_batches: int = 1) -> Schedule:
    return Schedule("hand-made", 2, micro_batches, (0, 1), (parse(first), parse(second)))


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (two_ranks("F0.0", "F1.0 B1.0"), "has neither B0.0 nor W0.0 on rank 0"),
        (two_ranks("F0.0 I0.0", "F1.0 B1.0"), "has neither B0.0 nor W0.0 on rank 0"),
        (two_ranks("F0.0 F0.0 B0.0", "F1.0 B1.0"), "has F0.0 twice on rank 0"),
        (two_ranks("F0.0 B0.0 B0.0", "F1.0 B1.0"), "has B0.0 twice on rank 0"),
        (two_ranks("B0.0 F0.0", "F1.0 B1.0"), "has B0.0 on rank 0 before F0.0"),
        (two_ranks("F0.0 W0.0 I0.0", "F1.0 B1.0"), "has W0.0 on rank 0 before I0.0"),
        (two_ranks("F0.0 B0.0 I0.0 W0.0", "F1.0 B1.0"), "has both I0.0 and B0.0 on rank 0"),
        (two_ranks("F0.0 B0.0 F1.0", "B1.0"), "has F1.0 on rank 0, which does not hold stage 1"),
        (two_ranks("F0.0 B0.0 F2.0", "F1.0 B1.0"), "has F2.0 on rank 0, which does not hold stage 2"),
        (two_ranks("F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0"), "has F0.1 on rank 0, but only 1 micro-batches"),
        (
            two_ranks("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", 2),
            "deadlocks: rank 0 waits at B0.0, rank 1 waits at F1.1",
        ),
        (replace(two_ranks("", ""), stage_rank=(0, 0)), "places its stages on ranks [0], not on 0 to 1"),
        (replace(two_ranks("", ""), ranks=1), "has lists for 2 ranks, not 1"),
        (
            Schedule("hand-made", 1, 1, (0, 0), (parse("F1.0 F0.0 B1.0 B0.0"),)),
            "has F1.0 on rank 0 before F0.0",
        ),
        (
            Schedule("hand-made", 1, 1, (0, 0), (parse("F0.0 F1.0 B0.0 B1.0"),)),
            "has B0.0 on rank 0 before B1.0 or I1.0",
        ),
    ],
)
def test_broken_schedules_are_refused(schedule: Schedule, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        validate(schedule)
    assert str(refusal.value) == f"schedule hand-made {sentence}"


def test_splits_may_be_mixed_with_whole_backwards() -> None:
    validate(two_ranks("F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 W1.0 B1.1", 2))


@given(st.data())
def test_dropping_any_action_is_noticed(data: st.DataObject) -> None:
    schedule = make_schedule(
        *data.draw(st.sampled_from([("zb1p", 3, 4, 1), ("interleaved", 2, 3, 2), ("zbv", 2, 3, 2)]))
    )
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    del row[data.draw(st.integers(0, len(row) - 1))]
    rows = [*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]]
    with pytest.raises(UserError):
        validate(replace(schedule, actions=tuple(rows)))


@given(
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_runs_over_real_queues_in_any_interleaving(
    family: tuple[str, int], ranks: int, batches: int, random: Random
) -> None:
    """Play executor: queues between ranks, receives in the order of `channels`, a random rank steps each time."""
    schedule = make_schedule(family[0], ranks, batches, family[1])
    queues: dict[tuple[int, int], deque[Message]] = {pair: deque() for pair in channels(schedule)}
    expected = {pair: deque(messages) for pair, messages in channels(schedule).items()}
    early: list[set[Message]] = [set() for _ in range(ranks)]
    todo = [deque(actions) for actions in schedule.actions]

    def step(rank: int) -> bool:
        action = todo[rank][0]
        message = needed(action, schedule)
        if message is not None:
            pair = (schedule.stage_rank[message.source_stage], rank)
            while message not in early[rank] and queues[pair]:
                assert queues[pair][0] == expected[pair].popleft()
                early[rank].add(queues[pair].popleft())
            if message not in early[rank]:
                return False
            early[rank].remove(message)
        todo[rank].popleft()
        sent = produced(action, schedule)
        if sent is not None:
            queues[rank, schedule.stage_rank[sent.target_stage]].append(sent)
        return True

    while any(todo):
        order = [rank for rank in range(ranks) if todo[rank]]
        random.shuffle(order)
        assert any(step(rank) for rank in order), "no rank can go on"
    assert not any(queues.values())
    assert not any(early)
