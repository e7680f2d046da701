"""Context parallelism by method: what is hidden, what is moved, what is held."""

import numpy as np
import pytest

from cuboid.cost.compute import kernels
from cuboid.cost.constants import Engine, Fabric, engine_for
from cuboid.cost.estimate import machine_of
from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.layers import Widths, further_blocks, gathered_bytes, waiting
from cuboid.spec.cluster import load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

FABRIC = Fabric(name="test", inner_bandwidth=200e9, outer_bandwidth=20e9, inner_latency=0.0, outer_latency=0.0, node=8)
MACHINE = machine_of(load_cluster("h100x8"))
ENGINE: Engine = engine_for("cuboid", MACHINE.chip)
SHAPE = Shape.of(load_model("llama3-8b"))


def jobs(*layouts: str, sequence: int = 131072) -> Jobs:
    return Jobs.of([Layout.parse(text) for text in layouts], global_batch=8, sequence=sequence)


def seconds(fabric: Fabric, work: Jobs) -> tuple[np.ndarray, np.ndarray]:
    parts = kernels(SHAPE, work, MACHINE.chip, ENGINE, "bf16")
    return waiting(ENGINE, fabric, SHAPE, work, (parts.attention_forward, parts.attention_backward)).seconds


def test_what_a_token_has_on_a_rank() -> None:
    """32 query heads and 8 for keys and values, of 128; repeated where more ranks trade heads than there are."""
    work = jobs("cp=8", "cp=8,cp_method=ulysses", "cp=16,cp_method=ulysses", "cp=8,tp=2,cp_method=ulysses")
    widths = Widths.of(SHAPE, work)
    assert widths.query.tolist() == [4096, 4096, 4096, 2048]
    assert widths.keys.tolist() == [2048, 2048, 4096, 2048]


def test_exchanges_by_hand() -> None:
    work = jobs("cp=8,cp_method=allgather", "cp=8,cp_method=ulysses")
    forward, backward = seconds(FABRIC, work)
    tokens = 131072 / 8
    assert forward[0] == pytest.approx(7 * 2 * tokens * 2048 / 200e9)
    assert backward[0] == pytest.approx(2 * forward[0]), "gathered again, and their gradients scattered"
    assert forward[1] == pytest.approx(7 / 8 * 2 * tokens * (4096 + 2048 + 4096) / 200e9)
    assert backward[1] == pytest.approx(forward[1])


def test_a_ring_hides_behind_long_sequences_only() -> None:
    gathered, ring = (seconds(FABRIC, jobs(f"cp=8,cp_method={name}"))[0][0] for name in ("allgather", "ring"))
    assert ring == pytest.approx((1 - ENGINE.context_overlap) * gathered)
    work = jobs("cp=8", "cp=8,cp_method=allgather", sequence=2048)
    slow = Fabric(name="slow", inner_bandwidth=1e8, outer_bandwidth=1e8, inner_latency=0.0, outer_latency=0.0, node=8)
    forward, _ = seconds(slow, work)
    assert forward[0] > 0.95 * forward[1], "short attention hides next to nothing"


def test_heads_inside_a_node_and_a_ring_between_spare_the_slow_links() -> None:
    methods = ("ring", "ulysses", "allgather", "hybrid,cp_inner=8")
    slow = Fabric(name="two", inner_bandwidth=200e9, outer_bandwidth=1e9, inner_latency=0.0, outer_latency=0.0, node=8)
    forward, _ = seconds(slow, jobs(*(f"cp=16,cp_method={method}" for method in methods), sequence=16384))
    assert int(np.argmin(forward)) == 3


def test_a_ring_leaves_a_node_by_one_port() -> None:
    """Its messages go from neighbour to neighbour; a gather has the ports of all ranks on the node."""
    slow = Fabric(name="two", inner_bandwidth=200e9, outer_bandwidth=1e9, inner_latency=0.0, outer_latency=0.0, node=8)
    work = jobs("cp=16,cp_method=allgather", "cp=16", sequence=2048)
    gathered, ring = seconds(slow, work)[0]
    assert ring > 7 * gathered


def test_blocks_and_gathered_keys() -> None:
    work = jobs("cp=1", "cp=8", "cp=8,cp_method=ulysses", "cp=8,cp_method=allgather", "cp=8,cp_method=hybrid")
    assert further_blocks(work).tolist() == [0, 7, 0, 3, 1]
    held = gathered_bytes(SHAPE, work, ENGINE)
    assert held.tolist() == [0, 0, 0, 2 * 2 * 131072 * 2048, 0]
