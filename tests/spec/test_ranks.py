"""Ranks and coordinates are each other's inverse, and groups cover every rank exactly once."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.spec.layout import Layout
from cuboid.spec.ranks import Coordinates, coordinates, groups, rank_of

DEGREES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, dp=DEGREES, tp=DEGREES, pp=DEGREES, cp=DEGREES)


@given(LAYOUTS)
def test_coordinates_round_trip(layout: Layout) -> None:
    places = [coordinates(rank, layout) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [rank_of(place, layout) for place in places] == list(range(layout.world_size))


def test_tensor_is_innermost_and_pipeline_outermost() -> None:
    layout = Layout(dp=2, tp=2, pp=2, cp=2)
    assert coordinates(1, layout) == Coordinates(pp=0, dp=0, cp=0, tp=1)
    assert coordinates(2, layout) == Coordinates(pp=0, dp=0, cp=1, tp=0)
    assert coordinates(4, layout) == Coordinates(pp=0, dp=1, cp=0, tp=0)
    assert coordinates(8, layout) == Coordinates(pp=1, dp=0, cp=0, tp=0)


@given(LAYOUTS)
def test_groups_differ_in_their_own_coordinate_only(layout: Layout) -> None:
    for kind in ("tp", "cp", "dp", "pp"):
        for group in groups(layout)[kind]:
            places = [coordinates(rank, layout) for rank in group]
            assert [getattr(place, kind) for place in places] == list(range(getattr(layout, kind)))
            others = [name for name in ("tp", "cp", "dp", "pp") if name != kind]
            assert all(len({getattr(place, name) for place in places}) == 1 for name in others)


@given(LAYOUTS, st.integers(0, 3))
def test_every_kind_covers_every_rank_once(layout: Layout, zero: int) -> None:
    found = groups(layout.changed(zero=zero, ep=layout.tp))
    for kind in set(found) - {"embedding"}:
        assert sorted(rank for group in found[kind] for rank in group) == list(range(layout.world_size)), kind


def test_the_eight_rank_cube() -> None:
    found = groups(Layout(dp=2, tp=2, pp=2))
    assert found["tp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["dp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found["pp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["model"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert found["embedding"] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_hybrid_sharding_splits_the_data_groups() -> None:
    found = groups(Layout(dp=4, tp=2, zero=1, shard=2))
    assert found["shard"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found["replicate"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    whole = groups(Layout(dp=4, tp=2, zero=1))
    assert whole["shard"] == whole["dp"]
    assert groups(Layout(dp=4, tp=2))["replicate"] == whole["dp"]


def test_context_ranks_share_gradients_and_sharded_state() -> None:
    """They hold the same parameters and see other tokens, as replicas do."""
    found = groups(Layout(dp=4, tp=2, cp=2, zero=3, shard=2))
    assert found["data"] == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    assert found["shard"] == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert found["replicate"] == tuple((rank, rank + 8) for rank in range(8))
    plain = groups(Layout(dp=2, cp=2))
    assert plain["shard"] == ((0,), (1,), (2,), (3,))
    assert plain["replicate"] == plain["data"] == ((0, 1, 2, 3),)


def test_expert_groups_borrow_ranks_inside_a_stage() -> None:
    layout = Layout(dp=4, tp=2, pp=2, ep=4)
    assert groups(layout)["ep"] == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


def test_embedding_groups_exist_only_between_different_ranks() -> None:
    assert groups(Layout(dp=2))["embedding"] == ()
    assert groups(Layout(pp=4))["embedding"] == ((0, 3),)
    assert groups(Layout(pp=4, schedule="interleaved"))["embedding"] == ((0, 3),)
    assert groups(Layout(pp=4, schedule="zbv"))["embedding"] == ()


def test_thousands_of_ranks_are_cheap() -> None:
    layout = Layout(dp=128, tp=8, pp=16)
    found = groups(layout)
    assert {kind: (len(found[kind]), len(found[kind][0])) for kind in ("tp", "dp", "pp", "model")} == {
        "tp": (2048, 8),
        "dp": (128, 128),
        "pp": (1024, 16),
        "model": (128, 128),
    }
    assert layout.world_size == prod((128, 8, 16))


def test_places_outside_the_cuboid_are_refused() -> None:
    layout = Layout(dp=2, tp=2)
    with pytest.raises(UserError, match=r"rank=4 is outside dp=2,tp=2,pp=1; use rank=0 to rank=3"):
        coordinates(4, layout)
    with pytest.raises(UserError, match=r"coordinate dp=2 is outside dp=2,tp=2,pp=1; use dp=0 to dp=1"):
        rank_of(Coordinates(pp=0, dp=2, cp=0, tp=0), layout)
