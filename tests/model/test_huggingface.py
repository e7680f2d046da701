"""The single-device model equals Hugging Face's modules in float64 on random weights: the loss and every gradient."""

import inspect
import sys
import textwrap
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from cuboid.errors import UserError
from cuboid.model.huggingface import (
    from_huggingface,
    match_names,
    state_from_huggingface,
    state_to_huggingface,
    to_huggingface,
)
from cuboid.model.transformer import IGNORED, Transformer
from cuboid.spec.huggingface import table_from_config
from cuboid.spec.huggingface_writer import config_from_model
from cuboid.spec.load import build_model
from cuboid.spec.model import ModelSpec

TOLERANCE = 1e-9
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "vocab_size": 67}
# With sixteen numbers per head, these keep one rotation, blend two and slow the others.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
}
GEMMA3 = {"sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16}
# Caps that bend what these weights make.
GEMMA2 = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
        "rope_theta": 150000.0,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-every-head": ("llama", {"num_key_value_heads": 4, "head_dim": 8, "rope_theta": 500000.0}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama3-rope-tied": ("llama", {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-yarn": ("llama", {"rope_scaling": YARN_ROPE}),
    "llama-yarn-silent": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-tied": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "qwen3-moe-normalized": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "deepseek-v3-yarn": ("deepseek_v3", DEEPSEEK | {"rope_scaling": YARN_ROPE, "norm_topk_prob": False}),
    "deepseek-v3-direct": (
        "deepseek_v3",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2},
    ),
    "deepseek-v3-odd-heads": ("deepseek_v3", DEEPSEEK | {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "num_attention_heads": 6}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-uncapped": ("gemma2", GEMMA2 | {"attn_logit_softcapping": None, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-capped": ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 4.0}),
    "gemma3-scaled": (
        "gemma3_text",
        GEMMA3
        | {
            "query_pre_attn_scalar": 24,
            "sliding_window": 2,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma3-no-windows": ("gemma3_text", GEMMA3 | {"layer_types": ["full_attention"] * 3}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "olmo3",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 5000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "olmo3-no-windows": ("olmo3", {"layer_types": ["full_attention"] * 3}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-unstretched": (
        "gpt_oss",
        GPT_OSS
        | {"layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    ),
    "gpt-oss-tied": (
        "gpt_oss",
        GPT_OSS | {"tie_word_embeddings": True, "num_experts_per_tok": 3, "attention_bias": False},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 56}),
}


def exact_norm(module: Any, x: Tensor) -> Tensor:
    """Their RMSNorm computes in float32 whatever the model's precision, which would hide any error below 1e-7. This is
    the formula they mean, in the precision they are given."""
    assert x.dtype == torch.float64
    if "Gemma" in type(module).__name__:
        return (1 + module.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps)
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def randomize(module: nn.Module) -> None:
    """Large enough for attention to be far from uniform; norms are not one and biases not zero, for an error in them
    would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def exact_router(router: nn.Module) -> None:
    """Their routers compute in float32 as well: their own code, with the precision it is given."""
    source = textwrap.dedent(inspect.getsource(type(router).forward))
    if "dtype=router_top_value.dtype" in source:  # GPT-OSS, which keeps the precision it is given
        return
    assert ".float()" in source or "torch.float" in source
    for narrow in ("torch.float32", "torch.float,"):
        source = source.replace(narrow, narrow.replace("float32", "float64").replace("float,", "float64,"))
    scope = dict(vars(sys.modules[type(router).__module__]))
    exec(source.replace(".float()", ".double()"), scope)
    router.forward = types.MethodType(scope["forward"], router)


def exact_softmax(theirs: nn.Module) -> None:
    """Their eager attention, with the precision it is given."""
    scope = vars(sys.modules[type(theirs).__module__])
    if scope["eager_attention_forward"].__code__.co_filename == "<string>":  # done before
        return
    source = inspect.getsource(scope["eager_attention_forward"])
    assert "dtype=torch.float32" in source
    exec(source.replace("dtype=torch.float32", "dtype=torch.float64"), scope)


def stored_state(theirs: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As their files hold it: each expert for itself."""
    return dict(revert_weight_conversion(theirs, dict(state)))


def exact_module(config: PretrainedConfig) -> nn.Module:
    """Their module, in float64 throughout."""
    # The eager attention of transformers takes its softmax in float32; sdpa keeps to float64.
    # GPT-OSS has no sdpa, and its eager attention keeps the precision it is given. Nor has Gemma 2, nor any softcaps.
    attention = "eager" if config.model_type in ("gpt_oss", "gemma2") else "sdpa"
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    module: nn.Module = made.double().eval()
    if config.model_type == "gemma2":
        exact_softmax(module)
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = types.MethodType(exact_norm, part)  # type: ignore[method-assign]
        if type(part).__name__.endswith(("TopKRouter", "TopkRouter")):
            exact_router(part)
    return module


def make_pair(case: str) -> tuple[ModelSpec, Transformer, nn.Module]:
    """Our model, read from their config and holding their weights, and theirs."""
    model_type, changes = CASES[case]
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}  # whose row would have no gradient
    config = AutoConfig.for_model(model_type, **sizes | changes | tokens)
    theirs = exact_module(config)
    randomize(theirs)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)))
    model = build_model(table_from_config(config.to_dict(), case))
    ours = Transformer(model).double()
    state = state_from_huggingface(model, stored_state(theirs, theirs.state_dict()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(state.pop(name))
    assert not state
    return model, ours, theirs


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(0, 67, (2, 3, 33), generator=generator)
    return tokens, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORED)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_equal_theirs(case: str) -> None:
    model, ours, theirs = make_pair(case)
    tokens, labels = make_batch()
    logits = theirs(input_ids=tokens, use_cache=False).logits
    # Their own loss goes to float32, so it is taken here from the logits.
    their_loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    our_loss = ours.loss(tokens, labels)
    assert logits.dtype == our_loss.dtype == torch.float64
    assert abs(our_loss - their_loss) / their_loss < TOLERANCE
    their_loss.backward()
    our_loss.backward()
    gradients = {name: _gradient(parameter) for name, parameter in ours.named_parameters()}
    as_theirs = state_to_huggingface(model, gradients)
    compared = 0
    expected = stored_state(theirs, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (as_theirs[name] - gradient).abs().max() / scale < TOLERANCE, name
        compared += gradient.numel()
    biases = sum(value.numel() for name, value in as_theirs.items() if name.endswith("e_score_correction_bias"))
    assert compared + biases == model.parameters


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("case", CASES)
def test_weights_go_there_and_back_unchanged(case: str) -> None:
    model, ours, theirs = make_pair(case)
    state = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    written = state_to_huggingface(model, state)
    expected = stored_state(theirs, theirs.state_dict())
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    if model.mixture is None:
        theirs.load_state_dict(written, strict=True)
    back = state_from_huggingface(model, written)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_of_a_model_is_read_as_the_same(case: str) -> None:
    """By us, and by their classes, whose module of it computes the same with the same weights."""
    model, _, theirs = make_pair(case)
    config = config_from_model(model)
    assert build_model(table_from_config(config, case)) == model
    again = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
    written = exact_module(again)
    written.load_state_dict(theirs.state_dict())
    tokens, _ = make_batch()
    seen, expected = (module(input_ids=tokens, use_cache=False).logits for module in (written, theirs))
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["qwen2-tied", "gpt2", "mixtral"])
def test_the_two_maps_can_be_followed_one_tensor_at_a_time(case: str) -> None:
    model, ours, theirs = make_pair(case)
    stored = stored_state(theirs, theirs.state_dict())
    parameters = dict(ours.named_parameters())
    for name, origins in from_huggingface(model).items():
        read = 0
        for origin in origins:
            assert stored[origin.tensor].shape == origin.shape
            assert torch.equal(origin.take(stored[origin.tensor]), parameters[name][origin.rows])
            read += stored[origin.tensor][origin.index()].numel()  # what a file would be asked for
        assert read == parameters[name].numel()
    for name, target in to_huggingface(model).items():
        made = target.make([parameters[part] for part in target.parameters])
        assert made.shape == target.shape
        assert torch.equal(made, stored[name])
    used = {part for target in to_huggingface(model).values() if target.copy_of is None for part in target.parameters}
    assert used == set(parameters)


@pytest.mark.parametrize("held", [0, 1])
def test_a_checkpoint_with_fewer_prediction_layers_says_how_many(held: int) -> None:
    model = build_model({"base": "tiny-deepseek", "prediction_layers": 2})
    lacking = tuple(f"model.layers.{layer}." for layer in range(model.layers + held, model.all_layers))
    names = [name for name in to_huggingface(model) if not name.startswith(lacking)]
    with pytest.raises(UserError, match=f"holds {held} of 2 prediction layers .* use model.prediction_layers={held}$"):
        match_names(model, names)
