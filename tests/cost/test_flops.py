"""Parameters and arithmetic against the exact counts of `ModelSpec` and against published formulae."""

import numpy as np
import pytest

from cuboid.cost.compute import (
    active_parameters,
    attention_parameters,
    layer_parameters,
    model_flops_per_token,
)
from cuboid.cost.inputs import Shape, number
from cuboid.spec.model import LatentAttentionSpec, MixtureSpec, ModelSpec, load_model

NAMES = ("gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b")

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


def test_active_parameters_of_a_mixture_are_those_a_token_meets() -> None:
    active = float(active_parameters(Shape.of(DEEPSEEK)))
    # The published 37 billion count the input embedding, which is not multiplied with.
    assert active == pytest.approx(37e9, rel=0.03)


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
