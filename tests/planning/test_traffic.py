"""Bytes and links of every dimension, by hand."""

from collections.abc import Callable

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.explain import framework
from cuboid.planning.plan import Plan
from cuboid.planning.question import Question
from cuboid.planning.traffic import Moved, moved, sent
from cuboid.spec.layout import Layout


@pytest.fixture
def plan(ask: Callable[..., Question]) -> Callable[..., Plan]:
    def make(layout: str, model: str = "llama3-70b", cluster: str = "h100x64") -> Plan:
        return predict(ask(model, cluster, global_batch=64, sequence=4096), Layout.parse(layout))

    return make


def by_dimension(plan: Plan) -> dict[str, Moved]:
    return {entry.dimension: entry for entry in moved(plan)}


def test_full_recomputation_repeats_the_sums_forward(plan: Callable[..., Plan]) -> None:
    plain = by_dimension(plan("dp=4,tp=8,pp=2,zero=1"))["tp"]
    again = by_dimension(plan("dp=4,tp=8,pp=2,zero=1,recompute=full"))["tp"]
    # All but the last: two gathers and one scatter beside four of each.
    assert again.bytes == pytest.approx(11 / 8 * plain.bytes, rel=0.01)
    assert plain.formulas[0].endswith("2 bytes × 4,096 tokens × 8,192 × (8−1)/8")


def test_tensor_traffic_by_hand(plan: Callable[..., Plan]) -> None:
    made = plan("dp=4,tp=8,pp=2,micro_batch=2")
    layers = max(made.layers)
    entry = by_dimension(made)["tp"]
    activations = [part for part in entry.parts if part.what.startswith("layer")]
    assert sum(map(sent, activations)) == pytest.approx(8 * layers * 4 * 2 * 7 / 8 * 2 * (2 * 4096) * 8192)
    assert entry.bytes == pytest.approx(sum(map(sent, activations)), rel=0.05), "the rest is one embedding or head"
    assert entry.tier.name == "nvlink4"
    assert entry.seconds == pytest.approx(entry.bytes / 450e9)


def test_tensor_groups_wider_than_a_node_use_the_network(plan: Callable[..., Plan]) -> None:
    assert by_dimension(plan("dp=4,tp=16,pp=1,zero=1"))["tp"].tier.name == "infiniband-ndr"
    assert by_dimension(plan("dp=8,tp=4,pp=2,zero=1"))["tp"].tier.name == "nvlink4"


def test_more_virtual_stages_send_more(plan: Callable[..., Plan]) -> None:
    plain = by_dimension(plan("dp=2,tp=8,pp=4"))["pp"]
    looped = by_dimension(plan("dp=2,tp=8,pp=4,schedule=interleaved,vpp=5"))["pp"]
    assert looped.bytes == pytest.approx(5 * plain.bytes)
    whole = by_dimension(plan("dp=2,tp=8,pp=4,sequence_parallel=false"))["pp"]
    assert whole.bytes == pytest.approx(8 * plain.bytes)


def test_neighbouring_stages_on_one_node_use_its_links(plan: Callable[..., Plan]) -> None:
    assert by_dimension(plan("dp=1,tp=2,pp=4", "llama3-8b", "h100x8"))["pp"].tier.name == "nvlink4"
    assert by_dimension(plan("dp=8,tp=2,pp=4", "llama3-8b"))["pp"].tier.name == "infiniband-ndr"


def test_context_traffic_by_hand(plan: Callable[..., Plan]) -> None:
    entry = by_dimension(plan("dp=4,tp=4,cp=4,zero=1", "llama3-8b"))["cp"]
    width = 2 * (8 // 4) * 128
    assert entry.bytes == pytest.approx(16 * 32 * 3 * 3 / 4 * 2 * 4096 * width)
    assert by_dimension(plan("dp=4,tp=4,cp=4,zero=1,cp_method=allgather", "llama3-8b"))["cp"].bytes == entry.bytes
    heads = by_dimension(plan("dp=4,tp=4,cp=4,zero=1,cp_method=ulysses", "llama3-8b"))["cp"]
    # Queries, outputs, and two heads for keys and values, of which each of four ranks needs its own.
    assert heads.bytes == pytest.approx(16 * 32 * 2 * 3 / 4 * 2 * 1024 * (2 * 8 + 2 * 4) * 128)


def test_expert_traffic_by_hand(plan: Callable[..., Plan]) -> None:
    entry = by_dimension(plan("dp=32,tp=2,ep=8,zero=1", "mixtral-8x7b"))["ep"]
    assert sent(entry.parts[0]) == pytest.approx(2 * 32 * 4 * 7 / 8 * 2 * 2048 * 2 * 4096)
    assert entry.parts[1].what.startswith("rows of each expert")


def test_a_dimension_of_one_rank_moves_nothing(plan: Callable[..., Plan]) -> None:
    assert [entry.dimension for entry in moved(plan("dp=8,tp=8,pp=1"))] == ["tp", "data", "world"]
    assert moved(plan("dp=1", "llama3-8b", "h100x1")) == []


def test_a_small_model_fits_everywhere(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x64", global_batch=64, sequence=4096)
    found = framework(question, Layout.parse("dp=64,zero=1"))
    assert found.layer_fits
    assert found.node_fits
    assert found.replica == 1
    assert found.weights + found.gradients + found.optimizer == 16 * question.model.parameters


@pytest.mark.parametrize(("cluster", "size"), [("h100x4", 4), ("h100x64", 8), ("gb200x144", 72)])
def test_a_node_is_what_shares_the_fast_links(ask: Callable[..., Question], cluster: str, size: int) -> None:
    assert framework(ask("llama3-8b", cluster), Layout()).node_size == size
