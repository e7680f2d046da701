"""One step of a plain `transformers` loop, written for `cuboid verify --against`.

    python examples/step_of_transformers.py step            # a small Llama with random weights, float32
    cuboid verify --against step

    python examples/step_of_transformers.py step --mean-of-means    # huggingface/transformers#34191
    cuboid verify --against step                                     # names it

Copy what writes the files into another trainer: its weights before the step, the batch, the loss, the gradients before
clipping and the parameters after the step, under their Hugging Face names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

MICRO_BATCHES, SAMPLES, LENGTH = 2, 4, 16
RATE, CLIP, DECAY = 1e-3, 1.0, 0.1


def batch(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Samples with different numbers of labels that count."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (SAMPLES, LENGTH + 1), generator=random)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for sample in range(SAMPLES):
        labels[sample, : 3 * sample] = -100
    return inputs, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean-of-means", action="store_true", help="the bug of huggingface/transformers#34191")
    parser.add_argument("--decay-all", action="store_true", help="weight decay on norms too")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config)
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.folder / "model")

    tokens, labels = batch(config.vocab_size)
    every = int((labels >= 0).sum())
    total = 0.0
    for inputs, wanted in zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
        logits = model(inputs).logits
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        own = int((wanted >= 0).sum()) * MICRO_BATCHES
        loss = summed / (own if options.mean_of_means else every)
        loss.backward()
        total += loss.item()
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    decaying = [x for x in named.values() if x.ndim > 1 or options.decay_all]
    others = [x for x in named.values() if not (x.ndim > 1 or options.decay_all)]
    groups = [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    length = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    optimizer.step()

    save_file({"tokens": tokens, "labels": labels}, options.folder / "batch.safetensors")
    save_file(gradients, options.folder / "gradients.safetensors")
    save_file({name: x.detach().clone() for name, x in named.items()}, options.folder / "parameters.safetensors")
    told = {"loss": total, "gradient_norm": length, "learning_rate": RATE, "gradient_clip": CLIP}
    told |= {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": DECAY, "micro_batches": MICRO_BATCHES}
    (options.folder / "step.json").write_text(json.dumps({**told, "precision": "float32"}))


if __name__ == "__main__":
    main()
