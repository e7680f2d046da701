"""A broken schedule is refused by a sentence that names what is wrong; messages of every schedule pair up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.schedule.order import Compute, Receive, Send, instructions, pairs_overlap, run_blocking, validate
from cuboid.schedule.schedules import make_schedule
from cuboid.schedule.table import Action, Kind, Schedule


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


def test_a_message_that_is_issued_out_of_order_is_noticed() -> None:
    """The receive of a gradient before the send of the activation it depends on: what a pipeline must never do."""
    schedule = make_schedule("1f1b", 2, 2)
    rows = [list(row) for row in instructions(schedule)]
    gradient = next(item for item in rows[0] if isinstance(item, Receive))
    rows[0].remove(gradient)
    run_blocking(schedule, instructions(schedule))
    with pytest.raises(UserError, match="deadlocks where every call waits: rank 0 at Receive"):
        run_blocking(schedule, [[gradient, *rows[0]], rows[1]])


@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]),
    st.integers(1, 6),
    st.integers(1, 14),
)
def test_every_rank_issues_all_it_has_and_messages_pair_up(family: tuple[str, int], ranks: int, batches: int) -> None:
    schedule = make_schedule(family[0], ranks, batches, family[1])
    validate(schedule)
    for paired in {False, pairs_overlap(schedule)}:
        rows = instructions(schedule, paired)
        for rank, row in enumerate(rows):
            computed = tuple(action for item in row if isinstance(item, Compute) for action in item.actions)
            assert computed == schedule.actions[rank]
        for source in range(ranks):
            for target in range(ranks):
                sent = [
                    item.message
                    for item in rows[source]
                    if isinstance(item, Send) and _target(schedule, item) == target
                ]
                received = [
                    item.message
                    for item in rows[target]
                    if isinstance(item, Receive) and _source(schedule, item) == source
                ]
                assert sent == received  # first in, first out


def _target(schedule: Schedule, item: Send) -> int:
    return schedule.stage_rank[item.message.target_stage]


def _source(schedule: Schedule, item: Receive) -> int:
    return schedule.stage_rank[item.message.source_stage]
