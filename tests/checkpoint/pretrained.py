"""Small models of transformers, saved as users have them, and their loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from transformers import AutoConfig, AutoModelForCausalLM

from cuboid.data.source import make_source
from cuboid.model.transformer import IGNORED
from cuboid.spec.run import Run, build_run

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 259}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
DEEPSEEK: dict[str, Any] = {
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
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
}
GEMMA2: dict[str, Any] = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 2.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", TIED),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", TIED),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
}
EAGER = ("gpt_oss", "gemma2")
"""Model types without sdpa; their eager attention takes float64."""


def save_pretrained(folder: Path, case: str, shard: str = "20KB", dtype: torch.dtype = torch.float32) -> Path:
    model_type, changes = CASES[case]
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    tokens = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | changes | tokens))
    with torch.no_grad():
        for parameter in model.parameters():  # no norm is one and no bias zero, or an error in them would not show
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def run_from(place: str, layout: str, *overrides: str, model: str = "") -> Run:
    """`model`: the folder whose config.json is meant, where `place` does not say it."""
    table = {
        "model": model or place.removeprefix("hf:"),
        "layout": layout,
        "training": {"steps": 2, "global_batch": 8, "sequence": 16, "device": "cpu", "start_from": place},
    }
    return build_run(table, overrides)


def their_loss(folder: Path, run: Run, dtype: torch.dtype) -> float:
    """Of the first global batch."""
    attention = "eager" if run.model.family in EAGER else "sdpa"
    plain = {"attn_implementation": attention, "experts_implementation": "eager"}  # those that take float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    source = make_source(run)
    samples = [source.at(position) for position in range(run.training.global_batch)]
    tokens, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.double()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).item()
