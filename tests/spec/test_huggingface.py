"""Configs of Hugging Face: sizes equal to their own modules', and refusals by the name of the key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cuboid.errors import UserError
from cuboid.model.weight_names import check_family
from cuboid.spec.huggingface import dropout_of, table_from_config
from cuboid.spec.huggingface_writer import config_from_model
from cuboid.spec.load import build_model, catalog_models
from cuboid.spec.model import ModelSpec, RopeScaling, load_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=32),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101, n_positions=32),
    "gpt2 wide": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101, n_inner=80),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with windows": MistralConfig(**SIZES, sliding_window=16),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=16),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=16),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES, sliding_window=16),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=24, head_dim=16),
    "deepseek_v2": DeepseekV2Config(**DEEPSEEK, q_lora_rank=12, n_shared_experts=2, n_group=1, topk_group=1),
    "deepseek_v2 direct": DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK, q_lora_rank=12, n_group=2, topk_group=1, num_nextn_predict_layers=0),
}
LLAMA = {"model_type": "llama", **SIZES}


def read(config: dict[str, Any]) -> ModelSpec:
    return build_model(table_from_config(config, "theirs"))


def refusal(**changes: object) -> str:
    with pytest.raises(UserError) as caught:
        read({**LLAMA, **changes})
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count_equals_their_module(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in module.parameters())
    # They hold the balancing bias of DeepSeek-V3 as a buffer, and save it with the weights.
    count += sum(buffer.numel() for key, buffer in module.named_buffers() if "correction_bias" in key)
    model = load_model(str(tmp_path))
    assert model.parameters == count
    assert load_model(str(tmp_path / "config.json")) == model
    assert model.name == tmp_path.name


def test_every_number_that_matters_is_taken() -> None:
    model = read(
        CONFIGS["llama"].to_dict() | {"rms_norm_eps": 1e-4, "max_position_embeddings": 77, "initializer_range": 0.1}
    )
    assert (model.norm_epsilon, model.max_positions, model.initial_std) == (1e-4, 77, 0.1)
    assert (model.family, model.kv_heads, model.rope_theta) == ("llama", 2, 10000.0)


def test_defaults_are_theirs_where_the_config_is_silent() -> None:
    assert (read(LLAMA).norm_epsilon, read(LLAMA).rope_theta) == (LlamaConfig().rms_norm_eps, 10000.0)
    assert read({**LLAMA, "model_type": "qwen3"}).head_dim == Qwen3Config().head_dim
    assert read({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.02}, (0.02, "global_batch", 0.0, 0.0)),
        ("mixtral", {"router_z_loss_coef": 0.003}, (0.001, "global_batch", 0.003, 0.0)),
        ("qwen3_moe", {"router_aux_loss_coef": None}, (0.001, "global_batch", 0.0, 0.0)),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, (0.0, "global_batch", 0.0, 0.0)),
        ("deepseek_v2", {"aux_loss_alpha": 0.003}, (0.003, "sequence", 0.0, 0.0)),
        ("deepseek_v2", {"seq_aux": False}, (0.001, "global_batch", 0.0, 0.0)),
        ("deepseek_v3", {}, (0.0001, "sequence", 0.0, 0.001)),
        ("deepseek_v3", {"aux_loss_alpha": 0.001, "seq_aux": True}, (0.001, "sequence", 0.0, 0.001)),
    ],
)
def test_a_mixture_is_balanced_as_its_config_says(name: str, changes: dict[str, Any], expected: object) -> None:
    mixture = read({**CONFIGS[name].to_dict(), **changes}).mixture
    assert mixture is not None
    assert (mixture.balance_coefficient, mixture.balance_over, mixture.z_coefficient, mixture.bias_rate) == expected


def test_rope_is_read_in_both_spellings() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=4, original_positions=64)
    old = read({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = read({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, expected)
    assert read({**LLAMA, "rope_scaling": None}).rope_scaling is None


def test_catalog_entries_equal_their_configs() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    assert build_model(table_from_config(config, "llama3-8b")) == load_model("llama3-8b")
    assert build_model(table_from_config(GPT2Config().to_dict(), "gpt2")) == load_model("gpt2")


def test_dropout_is_the_trainings_and_that_of_attention_is_said_not_to_be_computed() -> None:
    dropout, notes = dropout_of(GPT2Config().to_dict())
    assert dropout == 0.1 and len(notes) == 1
    assert notes[0].startswith("attn_pdrop=0.1 of its config.json is not used")
    dropout, notes = dropout_of(GPT2Config(embd_pdrop=0.0, attn_pdrop=0.0).to_dict())
    assert dropout == 0.1 and notes == ["embd_pdrop=0 of its config.json is not used: training.dropout=0.1 is for all"]
    assert dropout_of({"attention_dropout": 0.0}) == (0.0, [])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "lama"}, 'model_type="lama" of theirs is unknown; use llama'),
        ({"model_type": None}, "model_type=None of theirs is unknown; use "),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" of theirs changes what the model computes; use hidden_act="silu"'),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            'rope_type="dynamic" of theirs is unknown; use rope_type=default',
        ),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling.factor=2 of theirs is unknown; remove the key"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2}},
            "model.rope_scaling.low_frequency_factor is missing",
        ),
        ({"logit_scale": 2.0}, "logit_scale=2.0 of theirs is unknown and may change what it computes; remove the key"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} of theirs is unknown"),
        ({"hidden_size": "64"}, 'hidden_size="64" of theirs is no number'),
        ({"num_key_value_heads": 3}, "model.kv_heads=3 does not divide heads=4; use kv_heads=2 or kv_heads=4"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
            "sliding_window=8 of theirs is unknown",
        ),
        ({"model_type": "mistral", "sliding_window": "8"}, 'sliding_window="8" of theirs is no number of tokens'),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 30.0},
            "attn_logit_softcapping=30.0 of theirs changes what the model computes; use attn_logit_softcapping=null",
        ),
        (
            {"model_type": "gemma2", "final_logit_softcapping": "30"},
            'final_logit_softcapping="30" of theirs is no number',
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            'quantization_config of theirs says that its experts are stored in "mxfp4", which is not read; save it',
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_parameters.sliding_attention of theirs stretches positions",
        ),
        (
            {"model_type": "olmo3", "layer_types": ["chunked_attention"]},
            'layer_types of theirs holds "chunked_attention"; use full_attention or sliding_attention',
        ),
        (
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar=0 of theirs is no number above 0",
        ),
        ({"model_type": "mixtral"}, "theirs does not say how many experts it has and uses"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=true of theirs",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"]},
            'layer_types of theirs holds "sliding_attention"',
        ),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(changes: dict[str, object], sentence: str) -> None:
    assert refusal(**changes).startswith(sentence)


def test_windows_are_read_layer_by_layer() -> None:
    assert read({**LLAMA, "model_type": "mistral"}).windows == (4096,)
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 13, "sliding_window": 512}
    model = read(gemma)
    assert model.windows == (512,) * 5 + (0,)
    assert (model.rope_theta, model.window_rope_theta, model.embedding_scale) == (1e6, 1e4, 8.0)
    assert read({**gemma, "sliding_window_pattern": 2}).windows == (512, 0)
    kinds = ["full_attention"] * 12 + ["sliding_attention"]
    assert read({**gemma, "layer_types": kinds}).windows == (0,) * 12 + (512,)
    assert read({**gemma, "layer_types": ["full_attention"] * 13}).windows == ()
    olmo = read({**LLAMA, "model_type": "olmo3", "num_hidden_layers": 8, "rope_theta": 5e4})
    assert (olmo.windows, olmo.rope_theta, olmo.window_rope_theta) == ((4096,) * 3 + (0,), 5e4, 5e4)


def test_softcaps_are_read() -> None:
    gemma = {**LLAMA, "model_type": "gemma2", "head_dim": 16}
    for config, expected in ((gemma, (50.0, 30.0)), ({**gemma, "attn_logit_softcapping": None}, (0.0, 30.0))):
        model = read(config)
        assert (model.attention_softcap, model.logit_softcap, model.windows) == (*expected, (4096, 0))
    third = read({**gemma, "model_type": "gemma3_text", "final_logit_softcapping": 20.0})
    assert (third.attention_softcap, third.logit_softcap) == (0.0, 20.0)
    with pytest.raises(UserError, match=r"model.logit_softcap=20.0 cannot be written as family=llama; use logit_soft"):
        check_family(replace(load_model("tiny-llama"), logit_softcap=20.0))


def test_windows_that_no_family_has_are_refused() -> None:
    for windows, family in (((4, 8), "olmo3"), ((4, 0), "mistral")):
        with pytest.raises(UserError, match=f"cannot be written as family={family}"):
            config_from_model(replace(load_model("tiny-olmo3"), windows=windows, family=family))


def test_heads_that_their_classes_refuse_are_refused() -> None:
    odd = build_model({"base": "tiny-llama", "hidden": 64, "heads": 6, "kv_heads": 3, "head_dim": 12})
    with pytest.raises(UserError, match="heads=6 does not divide hidden=64, which family=llama of Hugging Face"):
        config_from_model(odd)
    assert config_from_model(replace(odd, family="mistral"))["sliding_window"] is None


def test_windows_that_are_off_change_nothing() -> None:
    off = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    assert read({**LLAMA, **off}) == read({**LLAMA, "model_type": "qwen2"})
    assert read({**LLAMA, "use_mrope": False, "quantization_config": None}) == read(LLAMA)


def test_deepseek_as_released_gives_its_sizes() -> None:
    released = DeepseekV3Config().to_dict() | {
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 4096},
        "rope_parameters": None,
        "rope_theta": 10000,
        "quantization_config": {"quant_method": "fp8"},
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
    }
    main, whole = load_model("deepseek-v3"), build_model({"base": "deepseek-v3", "prediction_layers": 1})
    assert read(released).parameters == whole.parameters  # with the layer that its checkpoint has
    assert read(released | {"num_nextn_predict_layers": 0}).parameters == main.parameters
    # Its 14 billion parameters of the layer count copies of embedding and head.
    assert round((whole.parameters - main.parameters + 2 * main.vocab * main.hidden) / 1e9) == 13


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder without config"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON: "):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="does not hold a JSON object"):
        load_model(str(tmp_path))


SCALING = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192)
WRITTEN = [name for name in catalog_models() if name not in ("deepseek-v2", "moe-1t")]
CHANGED = [
    replace(load_model("tiny-llama"), rope_scaling=SCALING, head_dim=16, mlp_bias=True),
    replace(load_model("tiny-llama"), qkv_bias=True, output_bias=True, norm_epsilon=1e-3, initial_std=0.5),
    replace(load_model("tiny-qwen3"), rope_theta=5e5, tie_embeddings=False),
    replace(load_model("tiny-gpt2"), ffn=100, tie_embeddings=False),
    build_model({"family": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "head_dim": 16, "ffn": 48, "vocab": 67}),
]


@pytest.mark.parametrize("model", [*map(load_model, WRITTEN), *CHANGED], ids=lambda model: model.name)
def test_a_config_is_read_back_as_the_model(model: ModelSpec) -> None:
    config = config_from_model(model)
    assert build_model(table_from_config(config, model.name)) == model
    theirs = AutoConfig.for_model(**config)
    assert build_model(table_from_config(theirs.to_dict(), model.name)) == model


def test_what_a_family_has_not_is_refused() -> None:
    with pytest.raises(UserError, match="model=tiny-mixtral is none of family=llama to Hugging Face"):
        config_from_model(replace(load_model("tiny-mixtral"), family="llama"))


JUNK: list[Any] = [{}, {"a": 1}, [], [1], [{}], "x", True, -1, 0, 0.5, 1e308, 2**62]


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_of_any_key_is_read_or_refused(name: str) -> None:
    """Nothing but a sentence comes out, and nothing is computed with a value of another type."""
    config = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    read(config)
    refused = 0
    for key in (*config, "rope_scaling", "layer_types", "sliding_window", "n_shared_experts"):
        for value in JUNK:
            try:
                read({**config, key: value})
            except UserError:
                refused += 1
    assert refused > 8 * len(JUNK)
