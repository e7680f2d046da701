"""One step of a Megatron Core model, written for `cuboid verify --against`: on tensor-parallel ranks, also on CPUs.

    pip install megatron-core==0.16.1
    torchrun --nproc-per-node 2 examples/step_of_megatron.py step
    cuboid verify --against step

All ranks are tensor-parallel. Copy `whole` and what writes the files into a trainer of your own: it makes of Megatron's
parameters, and of their gradients, those that Hugging Face names."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor

if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")  # where Megatron Core puts what it computes with

    class NoGenerators:
        """Nothing is dropped here."""

        def fork(self, *_: Any) -> Any:
            return nullcontext()

    tensor_parallel.get_cuda_rng_tracker = NoGenerators

SAMPLES, LENGTH, VOCABULARY = 4, 16, 256
HIDDEN, FFN, LAYERS, HEADS, GROUPS = 64, 128, 2, 4, 2
RATE, CLIP, DECAY = 1e-3, 1.0, 0.1


def batch() -> tuple[Tensor, Tensor]:
    """Samples with different numbers of labels that count."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=random)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for sample in range(SAMPLES):
        labels[sample, : 3 * sample] = -100
    return inputs, labels


def gathered(values: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return parts


def whole(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all tensor ranks, by Hugging Face names."""
    found: dict[str, Tensor] = {}
    for name, values in named.items():
        parts = gathered(values.detach())
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            found["lm_head.weight" if name[0] == "o" else "model.embed_tokens.weight"] = torch.cat(parts)
        elif name == "decoder.final_layernorm.weight":
            found["model.norm.weight"] = parts[0]
        else:
            layer, part = name.removeprefix("decoder.layers.").split(".", 1)
            at = f"model.layers.{layer}"
            if part == "self_attention.linear_qkv.weight":  # query heads of a group, then its key and its value
                width = HIDDEN // HEADS
                groups = torch.cat(parts).view(GROUPS, HEADS // GROUPS + 2, width, HIDDEN)
                queries, key, value = groups.split([HEADS // GROUPS, 1, 1], 1)
                for letter, each in (("q", queries), ("k", key), ("v", value)):
                    found[f"{at}.self_attn.{letter}_proj.weight"] = each.reshape(-1, HIDDEN)
            elif part == "mlp.linear_fc1.weight":  # on each rank its rows of the gate, then its rows of the other
                halves = [each.chunk(2) for each in parts]
                found[f"{at}.mlp.gate_proj.weight"] = torch.cat([gate for gate, _ in halves])
                found[f"{at}.mlp.up_proj.weight"] = torch.cat([up for _, up in halves])
            elif part in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
                told = "self_attn.o_proj" if part[0] == "s" else "mlp.down_proj"
                found[f"{at}.{told}.weight"] = torch.cat(parts, 1)
            else:
                told = "input_layernorm" if part.startswith("input") else "post_attention_layernorm"
                found[f"{at}.{told}.weight"] = parts[0]
    return {name: values.clone().contiguous() for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    named = dict(model.named_parameters())
    before = whole(named)
    tokens, labels = batch()
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH).triu(1) > 0
    counts = labels >= 0
    losses = model(tokens, positions, hidden, labels=labels.clamp(min=0))
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    gradients = whole({name: x.grad for name, x in named.items()})
    length = torch.cat([x.flatten() for x in gradients.values()]).norm().item()
    for parameter in named.values():
        parameter.grad *= min(1.0, CLIP / (length + 1e-6))
    matrices, others = ([x for x in named.values() if (x.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8).step()
    after = whole(named)
    if dist.get_rank() == 0:
        folder = options.folder
        (folder / "model").mkdir(parents=True, exist_ok=True)
        save_file(before, folder / "model" / "model.safetensors")
        save_file(gradients, folder / "gradients.safetensors")
        save_file(after, folder / "parameters.safetensors")
        save_file({"tokens": tokens, "labels": labels}, folder / "batch.safetensors")
        sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY}
        sizes |= {"max_position_embeddings": LENGTH, "rms_norm_eps": config.layernorm_epsilon, "rope_theta": 10000.0}
        told = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **sizes}
        (folder / "model" / "config.json").write_text(json.dumps(told))
        step = {"loss": loss.item(), "gradient_norm": length, "learning_rate": RATE, "gradient_clip": CLIP}
        step |= {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": DECAY, "precision": "float32"}
        (folder / "step.json").write_text(json.dumps(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
