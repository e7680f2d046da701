"""Who is named when a job stands still, over many made-up jobs whose culprit is known."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cuboid.resilience.diagnosis import diagnose
from cuboid.spec.layout import Layout
from cuboid.spec.ranks import groups
from cuboid.telemetry.heartbeat import Learned, Place, Reading, Wait, Waiting

layouts = st.builds(Layout, dp=st.integers(1, 4), tp=st.integers(1, 3), pp=st.integers(1, 3)).filter(
    lambda layout: layout.world_size > 1
)
orders = st.lists(st.sampled_from(["data", "tp", "pp", "model"]), max_size=6).map(lambda kinds: [*kinds, "world"])


def stuck(layout: Layout, order: list[str], culprit: int, collectives: int) -> list[Reading]:
    """Ranks that do the collectives in `order`, over and over, each in its own group of that kind. The culprit stops
    before it has begun more than so many; whoever begins one that not all others begin waits in it."""
    kinds = {**groups(layout), "world": (tuple(range(layout.world_size)),)}

    def place(rank: int, number: int) -> Place:
        kind = order[number % len(order)]
        return Place(kind, next(ranks for ranks in kinds[kind] if rank in ranks))

    begun = dict.fromkeys(range(layout.world_size), 0)
    moving = True
    while moving:
        moving = False
        for rank, number in begun.items():
            last = place(rank, number - 1) if number else Place("world", ())
            through = all(begun[one] >= number for one in last.ranks)
            if through and not (rank == culprit and number == collectives):
                begun[rank] += 1
                moving = True
    readings = []
    for rank, number in begun.items():
        counts: dict[Place, int] = {}
        for earlier in range(number):
            counts[place(rank, earlier)] = counts.get(place(rank, earlier), 0) + 1
        last = place(rank, number - 1) if number else Place("world", ())
        waits = any(begun[one] < number for one in last.ranks)
        note = Waiting("all-reduce", last, counts[last]) if waits else None
        readings.append(Reading(rank, 100 + rank, "step", 7, "backward", 0, 0, note, counts))
    return readings


@given(layouts, orders, st.integers(0, 100), st.integers(0, 12))
def test_the_rank_that_others_wait_for_is_named(
    layout: Layout, order: list[str], culprit: int, collectives: int
) -> None:
    culprit %= layout.world_size
    found = diagnose(stuck(layout, order, culprit, collectives))
    assert found.culprits == (culprit,)
    assert found.sentence.startswith(f"rank {culprit} hangs in step 7, in its backward pass of stage 0: rank")
    assert "for it in the all-reduce of" in found.sentence


@given(layouts, orders, st.integers(0, 100), st.integers(0, 100))
def test_a_stopped_or_ended_rank_is_named_whatever_it_waits_in(
    layout: Layout, order: list[str], culprit: int, other: int
) -> None:
    readings = stuck(layout, order, culprit % layout.world_size, 3)
    other %= layout.world_size
    for state, said in (("T", "is stopped by a signal"), ("Z", "ended"), ("?", "did not begin")):
        readings[other] = replace(readings[other], state=state)
        found = diagnose(readings)
        assert found.culprits == (other,)
        assert found.sentence.startswith(f"rank {other} {said}")


@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 9))
def test_messages_are_followed_along_the_pipeline(stages: int, culprit: int, messages: int) -> None:
    """Forwards go up, backwards come down: whoever stops keeps both directions waiting."""
    culprit %= stages
    readings = []
    for rank in range(stages):
        before, after = Place("message", (rank - 1, rank)), Place("message", (rank, rank + 1))
        back = Place("message", (rank + 1, rank))
        counts = {before: messages - (rank > culprit), after: messages - (rank >= culprit), back: messages - 1}
        waiting = None
        if rank != culprit:
            waiting = Waiting("message", before if rank > culprit else back, messages)
        readings.append(Reading(rank, 1 + rank, "step", 3, "forward", rank, 0, waiting, counts))
    found = diagnose(readings)
    assert found.culprits == (culprit,)
    assert f"for it in the receive of a message from rank {culprit}" in found.sentence


def _waiting(rank: int, kind: Wait, place: Place | None, sequence: int, count: int, **more: object) -> Reading:
    counts = {} if place is None else {place: count}
    return replace(Reading(rank, 1 + rank, "save", 4, waiting=Waiting(kind, place, sequence), counts=counts), **more)  # type: ignore[arg-type]


def test_the_rank_that_still_writes_is_named() -> None:
    save = Place("save", (0, 1, 2))
    found = diagnose([_waiting(rank, "save", save, 4, 2 if rank == 1 else 4) for rank in range(3)])
    assert found.culprits == (1,)
    assert found.sentence == (
        "rank 1 hangs writing a checkpoint, in the save after step 4: "
        "ranks 0, 2 wait for it in the save of a checkpoint"
    )


def test_hosts_that_wait_for_their_devices_are_told_from_the_one_that_began_less() -> None:
    data = Place("data", (0, 1, 2))
    readings = [
        Reading(rank, 1 + rank, "step", 9, waiting=Waiting("device", None), counts={data: 30}) for rank in range(3)
    ]
    assert diagnose(readings).culprits == ()
    assert "a device or a link may be at fault" in diagnose(readings).sentence
    readings[2] = Reading(2, 3, "step", 9, "data", counts={data: 26})
    found = diagnose(readings)
    assert found.culprits == (2,)
    assert found.sentence == "rank 2 hangs in step 9, reading data: ranks 0–1 wait for it on the device"


def test_where_all_have_come_the_one_that_does_something_else_is_named() -> None:
    data = Place("data", (0, 1, 2))
    same = [_waiting(rank, "all-reduce", data, 3, 3, phase="step", call="73") for rank in range(3)]
    assert diagnose(same).culprits == ()
    for call in ("115", "running"):
        odd = [*same[:2], replace(same[2], call=call)]
        found = diagnose(odd)
        assert found.culprits == (2,)
        assert found.sentence.startswith("rank 2 hangs in step 4, in the all-reduce of the data-parallel ranks 0–2, to")
    assert diagnose([same[0], replace(same[1], call="115"), replace(same[2], call="98")]).culprits == ()
    behind = Waiting("all-reduce", Place("data", (0, 3)), 1)
    far = replace(same[0], rank=3, waiting=behind, counts={behind.place: 1} if behind.place else {})
    assert diagnose([*same, far]).culprits == (0, 1, 2), "one of them keeps another group waiting"
    assert diagnose([*same[:2], replace(same[2], call="115"), far]).culprits == (2,)
    pair = Place("tp", (0, 1))
    two = [_waiting(rank, "all-gather", pair, 3, 3, call="73") for rank in range(2)]
    assert diagnose([two[0], replace(two[1], call="running")]).culprits == (1,), "of two the one that computes"
    assert diagnose([two[0], replace(two[1], call="115")]).culprits == ()


def test_ranks_that_wait_in_a_circle_are_all_named() -> None:
    one, other = Place("tp", (0, 1)), Place("data", (0, 1))
    readings = [
        Reading(0, 1, "step", 2, waiting=Waiting("all-reduce", one, 1), counts={one: 1, other: 0}),
        Reading(1, 2, "step", 2, waiting=Waiting("all-reduce", other, 1), counts={one: 0, other: 1}),
        Reading(2, 3, "step", 2, waiting=Waiting("message", Place("message", (0, 2)), 1), counts={}),
    ]
    found = diagnose(readings)
    assert set(found.culprits) == {0, 1}
    assert found.sentence.startswith("ranks 0–1 wait for each other in a circle, in step 2")


def test_ranks_of_another_node_are_named_where_no_known_one_is_late() -> None:
    data = Place("data", (0, 1, 2, 3))
    known = [_waiting(rank, "all-reduce", data, 5, 5) for rank in (2, 3)]
    assert diagnose(known).culprits == (0, 1)
    merged = [*known, _waiting(0, "all-reduce", data, 5, 5), Reading(1, 2, "step", 4, "data", counts={data: 4})]
    assert diagnose(merged).culprits == (1,)


def test_who_has_finished_holds_nobody_up() -> None:
    readings = [Reading(0, 1, "finish", 9, state=""), Reading(1, 2, "finish", 9)]
    assert diagnose(readings).culprits == (1,)


@given(layouts, orders, st.integers(0, 12))
def test_nodes_can_show_their_readings_to_each_other(layout: Layout, order: list[str], collectives: int) -> None:
    for reading in stuck(layout, order, 0, collectives):
        full = replace(reading, learned={"step": Learned(3, 0.5, 0.75)}, spent={"step": 2.5})
        assert Reading.from_json(json.loads(json.dumps(full.as_json()))) == full


def test_thousands_of_ranks_are_judged_in_one_look() -> None:
    """All but one wait for it, in the tensor group, in the data groups of its stage or behind these; told as JSON, a
    rank takes as much room as in a small job."""
    ranks = 4096
    world = Place("world", tuple(range(ranks)))
    readings = [Reading(0, 10, "step", 5, "forward", counts={world: 7})]
    for rank in range(1, ranks):
        readings.append(Reading(rank, 10 + rank, "step", 5, waiting=Waiting("all-reduce", world, 8), counts={world: 8}))
    told = [json.dumps(reading.as_json()) for reading in readings]
    assert max(map(len, told)) < 2000
    assert [Reading.from_json(json.loads(text)) for text in told] == readings
    found = diagnose(readings)
    assert found.culprits == (0,)
    assert "ranks 1–4095 wait for it in the all-reduce of all ranks" in found.sentence
