"""The table [islands], fragments and homes, as data."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cuboid.errors import UserError
from cuboid.islands.membership import Membership
from cuboid.spec.island_homes import elements_of, homes, overlap, runs_of_blocks, stage_chunks
from cuboid.spec.islands import IslandsSpec, fragments_of
from cuboid.spec.run import Run, build_run, dump_run
from cuboid.verification.make import verification_run


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("bits=5", "use 4, 8, 16 or 32"),
        ("delay=32", "use delay=31 or less"),
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
    assert "[islands]\ncount = 3\nevery = 7" in dump_run(run)


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
            own = [sum(stop - first for _, (first, stop) in rank) for rank in homes(run, number, pipeline_rank)]
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
    told = {"round": 0, "left": [], "need": 2, "step": 0, "running": False}
    for number in range(2):
        members.join(number, "dp=1", [("host", 1)], told, 0.0)
    members.decide(0.0)
    for number in range(2):
        members.arrive(number, 0, 100, 0, 2)
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
    told: dict[str, object] = {"round": 0, "left": [], "need": 2, "step": 0, "running": False}
    for number in range(2):
        members.join(number, "dp=1", [("host", 1)], told, 0.0)
    members.decide(0.0)
    for round_ in range(2):
        members.arrive(1, round_, 100, 0, 2 * round_ + 2)
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
    members.arrive(0, 0, 80, 0, 2)
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
