"""A checkpoint that does not fit the model is refused by the names of its tensors; nothing is dropped silently."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.huggingface import (
    from_huggingface,
    match_names,
    state_from_huggingface,
    state_to_huggingface,
    to_huggingface,
)
from cuboid.model.transformer import Transformer
from cuboid.spec.load import build_model
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec

SIZES = {"hidden": 8, "layers": 2, "heads": 2, "ffn": 12, "vocab": 5}
LLAMA = build_model({"name": "small", "family": "llama", **SIZES})
TIED = build_model({"name": "small", "family": "qwen3", "tie_embeddings": True, **SIZES})
GPT2 = build_model({"name": "small", "family": "gpt2", "max_positions": 6, **SIZES})


def their_state(model: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(target.shape, generator=generator)
        for name, target in to_huggingface(model).items()
        if target.copy_of is None
    }


def refusal(model: ModelSpec, state: dict[str, Tensor]) -> str:
    with pytest.raises(UserError) as caught:
        state_from_huggingface(model, state)
    return str(caught.value)


@pytest.mark.parametrize("model", [LLAMA, TIED, GPT2])
def test_every_parameter_comes_from_somewhere_and_goes_somewhere(model: ModelSpec) -> None:
    names = {name for name, _ in Transformer(model).named_parameters()}
    assert from_huggingface(model).keys() == names
    assert {part for target in to_huggingface(model).values() for part in target.parameters} == names


def test_queries_keys_and_values_of_gpt2_lie_transposed_in_one_tensor() -> None:
    target = to_huggingface(GPT2)["transformer.h.1.attn.c_attn.weight"]
    assert [part.split(".")[-2] for part in target.parameters] == ["query", "key", "value"]
    assert (target.shape, target.transposed) == ((8, 24), True)
    (origin,) = from_huggingface(GPT2)["layers.1.attention.key.weight"]
    assert (origin.index(), origin.transposed) == ((slice(0, 8), slice(8, 16)), True)
    assert origin.index((1, 2), (3, 4)) == (slice(2, 6), slice(9, 12))
    (bias,) = from_huggingface(GPT2)["layers.1.attention.value.bias"]
    assert (bias.tensor, bias.index()) == ("transformer.h.1.attn.c_attn.bias", (slice(16, 24),))


def test_a_tied_copy_may_be_missing_or_equal_but_not_differ() -> None:
    state = their_state(TIED)
    assert "lm_head.weight" not in state
    assert to_huggingface(TIED)["lm_head.weight"].copy_of == "model.embed_tokens.weight"
    ours = state_from_huggingface(TIED, state)
    assert "head.output.weight" not in ours
    copied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    assert torch.equal(state_from_huggingface(TIED, copied)["embedding.tokens.weight"], ours["embedding.tokens.weight"])
    differing = {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}
    assert refusal(TIED, differing) == (
        "lm_head.weight differs from model.embed_tokens.weight and model=small ties them; use tie_embeddings=false"
    )


def test_known_buffers_are_passed_over_and_nothing_else_is() -> None:
    llama, gpt2 = their_state(LLAMA), their_state(GPT2)
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.rotary_emb.inv_freq": torch.ones(2),
    }
    assert state_from_huggingface(LLAMA, llama | buffers).keys() == from_huggingface(LLAMA).keys()
    masks = {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.1.attn.masked_bias": torch.ones(1)}
    assert state_from_huggingface(GPT2, gpt2 | masks).keys() == from_huggingface(GPT2).keys()
    assert "transformer.h.0.attn.bias" in refusal(LLAMA, llama | masks)
    assert "model.rotary_emb.inv_freq" in refusal(GPT2, gpt2 | buffers)


@pytest.mark.parametrize(("model", "prefix"), [(LLAMA, "model."), (GPT2, "transformer.")])
def test_the_prefix_of_the_bare_model_may_be_missing(model: ModelSpec, prefix: str) -> None:
    # The first GPT-2 checkpoints are written so: wte.weight, h.0.ln_1.weight, …
    state = their_state(model)
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    assert match_names(model, bare) == {name: name.removeprefix(prefix) for name in state}
    expected, found = state_from_huggingface(model, state), state_from_huggingface(model, bare)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    twice = next(name for name in bare if name not in state)
    assert refusal(model, {**state, twice: bare[twice]}).startswith(f"the checkpoint holds {twice}, which")


def test_unknown_and_missing_tensors_are_named() -> None:
    state = their_state(LLAMA)
    extra = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(12, 8) for layer in range(2, 7)}
    assert refusal(LLAMA, state | extra) == (
        "the checkpoint holds model.layers.2.mlp.up_proj.weight, model.layers.3.mlp.up_proj.weight, "
        "model.layers.4.mlp.up_proj.weight and 2 more, which model=small of family=llama has no place for; "
        "use the model whose config.json lies beside the checkpoint"
    )
    del state["model.layers.1.self_attn.q_proj.weight"]
    assert refusal(LLAMA, state).startswith(
        "the checkpoint lacks model.layers.1.self_attn.q_proj.weight of model=small"
    )


def test_an_untied_model_needs_its_head() -> None:
    state = their_state(LLAMA)
    del state["lm_head.weight"]
    assert refusal(LLAMA, state) == (
        "the checkpoint lacks lm_head.weight and model=small is untied; use tie_embeddings=true"
    )


def test_wrong_shapes_are_named() -> None:
    state = their_state(GPT2)
    state["transformer.h.0.mlp.c_fc.weight"] = torch.ones(12, 8)
    assert refusal(GPT2, state) == (
        "transformer.h.0.mlp.c_fc.weight has shape (12, 8), not (8, 12); use a model of the checkpoint's sizes"
    )
    ours = state_from_huggingface(GPT2, their_state(GPT2))
    with pytest.raises(UserError, match=r"^head.norm.bias has shape \(7,\), not \(8,\)"):
        state_to_huggingface(GPT2, {**ours, "head.norm.bias": torch.ones(7)})


def test_a_state_of_another_model_is_not_written() -> None:
    ours = state_from_huggingface(TIED, their_state(TIED))
    with pytest.raises(UserError, match=r"differ in head\.output\.weight; use the model's named parameters"):
        state_to_huggingface(TIED, {**ours, "head.output.weight": ours["embedding.tokens.weight"]})
    del ours["layers.0.attention.query_norm.weight"]
    with pytest.raises(UserError, match=r"differ in layers\.0\.attention\.query_norm\.weight"):
        state_to_huggingface(TIED, ours)


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        (LLAMA, {"qk_norm": True}, "model.qk_norm=true cannot be written as family=llama; use qk_norm=false"),
        (LLAMA, {"qkv_bias": True}, "model.output_bias=false cannot be written as family=llama; use output_bias=true"),
        (TIED, {"mlp_bias": True}, "model.mlp_bias=true cannot be written as family=qwen3; use mlp_bias=false"),
        (GPT2, {"kv_heads": 1}, "model.kv_heads=1 cannot be written as family=gpt2; use kv_heads=2"),
        (GPT2, {"head_dim": 6}, "model.head_dim=6 cannot be written as family=gpt2; use head_dim=4"),
        (GPT2, {"norm": "rmsnorm"}, "model.norm=rmsnorm cannot be written as family=gpt2; use norm=layernorm"),
        (
            LLAMA,
            {"mixture": MixtureSpec(experts=2, top_k=1, expert_ffn=4)},
            "model.mixture has no place in family=llama; use a family with it",
        ),
    ],
)
def test_a_model_their_family_cannot_hold_is_refused(
    model: ModelSpec, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        to_huggingface(replace(model, **changes))
    assert str(caught.value) == sentence
