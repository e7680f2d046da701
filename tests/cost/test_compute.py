"""Kernel times: what bounds them, and how they follow the shape."""

from dataclasses import replace

import numpy as np
import pytest

from cuboid.cost.compute import (
    active_parameters,
    attention_parameters,
    kernels,
    layer_parameters,
    model_flops_per_token,
)
from cuboid.cost.constants import Engine, chip_named
from cuboid.cost.inputs import Jobs, Shape, number
from cuboid.spec.layout import CONTEXT_METHODS
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import LatentAttentionSpec, ModelSpec, load_model

CHIP = chip_named("h100-80g")
ENGINE = Engine(name="test")
LLAMA = Shape.of(load_model("llama3-8b"))


def made(**values: object) -> Jobs:
    return Jobs.make(**{"global_batch": 8, "sequence": 4096, **values})


def test_large_layers_run_near_the_calibrated_share_of_the_peak() -> None:
    shape = Shape.of(load_model("llama3-405b"))
    ideal = replace(CHIP, narrow=0.0, kernel_floor=0.0)
    bare = replace(ENGINE, hidden_traffic=0.0, ffn_traffic=0.0)
    parts = kernels(shape, made(micro_batch=8), ideal, bare, "bf16")
    linear = parts.dense_forward - parts.attention_forward
    flops = 2 * 8 * 4096 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248)
    assert flops / float(linear) == pytest.approx(ideal.peak["bf16"] * ideal.linear_efficiency["bf16"], rel=0.01)


def test_backward_takes_about_twice_as_long() -> None:
    parts = kernels(LLAMA, made(), CHIP, ENGINE, "bf16")
    assert 1.8 < float(parts.dense_backward / parts.dense_forward) < 2.6


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    parts = kernels(LLAMA, made(sequence=number([32768, 65536])), replace(CHIP, kernel_floor=0.0), ENGINE, "bf16")
    assert float(parts.attention_forward[1] / parts.attention_forward[0]) == pytest.approx(4)


def test_a_ring_adds_up_the_outputs_of_its_blocks() -> None:
    adds = replace(ENGINE, block_traffic=5.0)
    methods = number([CONTEXT_METHODS.index(name) for name in ("ring", "ring", "ring", "allgather", "ulysses")])
    cp, inner = number([1, 2, 4, 4, 4]), number([1, 1, 1, 1, 4])
    jobs = made(sequence=65536, cp=cp, cp_method=methods, cp_inner=inner)
    without, added = (kernels(LLAMA, jobs, CHIP, engine, "bf16") for engine in (ENGINE, adds))
    moved = 5.0 * number([0, 1, 3, 0, 0]) * jobs.tokens * 4096 / (CHIP.memory_bandwidth * CHIP.memory_efficiency)
    assert (added.attention_forward - without.attention_forward).tolist() == pytest.approx(moved.tolist(), abs=1e-12)
    assert (added.dense_backward - without.dense_backward).tolist() == pytest.approx(moved.tolist(), abs=1e-12)


def test_context_parallelism_shares_attention() -> None:
    parts = kernels(LLAMA, made(sequence=65536, cp=number([1, 4])), replace(CHIP, kernel_floor=0.0), ENGINE, "bf16")
    assert float(parts.attention_forward[0] / parts.attention_forward[1]) == pytest.approx(4)


def test_unfused_attention_is_slower() -> None:
    fused, plain = (
        kernels(LLAMA, made(), CHIP, replace(ENGINE, fused_attention=flag), "bf16").attention_forward
        for flag in (True, False)
    )
    assert float(plain) > float(fused)


def test_small_kernels_do_not_go_below_their_floor() -> None:
    tiny = Shape.of(ModelSpec(hidden=64, layers=2, heads=4, ffn=128, vocab=256))
    parts = kernels(tiny, made(sequence=16), CHIP, ENGINE, "bf16")
    # Four multiplications and attention.
    assert float(parts.dense_forward) >= 5 * CHIP.kernel_floor


def test_splitting_a_layer_loses_efficiency() -> None:
    parts = kernels(LLAMA, made(tp=number([1, 8])), CHIP, ENGINE, "bf16")
    whole, eighth = parts.dense_forward
    assert whole / 8 < eighth < whole / 2


def test_eight_bits_speed_up_layers_and_not_the_head() -> None:
    wide, narrow = (kernels(LLAMA, made(), CHIP, ENGINE, precision) for precision in ("bf16", "fp8"))
    assert float(narrow.dense_forward) < float(wide.dense_forward)
    assert float(narrow.head_forward) == float(wide.head_forward)


def test_chips_without_eight_bits_run_in_sixteen() -> None:
    chip = chip_named("a100-80g")
    wide, narrow = (kernels(LLAMA, made(), chip, ENGINE, precision) for precision in ("bf16", "fp8"))
    assert float(narrow.dense_forward) == float(wide.dense_forward)


def test_a_mixture_computes_its_top_experts() -> None:
    def model(top_k: int) -> Shape:
        mixture = MixtureSpec(experts=64, top_k=top_k, expert_ffn=1408)
        return Shape.of(ModelSpec(hidden=2048, layers=24, heads=16, ffn=6144, vocab=32000, mixture=mixture))

    two, eight = (float(kernels(model(k), made(), CHIP, ENGINE, "bf16").mixture_forward) for k in (2, 8))
    assert eight > 1.5 * two
    dense = kernels(LLAMA, made(), CHIP, ENGINE, "bf16")
    assert float(dense.mixture_forward) == float(dense.dense_forward)


def test_latent_attention_has_its_own_projections() -> None:
    latent = LatentAttentionSpec(q_rank=1536, kv_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128)
    plain = ModelSpec(hidden=7168, layers=4, heads=128, head_dim=128, ffn=18432, vocab=129280)
    with_latent = ModelSpec(hidden=7168, layers=4, heads=128, ffn=18432, vocab=129280, head_dim=56, latent=latent)
    one, other = (
        float(kernels(Shape.of(model), made(), CHIP, ENGINE, "bf16").dense_forward) for model in (plain, with_latent)
    )
    assert other < one


def test_many_shapes_and_layouts_broadcast() -> None:
    shapes = Shape.stack([Shape.of(load_model(name)) for name in ("llama3-8b", "llama3-70b")])
    parts = kernels(shapes, made(tp=number([1, 8])), CHIP, ENGINE, "bf16")
    assert np.shape(parts.dense_forward) == (2,)


NAMES = ("gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b", "tiny-gemma3", "tiny-olmo3")

LATENT = LatentAttentionSpec(q_rank=1536, kv_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128)
MIXTURE = MixtureSpec(
    experts=256, top_k=8, expert_ffn=2048, shared_experts=1, shared_ffn=2048, first_dense_layers=3, router_bias=True
)
DEEPSEEK = ModelSpec(hidden=7168, layers=61, heads=128, ffn=18432, vocab=129280, mixture=MIXTURE, latent=LATENT)


@pytest.mark.parametrize("model", [*map(load_model, NAMES), DEEPSEEK], ids=lambda model: model.name)
def test_layers_match_the_exact_count(model: ModelSpec) -> None:
    each = layer_parameters(Shape.of(model))
    last = each.mixture + each.routed if model.mixture else each.dense
    assert (float(each.dense), float(last)) == (model.layer_parameters(0), model.layer_parameters(model.layers - 1))


def test_biases_of_experts_are_counted() -> None:
    model = load_model("tiny-gpt-oss")
    each = layer_parameters(Shape.of(model))
    assert float(each.mixture + each.routed) == model.layer_parameters(0)


def test_active_parameters_of_a_mixture_are_those_a_token_meets() -> None:
    active = float(active_parameters(Shape.of(DEEPSEEK)))
    # The published 37 billion count the input embedding, which is not multiplied with.
    assert active == pytest.approx(37e9, rel=0.03)


def test_attention_in_windows_is_what_queries_see() -> None:
    """Counted pair by pair."""
    sizes = {"hidden": 64, "heads": 4, "ffn": 128, "vocab": 100}
    plain, windowed = ModelSpec(layers=3, **sizes), ModelSpec(layers=3, windows=(5, 5, 0), **sizes)
    sequence = 12
    pairs = sum(min(place, 5) for place in range(1, sequence + 1))
    every = sequence * (sequence + 1) // 2
    fraction = (2 * pairs + every) / (3 * every)
    linear = 6 * float(active_parameters(Shape.of(plain)))
    attention = [
        float(model_flops_per_token(Shape.of(model), number(sequence))) - linear for model in (plain, windowed)
    ]
    assert attention[1] == pytest.approx(fraction * attention[0])


def test_direct_queries_have_no_latent() -> None:
    direct = LatentAttentionSpec(q_rank=0, kv_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128)
    model = ModelSpec(hidden=2048, layers=27, heads=16, ffn=11264, vocab=163840, latent=direct)
    assert float(attention_parameters(Shape.of(model))) == pytest.approx(model.attention_parameters(), rel=1e-3)


def test_a_dense_model_has_no_routed_parameters() -> None:
    assert float(layer_parameters(Shape.of(load_model("llama3-8b"))).routed) == 0


def test_flops_follow_korthikanti() -> None:
    hidden, layers, vocab, sequence = 12288, 96, 51200, 2048
    model = ModelSpec(
        family="gpt2",
        hidden=hidden,
        layers=layers,
        heads=96,
        ffn=4 * hidden,
        vocab=vocab,
        activation="gelu",
        positions="learned",
        max_positions=2048,
        tie_embeddings=True,
    )
    formula = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * hidden * layers))
    assert float(model_flops_per_token(Shape.of(model), number(sequence))) == pytest.approx(formula, rel=1e-3)


def test_causal_counting_halves_attention_only() -> None:
    shape = Shape.of(load_model("llama3-8b"))
    full = float(model_flops_per_token(shape, number(8192)))
    causal = float(model_flops_per_token(shape, number(8192), causal=True))
    assert full - causal == pytest.approx(6 * 32 * 4096 * 8192)


def test_shapes_stack_into_one_entry_per_model() -> None:
    shapes = [Shape.of(load_model(name)) for name in NAMES]
    together = active_parameters(Shape.stack(shapes))
    assert np.allclose(together, [float(active_parameters(shape)) for shape in shapes])
