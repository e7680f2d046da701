"""The table [islands], fragments and owners, as data."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence

import pytest

from cuboid.errors import UserError
from cuboid.islands.batches import Batches
from cuboid.islands.membership import Membership
from cuboid.launch.islands import IslandOptions
from cuboid.spec.block_owners import elements_of, overlap, owned_blocks, runs_of_blocks, stage_chunks
from cuboid.spec.islands import IslandsSpec, fragments_of
from cuboid.spec.run import Run, build_run, dump_run
from cuboid.verification.make import verification_run


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("bits=5", "use 4, 8, 16 or 32"),
        ("delay=32", "use delay=31 or less"),
        ("ramp_steps=8", "use ramp_steps=256, or 0"),
        ("ramp_rate=0", "use ramp_rate=1, at most 10"),
        ("momentum=1", "below 1"),
        ("mix=0", "at most 1"),
        ("quorum=3", "more than count=2"),
        ("fragments=9", "use fragments=6 or less"),
    ],
)
def test_what_cannot_work_is_refused_by_name(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_run({"model": "tiny-llama"}, ["islands.count=2", "model.layers=4", f"islands.{setting}"])


def test_what_islands_have_not_is_refused() -> None:
    with pytest.raises(UserError, match="batch_ramp=8x2 is not for islands"):
        build_run({"model": "tiny-llama"}, ["islands.count=2", "training.batch_ramp=8x2"])


def test_the_table_round_trips() -> None:
    run = build_run({"model": "tiny-llama", "islands": {"count": 3, "every": 7, "bits": 4}})
    assert '[islands]\ncount = 3\nbatch_weights = ""\nevery = 7' in dump_run(run)


def test_every_fragment_has_a_round_in_each_interval_and_one_at_the_end() -> None:
    source = random.Random(7)
    for _ in range(200):
        every, fragments, steps = source.randint(1, 12), source.randint(1, 7), source.randint(1, 40)
        spec = IslandsSpec(count=2, every=every, fragments=fragments, delay=source.randrange(every))
        rounds = [(step, each) for step in range(1, steps + 1) for each in spec.rounds_due(step, steps)]
        assert [each for _, each in rounds] == list(range(len(rounds)))
        assert all(spec.due(each, steps) == step for step, each in rounds)
        assert all(step <= spec.applied(each, steps) <= steps for step, each in rounds)
        last = [spec.fragment_of(each) for step, each in rounds if step == steps]
        assert sorted(last) == list(range(fragments))
        for fragment in range(fragments):
            own = [step for step, each in rounds if spec.fragment_of(each) == fragment and step < steps]
            assert all(later - sooner in (every - 1, every, every + 1) for sooner, later in itertools.pairwise(own))


def test_distances_grow_over_the_ramp() -> None:
    spec = IslandsSpec(count=2, every=8, ramp_steps=16, ramp_rate=1.5)
    rounds = [step for step in range(1, 41) if spec.rounds_due(step, 100)]
    assert rounds == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    assert [spec.outer_optimizer(each) for each in (0, 6, 7)] == [(1.5, 0.0), (1.5, 0.0), (1.0, 0.5)]
    source = random.Random(5)
    for _ in range(200):
        every, fragments, steps = source.randint(1, 40), source.randint(1, 7), source.randint(1, 300)
        ramp = source.randint(every, 200)
        spec = IslandsSpec(count=2, every=every, ramp_steps=ramp, fragments=fragments, delay=source.randrange(every))
        found = [(step, each) for step in range(1, steps + 1) for each in spec.rounds_due(step, steps)]
        assert [each for _, each in found] == list(range(len(found)))
        assert all(spec.due(each, steps) == step <= spec.applied(each, steps) for step, each in found)
        # A result is applied before the fragment is sent again.
        pairs = zip(found, found[fragments:], strict=False)
        assert all(spec.applied(each, steps) <= later for (_, each), (later, _) in pairs)


def test_fragments_hold_every_parameter_once_and_are_even() -> None:
    run = build_run({"model": "llama3-8b"})
    found = fragments_of(run.model, 8)
    names = [tensor.name for fragment in found for tensor in fragment.tensors]
    assert len(names) == len(set(names)) and sum(each.elements for each in found) == run.model.parameters
    sizes = [fragment.elements for fragment in found]
    assert max(sizes) < 1.3 * min(sizes)


LAYOUTS = [
    ("tiny-llama", "tp=4,dp=2,zero=2,sequence_parallel=false"),
    ("tiny-llama", "dp=3,pp=2,zero=3,schedule=zbv"),
    ("tiny-gpt2", "tp=2,pp=2,cp=2,zero=1"),
    ("tiny-deepseek", "dp=4,ep=2,zero=1,shard=2"),
    ("tiny-mixtral", "dp=2,tp=2,ep=2,zero=1"),
]


def _run(model: str, layout: str) -> Run:
    return verification_run(layout, model, ("islands.count=2", "islands.fragments=3", "islands.every=3"))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_every_block_has_one_home_that_gets_all_of_it(model: str, layout: str) -> None:
    run = _run(model, layout)
    for number, fragment in enumerate(fragments_of(run.model, 3)):
        held = [block for rank in range(run.layout.world_size) for block in _blocks(runs_of_blocks(run, number, rank))]
        assert sorted(held) == list(range(fragment.blocks))
        for pipeline_rank in range(run.layout.pp):
            own = [sum(stop - first for _, (first, stop) in rank) for rank in owned_blocks(run, number, pipeline_rank)]
            assert max(own) - min(own) <= 8
            for chunk in stage_chunks(run, number, pipeline_rank):
                first, stop = elements_of(chunk.tensor, chunk.blocks)
                places = [place for span in chunk.matrix.spans for place in range(span.place, span.place + span.size)]
                assert sorted(places) == list(range(stop - first))
                assert all(span.sender in span.ranks for span in chunk.matrix.spans)


def _blocks(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [block for first, stop in runs for block in range(first, stop)]


def test_overlaps_are_what_both_have() -> None:
    source = random.Random(3)
    for _ in range(300):
        sides = []
        for _ in range(2):
            places = sorted(source.sample(range(40), 2 * source.randint(0, 6)))
            sides.append([(places[each], places[each + 1]) for each in range(0, len(places), 2)])
        found = overlap(*sides)
        assert _blocks(tuple(found)) == sorted(set(_blocks(tuple(sides[0]))) & set(_blocks(tuple(sides[1]))))


def test_bytes_of_a_block() -> None:
    sizes = {bits: IslandsSpec(bits=bits).block_bytes("float32") for bits in (32, 16, 8, 4)}
    assert sizes == {32: 1024, 16: 512, 8: 260, 4: 132}
    assert math.isclose(sizes[4] * 8 / 256, 4.125)


def test_a_round_continues_without_an_island_that_was_lost_and_is_back_already() -> None:
    members = Membership(IslandsSpec(count=2, every=2, grace_seconds=60.0), 20)
    told = {"round": 0, "left": [], "taken": 0, "need": 2, "running": False}
    for number in range(2):
        members.join(number, "dp=1", [("host", 1)], told, 0.0)
    members.decide(0.0)
    for number in range(2):
        members.arrive(number, 0, 100, 2)
    members.decide(1.0)
    assert members.rounds[0].members == {0: 100, 1: 100} and not members.rounds[0].committed
    members.lose(1, 1.5)
    members.join(1, "dp=1", [("host", 2)], told, 1.6)
    members.decide(1.7)
    assert members.rounds[0].members == {0: 100}
    members.have(0, 0, members.rounds[0].version)
    members.decide(1.8)
    assert members.rounds[0].committed and members.islands[1].round > 0


def alone(quorum: int = 1) -> tuple[Membership, dict[str, object]]:
    """Two islands, of which the second has closed the first two rounds by itself and is gone."""
    members = Membership(IslandsSpec(count=2, every=2, grace_seconds=1.0, quorum=quorum), 20)
    told: dict[str, object] = {"round": 0, "left": [], "taken": 0, "need": 2, "running": False}
    for number in range(2):
        members.join(number, "dp=1", [("host", 1)], told, 0.0)
    members.decide(0.0)
    for round_ in range(2):
        members.arrive(1, round_, 100, 2 * round_ + 2)
        members.decide(3.0 * round_ + 1)
        members.decide(3.0 * round_ + 2.5)
        members.have(1, round_, members.rounds[round_].version)
        members.decide(3.0 * round_ + 2.6)
        assert members.rounds[round_].committed and members.rounds[round_].members == {1: 100}
    members.lose(1, 6.0)
    return members, told


def test_rounds_that_nobody_left_has_are_open_again() -> None:
    members, told = alone()
    before = {number: found.version for number, found in members.rounds.items()}
    members.arrive(0, 0, 80, 2)
    members.decide(6.5)
    assert members.next == 2, "it may still be back"
    members.decide(7.5)
    assert members.next == 1 and members.rounds[0].members == {0: 80} and not members.rounds[1].closed
    assert all(members.rounds[number].version > version for number, version in before.items())
    said = {number: {"members": {1: 100}, "committed": True} for number in (0, 1)}
    assert members.is_apart(1, {**told, "running": True, "round": 2, "rounds": said})
    assert not members.is_apart(1, told), "it starts again"


def test_islands_that_have_all_started_again_begin_from_what_they_have_kept() -> None:
    members, told = alone()
    for number in range(2):
        members.join(number, "dp=1", [("host", 1)], {**told, "round": 1 - number}, 6.1)
    members.decide(6.2)
    members.decide(6.3)
    assert members.begun and members.next == 1 and members.islands[0].settled and not members.islands[1].settled


def members_of(count: int, **table: object) -> Membership:
    """So many islands that have begun together, and take two batches to a round."""
    members = Membership(IslandsSpec(count=count, every=2, grace_seconds=1.0, **table), 40)  # type: ignore[arg-type]
    for number in range(count):
        members.join(
            number, "dp=1", [("host", 1)], {"round": 0, "left": [], "taken": 0, "need": 2, "running": False}, 0.0
        )
    members.decide(0.0)
    return members


def commit(members: Membership, round_: int, there: Sequence[int], now: float) -> None:
    for number in there:
        members.arrive(number, round_, 100, 2 * round_ + 2)
    members.decide(now)
    for number in there:
        members.have(number, round_, members.rounds[round_].version)
    members.decide(now + 0.1)
    assert members.rounds[round_].committed and set(members.rounds[round_].members) == set(there)


def test_batches_of_a_lost_island_go_to_the_others() -> None:
    """Also those of a round that was closed with it, but not committed."""
    members = members_of(3)
    commit(members, 0, range(3), 0.1)
    for number in range(3):
        members.arrive(number, 1, 100, 4)
    members.decide(0.2)
    members.lose(2, 0.3)
    members.decide(0.4)
    assert members.rounds[1].members.keys() == {0, 1}
    for number in range(2):
        members.have(number, 1, members.rounds[1].version)
    members.decide(0.5)
    members.decide(2.0)
    trained = {batch for number in (0, 1) for batch in members.islands[number].told[-1].batches}
    trained |= {0, 1, 2, 3, 4, 5}  # of the first round, all three
    granted = [batch for island in members.islands.values() for batch in island.queue]
    left = trained | set(granted) | set(members.returned)
    assert left == set(range(members.fresh)), "every batch is trained on, granted, or waits"
    assert len(members.returned) == 4, "what the third one had for the rounds 1 and 2"
    commit(members, 2, (0, 1), 2.1)
    assert not len(members.returned) and members.fresh == 18


def test_an_island_that_was_away_continues_if_nobody_has_taken_its_batches() -> None:
    for others_continue in (False, True):
        members = members_of(2)
        commit(members, 0, range(2), 0.1)
        queue = list(members.islands[1].queue.runs)
        said = {"round": 1, "left": queue, "taken": 2, "running": True, "rounds": {}}
        members.lose(1, 0.2)
        members.decide(3.0)
        assert 1 not in members.islands and len(members.returned) == 2
        if others_continue:
            commit(members, 1, (0,), 3.1)
        assert members.is_apart(1, said) == others_continue
        if not others_continue:
            members.join(1, "dp=1", [("host", 1)], said, 3.2)
            assert not len(members.returned) and members.islands[1].queue.runs == queue


def test_a_beginning_without_enough_islands_is_given_up() -> None:
    members = Membership(IslandsSpec(count=3, quorum=2, grace_seconds=1.0), 40)
    told = {"round": 0, "left": [], "taken": 0, "need": 2, "running": False}
    members.join(0, "dp=1", [("host", 1)], told, 0.0)
    members.decide(5.0)
    assert not members.waits_in_vain(5.0, 600.0)
    assert "only 1 of islands.count=3 came within 601 s, and islands.quorum=2" in members.waits_in_vain(601.0, 600.0)
    members.join(1, "dp=1", [("host", 1)], told, 602.0)
    members.decide(602.0)
    assert members.begun and not members.waits_in_vain(1300.0, 600.0)


@pytest.mark.parametrize(
    ("island", "places", "settings", "sentence"),
    [
        (2, "a:1", ["count=2"], "island=2 is none of islands.count=2; use island=0 to island=1, or a larger"),
        (0, "a:1,b:1", ["count=2"], "islands.quorum=1 of count=2 lets two halves .* use islands.quorum=2, or one"),
        (0, None, ["count=2"], "needs --islands-rendezvous"),
        (0, "a:1", ["count=1"], "has no islands"),
    ],
)
def test_islands_that_cannot_meet_are_refused(
    island: int, places: str | None, settings: list[str], sentence: str
) -> None:
    run = build_run({"model": "tiny-llama"}, [f"islands.{each}" for each in settings])
    with pytest.raises(UserError, match=sentence):
        IslandOptions(island=island, rendezvous=places).check(run)


@pytest.mark.parametrize("ahead", [False, True])
def test_fewer_islands_resume_without_a_gap(ahead: bool) -> None:
    """From a state after round 0; one of three does not come back, which may have been further already."""
    members = members_of(3)
    commit(members, 0, range(3), 0.1)
    if ahead:
        members.arrive(2, 1, 100, 4)
        members.decide(0.2)
    state = json.loads(json.dumps(members.state()))
    left = {number: list(members.islands[number].queue.runs) for number in (0, 1)}
    again = Membership(IslandsSpec(count=2, every=2), 40)
    for number in (0, 1):
        said = {"round": 1, "left": left[number], "taken": 0, "need": 1, "running": False, "state": state}
        again.join(number, "dp=1", [("host", 1)], said, 0.0)
    again.decide(0.0)
    granted = [batch for island in again.islands.values() for batch in island.queue]
    assert sorted(granted + list(again.returned)) == list(range(6, again.fresh)), "the first six are trained on"


def test_runs_of_batches_are_claimed_whole_or_not_at_all() -> None:
    runs = Batches([(0, 2, 5), (20, 1, 1)])
    assert not runs.claim(Batches([(4, 1, 2)])) and list(runs) == [0, 2, 4, 6, 8, 20]
    assert runs.claim(Batches([(4, 16, 2)])) and list(runs) == [0, 2, 6, 8]
