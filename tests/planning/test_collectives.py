"""Bytes of every dimension by hand, and the time formulas of the cost model against them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuboid.cost.compute import kernels
from cuboid.cost.constants import chip_named, engine_named, fabric_named
from cuboid.cost.inputs import Jobs, Shape, single
from cuboid.cost.layers import layer_times, transfer_bytes
from cuboid.planning.collectives import predicted_ledger, step_collectives
from cuboid.spec.run import Run, build_run
from cuboid.telemetry.communication_ledger import Entry

TOKENS, HIDDEN = 2 * 256, 64
BLOCK = 64 * (64 + 64 + 2 * 32) + 3 * 64 * 192 + 2 * 64
"""Parameters of a layer of the model below."""


def make_run(layout: str, precision: str = "float32", **model: object) -> Run:
    shape = {"hidden": 64, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 256, **model}
    training = {"global_batch": 16, "sequence": 256, "precision": precision}
    return build_run({"model": shape, "layout": layout + ",micro_batch=2", "training": training})


def entries(layout: str, rank: int = 0, **options: object) -> dict[tuple[str, str], Entry]:
    return dict(predicted_ledger(make_run(layout, **options), rank).entries)  # type: ignore[arg-type]


def test_plain_data_parallelism_sums_every_gradient_once() -> None:
    found = entries("dp=4")
    total = 8 * BLOCK + 2 * 256 * HIDDEN + HIDDEN
    # A unit for each layer, the embedding and the head; and the number of labelled tokens.
    assert found["data", "all-reduce"] == Entry(8 + 2 + 1, 4 * total + 8, 4, "all-reduce")
    assert found["world", "all-reduce"] == Entry(1, 16, 4, "all-reduce")
    assert len(found) == 2


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(1, 1, 1), (2, 4, 1), (3, 4, 8)])
def test_zero(zero: int, scatters: int, gathers: int) -> None:
    """Four micro-batches for each of two replicas; bf16 travels in two bytes as a parameter, in four as a gradient."""
    found = entries(f"dp=2,zero={zero}", precision="bf16")
    total = 8 * BLOCK + 2 * 256 * HIDDEN + HIDDEN
    assert found["shard", "reduce-scatter"] == Entry(10 * scatters, scatters * 4 * total, 2, "reduce-scatter")
    assert found["shard", "all-gather"] == Entry(10 * gathers, gathers * 2 * total, 2, "all-gather")


def test_zero_3_gathers_linears_in_8_bits() -> None:
    """A byte for each element of a layer, whose two norms travel with the seven scales; the rest as in bf16. A scale
    for each row does not travel."""
    found = entries("dp=2,zero=3", precision="fp8")
    ends = 2 * 256 * HIDDEN + HIDDEN
    assert found["shard", "all-gather"] == Entry(10 * 8, 8 * (8 * BLOCK + 2 * ends), 2, "all-gather")
    assert found["shard", "all-reduce"] == Entry(8, 8 * 4 * (7 + 2 * HIDDEN), 2, "all-reduce")
    plain = entries("dp=2,zero=3", precision="bf16")
    assert entries("dp=2,zero=2", precision="fp8") == entries("dp=2,zero=2", precision="bf16")
    run = make_run("dp=2,zero=3", "fp8")
    for scaling in ("row", "block"):
        other = replace(run, training=replace(run.training, fp8_scaling=scaling))
        assert dict(predicted_ledger(other, 0).entries) == plain


def test_shards_are_padded_to_the_same_length() -> None:
    found = entries("dp=8,zero=1", vocab=9)
    layer, head = -(-BLOCK // 8) * 8, -(-(9 * HIDDEN + HIDDEN) // 8) * 8
    assert found["shard", "all-gather"].bytes == 4 * (8 * layer + 9 * HIDDEN + head)


def test_hybrid_sharding_sums_shards_over_replicas() -> None:
    found = entries("dp=8,zero=3,shard=2")
    assert found["shard", "all-gather"].ranks == 2
    total = 8 * BLOCK + 2 * 256 * HIDDEN + HIDDEN
    assert found["replicate", "all-reduce"] == Entry(10, 4 * total // 2, 4, "all-reduce")


@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 4, 4), ("selective", 6, 5), ("full", 6, 5)])
def test_tensor_parallelism_with_sequences_split(recompute: str, gathers: int, scatters: int) -> None:
    found = entries(f"tp=4,recompute={recompute}")
    activation = 4 * TOKENS * HIDDEN
    assert found["tp", "all-gather"] == Entry(
        8 * (8 * gathers + 2), 8 * (8 * gathers + 2) * activation, 4, "all-gather"
    )
    calls = 8 * (8 * scatters + 2)
    assert found["tp", "reduce-scatter"] == Entry(calls, calls * activation, 4, "reduce-scatter")
    # The loss: the largest logit, then two sums, for every token; and once the gradients of 17 norms.
    assert found["tp", "all-reduce"] == Entry(8 * 2 + 1, 8 * 3 * 4 * TOKENS + 4 * 17 * HIDDEN, 4, "all-reduce")


def test_tensor_parallelism_with_whole_sequences() -> None:
    found = entries("tp=4,sequence_parallel=false")
    assert set(found) == {("tp", "all-reduce"), ("world", "all-reduce")}
    calls = 8 * (8 * 4 + 2)
    assert found["tp", "all-reduce"].bytes == calls * 4 * TOKENS * HIDDEN + 8 * 3 * 4 * TOKENS


def test_replicated_key_value_heads_sum_their_gradients() -> None:
    found = entries("tp=8", kv_heads=2)
    # Four ranks hold the same head of eight keys and eight values.
    assert found["kv", "all-reduce"] == Entry(1, 4 * 8 * 2 * 8 * HIDDEN, 4, "all-reduce")
    assert ("kv", "all-reduce") not in entries("tp=4")


@pytest.mark.parametrize(
    ("layout", "sends"),
    [
        ("pp=4", [1, 2, 2, 1]),
        ("pp=4,schedule=interleaved", [3, 4, 4, 3]),
        ("pp=4,schedule=zbv", [2, 4, 4, 2]),
        ("pp=1,schedule=interleaved", [0]),
    ],
)
def test_messages_between_stages(layout: str, sends: list[int]) -> None:
    message = 4 * TOKENS * HIDDEN
    for rank, count in enumerate(sends):
        found = entries(layout, rank).get(("pp", "send"))
        assert (found.bytes if found else 0) == 8 * count * message
    split = entries("pp=4,tp=2", 0)["pp", "send"]
    assert split.bytes == 8 * message // 2


def test_a_tied_embedding_is_summed_by_its_two_holders() -> None:
    for rank, holds in enumerate((True, False, False, True)):
        found = entries("pp=4", rank, tie_embeddings=True)
        assert (("embedding", "all-reduce") in found) is holds
    assert entries("pp=4", 0, tie_embeddings=True)["embedding", "all-reduce"].bytes == 4 * 256 * HIDDEN
    assert ("embedding", "all-reduce") not in entries("pp=2,schedule=zbv", 0, tie_embeddings=True)
    # Used twice by every micro-batch of one rank, it is gathered four times and scattered twice for each.
    alone = entries("dp=2,zero=3", tie_embeddings=True)["shard", "reduce-scatter"]
    assert alone.calls == 4 * (8 + 1 + 2)


LATENT = {"q_rank": 32, "kv_rank": 24, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_dim": 8}
MIXTURE = {"experts": 8, "top_k": 2, "expert_ffn": 48}
MODELS = {
    "dense": {},
    "latent": {"latent": LATENT, "kv_heads": 8},
    "short latent": {"latent": LATENT | {"q_rank": 0}, "kv_heads": 8},
    "mixture": {"mixture": MIXTURE},
    "shared": {"mixture": MIXTURE | {"shared_experts": 1, "shared_ffn": 48}, "latent": LATENT, "kv_heads": 8},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_the_time_of_layers_is_that_of_their_exchanges(
    model: str, sequence_parallel: str, recompute: str, precision: str
) -> None:
    """On links without latency the cost model waits for exactly the bytes that the engine moves."""
    layout = f"dp=2,tp=4,ep={2 if 'mixture' in MODELS[model] else 1},recompute={recompute}"
    run = make_run(f"{layout},sequence_parallel={sequence_parallel}", precision, **MODELS[model])
    sent = {
        dimension: sum(
            Entry(part.calls, part.calls * part.size, part.ranks, part.kind).sent
            for part in step_collectives(run, 0)
            if part.dimension == dimension and part.what.startswith(("layer activations", "rows to experts"))
        )
        for dimension in ("tp", "ep")
    }
    fabric = replace(fabric_named("h100"), inner_latency=0.0, curve={}, spill=0.0)
    engine = replace(engine_named("cuboid"), tensor_under_weights=0.0).in_precision(precision)
    shape, jobs = Shape.of(run.model), Jobs.of([run.layout], global_batch=16, sequence=256)
    parts = kernels(shape, jobs, chip_named("h100-80g"), engine, precision)
    times = layer_times(shape, jobs, fabric, engine, parts, precision)
    layers = run.micro_batches * run.model.layers
    for dimension, name in (("tp", "tensor"), ("ep", "expert")):
        seconds = layers * single(times.mean(name, 0) + times.mean(name, 1))
        assert seconds * fabric.inner_bandwidth == pytest.approx(sent[dimension])


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,tp=2", "pp=2,tp=2,sequence_parallel=false"])
def test_the_message_of_the_cost_model_is_the_engines(layout: str) -> None:
    run = make_run(layout, "bf16")
    jobs = Jobs.of([run.layout], global_batch=16, sequence=256)
    (message,) = [entry for entry in step_collectives(run, 0) if entry.dimension == "pp"]
    assert single(transfer_bytes(Shape.of(run.model), jobs, engine_named("cuboid"))) == message.size
