"""Groups on nodes, and how collectives scale with size, group and nodes."""

from dataclasses import replace

import numpy as np
import pytest

from cuboid.cost.communication import (
    all_gather,
    all_reduce,
    all_to_all,
    bus_bandwidth,
    group,
    stage_transfer,
    transfer,
)
from cuboid.cost.constants import Fabric, Level, fabric_named
from cuboid.cost.inputs import Jobs, number

FABRIC = Fabric(name="test", inner_bandwidth=200e9, outer_bandwidth=20e9, inner_latency=0.0, outer_latency=0.0, node=8)


def test_groups_know_how_many_of_them_share_a_node() -> None:
    members = group(FABRIC, number([8, 16, 4, 2]), number([1, 1, 8, 4]))
    assert members.local.tolist() == [8, 8, 1, 2]
    assert members.nodes.tolist() == [1, 2, 4, 1]


def test_a_ring_inside_a_node_runs_at_the_inner_links() -> None:
    members = group(FABRIC, number(8), number(1))
    assert float(all_reduce(FABRIC, number(1e9), members)) == pytest.approx(2 * 7 / 8 * 1e9 / 200e9)
    assert float(all_gather(FABRIC, number(1e9), members)) == pytest.approx(7 / 8 * 1e9 / 200e9)


def test_ranks_on_one_node_add_up_their_ports() -> None:
    whole = group(FABRIC, number(16), number(1))
    single = group(FABRIC, number(2), number(8))
    assert float(bus_bandwidth(FABRIC, "all_reduce", whole)) == pytest.approx(8 * 20e9)
    assert float(bus_bandwidth(FABRIC, "all_reduce", single)) == pytest.approx(20e9)


def test_without_a_switch_a_group_inside_a_node_has_the_links_between_its_members() -> None:
    mesh = replace(FABRIC, node=4, inner_bandwidth=150e9, mesh=True)
    reached = bus_bandwidth(mesh, "all_reduce", group(mesh, number([2, 3, 4]), number(1)))
    assert reached.tolist() == pytest.approx([50e9, 100e9, 150e9])
    assert float(transfer(mesh, number(1e9), number(0))) == pytest.approx(1e9 / 50e9)
    assert float(transfer(mesh, number(1e9), number(1))) == pytest.approx(1e9 / 20e9)
    # Rings that leave the node are as fast as its ports, as with a switch.
    apart = group(mesh, number(8), number(2))
    assert float(bus_bandwidth(mesh, "all_reduce", apart)) == pytest.approx(2 * 20e9)


def test_a_group_of_one_costs_nothing() -> None:
    alone = group(FABRIC, number(1), number(1))
    assert float(all_reduce(FABRIC, number(1e9), alone)) == 0
    assert float(all_gather(FABRIC, number(1e9), alone)) == 0
    assert float(all_to_all(FABRIC, number(1e9), alone, number(0))) == 0


def test_bandwidth_falls_with_nodes_where_the_fabric_says_so() -> None:
    fabric = Fabric(name="test", inner_bandwidth=1e12, outer_bandwidth=20e9, decay=0.5)
    two, eight = (bus_bandwidth(fabric, "all_reduce", group(fabric, number(8 * n), number(1))) for n in (2, 8))
    assert float(two) == pytest.approx(2 * float(eight))


def test_the_measured_curve_of_the_playbook_is_used() -> None:
    fabric = fabric_named("playbook")
    four = group(fabric, number(32), number(1))
    assert float(bus_bandwidth(fabric, "all_reduce", four)) == pytest.approx(160e9)
    # Between four and eight nodes it is interpolated; beyond the last point it stays.
    six = float(bus_bandwidth(fabric, "all_reduce", group(fabric, number(48), number(1))))
    assert 99.6e9 < six < 160e9
    far = float(bus_bandwidth(fabric, "all_reduce", group(fabric, number(8 * 512), number(1))))
    assert far == pytest.approx(32.9e9)


def test_partial_groups_reach_less() -> None:
    fabric = Fabric(name="test", inner_bandwidth=1e12, outer_bandwidth=10e9, partial=0.25)
    partial = group(fabric, number(8), number(4))
    assert partial.local.tolist() == 2
    assert float(bus_bandwidth(fabric, "all_reduce", partial)) == pytest.approx(0.25 * 2 * 10e9)


def test_all_to_all_waits_for_the_slower_of_inside_and_outside() -> None:
    members = group(FABRIC, number(16), number(1))
    little = float(all_to_all(FABRIC, number(1e9), members, number(0)))
    much = float(all_to_all(FABRIC, number(1e9), members, number(5e8)))
    assert little == pytest.approx(1e9 * 7 / 16 / 200e9)
    assert much == pytest.approx(5e8 / 20e9)


def test_transfers_take_the_link_they_cross() -> None:
    inside, outside = transfer(FABRIC, number(1e8), number([0, 1]))
    assert (inside, outside) == (pytest.approx(1e8 / 200e9), pytest.approx(1e8 / 20e9))


def test_more_bytes_never_take_less_time() -> None:
    members = group(FABRIC, number(64), number(2))
    times = all_reduce(FABRIC, np.linspace(0, 1e10, 20), members)
    assert np.all(np.diff(times) >= 0)


def test_every_level_that_a_group_crosses_counts() -> None:
    """Nodes of 8, leaves of 4 nodes, and a spine with a quarter of the bandwidth."""
    spine = Level(32, 5e9, 1e-3)
    fabric = replace(FABRIC, outer_latency=1e-4, further=(spine,))
    inside, whole, single = (group(fabric, number(size), number(step)) for size, step in ((32, 1), (64, 1), (8, 8)))
    assert float(bus_bandwidth(fabric, "all_gather", inside)) == pytest.approx(8 * 20e9)
    assert float(bus_bandwidth(fabric, "all_gather", whole)) == pytest.approx(min(8 * 20e9, 32 * 5e9))
    narrow = replace(fabric, further=(replace(spine, bandwidth=1e9),))
    assert float(bus_bandwidth(narrow, "all_gather", whole)) == pytest.approx(32 * 1e9)
    assert float(bus_bandwidth(narrow, "all_gather", single)) == pytest.approx(4 * 1e9)
    # Of seven hops between eight nodes one crosses the spine.
    empty = float(all_gather(fabric, number(1e-9), single))
    assert empty == pytest.approx(6 * 1e-4 + 1e-3)
    # Half of what leaves a node leaves the leaf.
    outside = number(7e9)
    assert float(all_to_all(narrow, number(8e9), single, outside)) == pytest.approx(4e9 / 1e9 + 6e-4 + 1e-3)


def test_a_stage_whose_neighbour_is_beyond_a_level_waits_for_it() -> None:
    fabric = replace(FABRIC, further=(Level(16, 2e9, 0.0),))
    jobs = Jobs.make(pp=4, dp=8, global_batch=8, sequence=8)
    # Each of the three hops leaves a node; the one in the middle leaves the leaf of two nodes.
    assert float(stage_transfer(fabric, number(1e9), jobs)) == pytest.approx(2 / 3 / 20 + 1 / 3 / 2)
    assert float(stage_transfer(FABRIC, number(1e9), replace(jobs, dp=number(2)))) == pytest.approx(1 / 200)
