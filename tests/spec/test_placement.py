"""Layouts on clusters: what sits on a node, and which links each kind of group crosses."""

import pytest

from cuboid.errors import UserError
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.placement import TensorRow, node_rows, stage_nodes, traffic


def links(layout: Layout, cluster: str, *, tied: bool = True) -> dict[str, dict[str, int]]:
    return {line.kind: line.tiers for line in traffic(layout, load_cluster(cluster), tied=tied)}


def test_a_node_holds_its_ranks_by_tensor_group() -> None:
    layout, cluster = Layout(dp=2, tp=2, pp=4), load_cluster("h100x16")
    assert node_rows(layout, cluster, 1) == [
        TensorRow(2, 0, 0, (8, 9)),
        TensorRow(2, 1, 0, (10, 11)),
        TensorRow(3, 0, 0, (12, 13)),
        TensorRow(3, 1, 0, (14, 15)),
    ]


def test_a_tensor_group_may_span_nodes() -> None:
    layout, cluster = Layout(tp=16), load_cluster("h100x16")
    assert [node_rows(layout, cluster, node)[0].ranks for node in (0, 1)] == [tuple(range(8)), tuple(range(8, 16))]
    assert links(layout, "h100x16") == {"tp": {"infiniband-ndr": 1}}


def test_every_rank_sits_on_one_node() -> None:
    layout, cluster = Layout(dp=6, tp=3, cp=2, pp=2), load_cluster("gb200x72")
    rows = [row for node in range(cluster.nodes) for row in node_rows(layout, cluster, node)]
    assert [rank for row in rows for rank in row.ranks] == list(range(72))


def test_pipeline_ranks_fill_ranges_of_nodes() -> None:
    layout, cluster = Layout(dp=4, tp=8, pp=4), load_cluster("h100x128")
    assert [stage_nodes(layout, cluster, rank) for rank in range(4)] == [(0, 3), (4, 7), (8, 11), (12, 15)]


def test_pipeline_traffic_is_counted_by_hops() -> None:
    assert links(Layout(dp=2, tp=2, pp=4), "h100x16")["pp"] == {"nvlink4": 8, "infiniband-ndr": 4}
    interleaved = Layout(dp=2, tp=2, pp=4, schedule="interleaved")
    assert links(interleaved, "h100x16")["pp"] == {"nvlink4": 8, "infiniband-ndr": 8}, (
        "the last rank sends to the first"
    )
    assert links(Layout(dp=2, tp=2, pp=4, schedule="zbv"), "h100x16")["pp"] == {"nvlink4": 8, "infiniband-ndr": 4}


def test_kinds_appear_only_where_they_communicate() -> None:
    assert list(links(Layout(dp=8), "h100x8")) == ["data"]
    assert list(links(Layout(dp=2, tp=2, pp=2), "h100x8")) == ["tp", "pp", "data", "embedding"]
    assert list(links(Layout(dp=2, tp=2, pp=2), "h100x8", tied=False)) == ["tp", "pp", "data"]
    assert list(links(Layout(dp=4, ep=4, cp=2), "h100x8")) == ["cp", "ep", "data"]
    assert links(Layout(), "cpux1") == {}


def test_hybrid_sharding_shows_both_halves() -> None:
    layout = Layout(dp=16, zero=3, shard=8)
    assert links(layout, "h100x16") == {"shard": {"nvlink4": 2}, "replicate": {"infiniband-ndr": 8}}
    carries = {line.kind: line.carries for line in traffic(Layout(dp=16, zero=3), load_cluster("h100x16"))}
    assert carries == {"data": "sharded state"}


def test_the_slowest_tier_comes_with_its_numbers() -> None:
    (line,) = traffic(Layout(dp=16), load_cluster("h100x16"))
    assert (line.size, line.slowest.name, line.slowest.bandwidth) == (16, "infiniband-ndr", 50.0)


def test_the_layout_must_fill_the_cluster() -> None:
    with pytest.raises(UserError, match=r"^dp=2 × tp=2 needs world_size=4, not 16; use dp=8 or start 4 ranks$"):
        traffic(Layout(dp=2, tp=2), load_cluster("h100x16"))
