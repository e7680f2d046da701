"""Model shapes: defaults that follow from other sizes, exact parameter counts, and refusals."""

import pytest

from cuboid.errors import UserError
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import LatentAttentionSpec, ModelSpec, RopeScaling, load_model

SMALL = {"hidden": 64, "layers": 2, "heads": 8, "ffn": 192, "vocab": 100}


def test_left_out_sizes_follow_the_others() -> None:
    model = ModelSpec(**SMALL)
    assert (model.kv_heads, model.head_dim) == (8, 8)
    assert ModelSpec(**SMALL, kv_heads=2, head_dim=32).head_dim == 32


def test_parameters_of_a_llama_counted_by_hand() -> None:
    model = ModelSpec(**SMALL, kv_heads=4)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 3 * 64 * 192 + 2 * 64
    assert model.parameters == 2 * 100 * 64 + 2 * layer + 64
    assert model.active_parameters == model.parameters


def test_parameters_of_a_gpt_counted_by_hand() -> None:
    model = load_model("tiny-gpt2")
    attention = 64 * 192 + 192 + 64 * 64 + 64
    feed_forward = 2 * 64 * 256 + 256 + 64
    assert model.parameters == (259 + 1024) * 64 + 8 * (attention + feed_forward + 4 * 64) + 2 * 64


def test_parameters_of_a_mixture_counted_by_hand() -> None:
    mixture = MixtureSpec(experts=4, top_k=2, expert_ffn=48, shared_experts=1, shared_ffn=48, first_dense_layers=1)
    model, dense = ModelSpec(**SMALL, mixture=mixture), ModelSpec(**SMALL)
    routed = 5 * 3 * 64 * 48 + 64 * 4
    assert model.layer_parameters(0) == dense.layer_parameters(0)
    assert model.layer_parameters(1) == dense.layer_parameters(1) - 3 * 64 * 192 + routed
    assert model.active_parameters == model.parameters - 2 * 3 * 64 * 48


def test_parameters_of_latent_attention_counted_by_hand() -> None:
    latent = LatentAttentionSpec(q_rank=0, kv_rank=16, qk_nope_dim=8, qk_rope_dim=4, v_dim=6)
    direct = 64 * 8 * 12
    rest = 64 * (16 + 4) + 16 + 16 * 8 * (8 + 6) + 8 * 6 * 64
    assert ModelSpec(**SMALL, latent=latent).attention_parameters() == direct + rest
    low_rank = LatentAttentionSpec(q_rank=10, kv_rank=16, qk_nope_dim=8, qk_rope_dim=4, v_dim=6)
    assert ModelSpec(**SMALL, latent=low_rank).attention_parameters() == 64 * 10 + 10 + 10 * 8 * 12 + rest


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden": 0}, "model.hidden=0 is too small; use hidden=1 or more"),
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide heads=8; use kv_heads=2 or kv_heads=4"),
        ({"heads": 7}, "model.heads=7 does not divide hidden=64 and head_dim is not given; use heads=4 or heads=8"),
        ({"head_dim": 7}, "model.head_dim=7 is odd and RoPE rotates pairs; use head_dim=8"),
        ({"layers": 2.0}, "model.layers=2.0 is a number; it must be an integer"),
        ({"norm": "batch"}, 'model.norm="batch" is unknown; use rmsnorm or layernorm'),
        (
            {"family": "bert"},
            'model.family="bert" is unknown; use llama, qwen2, qwen3, gpt2, mixtral, qwen3_moe, '
            "deepseek_v3, mistral, gemma2, gemma3_text, olmo2, olmo3 or gpt_oss",
        ),
        ({"norm_epsilon": 0}, "model.norm_epsilon=0.0 is not positive; use a number above 0"),
        ({"tie_embeddings": 1}, "model.tie_embeddings=1 is an integer; it must be true or false"),
    ],
)
def test_impossible_shapes_are_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        ModelSpec(**{**SMALL, **changes})
    assert str(refusal.value) == sentence


def test_nested_shapes_are_checked_too() -> None:
    with pytest.raises(UserError, match=r"mixture\.top_k=9 is more than experts=8; use top_k=8 or less"):
        MixtureSpec(experts=8, top_k=9, expert_ffn=4)
    with pytest.raises(UserError, match=r"mixture\.shared_ffn=0 does not fit shared_experts=2; use shared_ffn=8"):
        MixtureSpec(experts=8, top_k=1, expert_ffn=4, shared_experts=2)
    with pytest.raises(UserError, match=r"first_dense_layers=3 is more than layers=2"):
        ModelSpec(**SMALL, mixture=MixtureSpec(experts=8, top_k=1, expert_ffn=4, first_dense_layers=3))
    with pytest.raises(UserError, match=r"high_frequency_factor=1\.0 is not above low_frequency_factor=1\.0"):
        RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=1, original_positions=64)
    with pytest.raises(UserError, match=r"rope_scaling\.factor=0\.5 shrinks"):
        RopeScaling(factor=0.5, low_frequency_factor=1, high_frequency_factor=4, original_positions=64)
    scaling = RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=4, original_positions=64)
    with pytest.raises(UserError, match=r"rope_scaling does nothing with positions=learned; use positions=rope"):
        ModelSpec(**SMALL, positions="learned", rope_scaling=scaling)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown model=tiny-lama; did you mean tiny-llama"):
        load_model("tiny-lama")
    with pytest.raises(UserError, match=r"model=nothing\.toml is not a file"):
        load_model("nothing.toml")
