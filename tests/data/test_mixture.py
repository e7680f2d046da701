"""Mixtures: each source has its weight of any number of positions, to less than one sample, and its own order."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuboid.data.mixture import Pattern
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.spec.run import Run, build_run
from tests.data.corpora import make_store


@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=9))
@example(weights=[1, 1000])
@example(weights=[997, 1, 1, 1])
@example(weights=[1] * 9)
def test_every_stretch_from_the_start_has_its_shares(weights: list[int]) -> None:
    pattern, total = Pattern(weights), sum(weights)
    counts = [0] * len(weights)
    for position in range(2 * pattern.period + 3):
        source, before = pattern.at(position)
        assert before == counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count * total - weight * (position + 1)) < total


@given(
    weights=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    periods=st.integers(0, 1 << 50),
    place=st.integers(0, 100),
)
def test_far_positions_need_no_past(weights: list[int], periods: int, place: int) -> None:
    pattern = Pattern(weights)
    near, far = pattern.at(place), pattern.at(place + periods * pattern.period)
    share = [pattern.at(position)[0] for position in range(pattern.period)].count(near[0])
    assert far == (near[0], near[1] + periods * share)


def test_weights_are_the_decimals_that_were_written() -> None:
    assert Pattern([0.7, 0.2, 0.1]).period == 10
    assert Pattern([0.1, 0.1, 0.1]).period == 3
    assert Pattern([7, 2, 1]).period == Pattern([70.0, 20.0, 10.0]).period == 10
    assert Pattern([5.0]).period == 1


def test_weights_without_a_short_period_are_refused_with_rounder_ones() -> None:
    with pytest.raises(UserError, match=r"use rounder ones, like 0.5556, 0.4444") as caught:
        Pattern([123456789, 98765431])
    assert "123456789, 98765431" in str(caught.value)


def test_all_of_every_source_is_met_after_so_many_positions() -> None:
    pattern = Pattern([3, 1])
    needed = pattern.positions([7, 5])
    met = [pattern.at(position) for position in range(needed)]
    assert {(0, index) for index in range(7)} | {(1, index) for index in range(5)} <= set(met)


def make_run(folder: Path, weights: dict[str, float], *overrides: str) -> Run:
    mixture = {str(folder / name): weight for name, weight in weights.items()}
    table = {"model": "tiny-llama", "data": {"mixture": mixture}, "training": {"sequence": 8}}
    return build_run(table, overrides)


def test_a_mixture_of_stores_trains_on_each_in_its_own_order(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        make_store(tmp_path / name, [letter * 8 * (12 if letter == "a" else 5)])
    source = make_source(make_run(tmp_path, {"a": 0.75, "b": 0.25}, "training.seed=9"))
    letters = ["ab"[int(source.at(position)[0][0]) - ord("a")] for position in range(400)]
    assert letters.count("a") == 300
    # The epochs of one source do not wait for those of the other.
    alone = make_source(
        build_run({"model": "tiny-llama"}, [f"data.source={tmp_path / 'b'}", "training.seed=9", "training.sequence=8"])
    )
    places = [position for position, letter in enumerate(letters) if letter == "b"]
    assert all(source.at(place)[0].equal(alone.at(number)[0]) for number, place in enumerate(places))
    assert all(later - earlier == 4 for earlier, later in pairwise(places))


def test_a_mixture_meets_every_sample_of_each_source_once_in_an_epoch(tmp_path: Path) -> None:
    texts = {
        "a": "".join(chr(33 + index) * 8 for index in range(30)),
        "b": "".join(chr(65 + index) * 8 for index in range(20)),
    }
    for name, text in texts.items():
        make_store(tmp_path / name, [text])
    source = make_source(make_run(tmp_path, {"a": 3, "b": 2}))
    met = [bytes(source.at(position)[0].tolist()) for position in range(50)]
    assert sorted(met) == sorted(letter.encode() * 8 for text in texts.values() for letter in text[::8])
    again = [bytes(source.at(position)[0].tolist()) for position in range(50, 100)]
    assert sorted(again) == sorted(met) and again != met


def test_mixtures_that_make_no_sense_are_refused() -> None:
    for data, sentence in (
        ({"mixture": {}}, "names no source"),
        ({"mixture": {"a": 0.0}}, r"data.mixture.a=0.0 is no weight; use a number above 0"),
        ({"mixture": {"a": 1.0}, "source": "b"}, "data.source=b and data.mixture both name sources"),
        ({"mixture": {"a": "x"}}, "data.mixture.a="),
    ):
        with pytest.raises(UserError, match=sentence):
            build_run({"model": "tiny-llama", "data": data})
