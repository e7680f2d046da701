"""One step of a plain `transformers` loop, written for `cuboid verify --against`.

    python examples/step_of_transformers.py step            # a small Llama with random weights, float32
    cuboid verify --against step

    python examples/step_of_transformers.py step --mean-of-means    # huggingface/transformers#34191
    cuboid verify --against step                                     # names it

    python examples/step_of_transformers.py step --trainer          # its own Trainer; needs accelerate. Equal, and with
    cuboid verify --against step                                     # transformers 4.45.2: #34191 itself

Copy what writes the files into another trainer: its weights before the step, the batch, the loss, the gradients before
clipping and the parameters after the step, under their Hugging Face names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

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


def taken_by_loop(
    model: LlamaForCausalLM, tokens: Tensor, labels: Tensor, mean_of_means: bool, decay_all: bool
) -> tuple[float, float, dict[str, Tensor]]:
    every = int((labels >= 0).sum())
    total = 0.0
    for inputs, wanted in zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
        logits = model(inputs).logits
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        own = int((wanted >= 0).sum()) * MICRO_BATCHES
        loss = summed / (own if mean_of_means else every)
        loss.backward()
        total += loss.item()
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    decaying = [x for x in named.values() if x.ndim > 1 or decay_all]
    others = [x for x in named.values() if not (x.ndim > 1 or decay_all)]
    groups = [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    length = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    optimizer.step()
    return total, length, gradients


def taken_by_trainer(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> tuple[float, float, dict[str, Tensor]]:
    """The step as transformers' Trainer takes it: the loss and the norm that it reports, and the gradients."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    gradients: dict[str, Tensor] = {}

    class Keep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trainer.accelerator.clip_grad_norm_ = clip

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    def clip(parameters: Any, most: float, **_: Any) -> Tensor:
        gradients.update({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
        return torch.nn.utils.clip_grad_norm_(list(parameters), most)

    # the model itself takes the label of a token for the one before it
    own = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
    more = torch.cat([tokens, labels[:, -1:].clamp(min=0)], 1)
    rows = [{"input_ids": one, "labels": other} for one, other in zip(more, own, strict=True)]
    dealt = {"per_device_train_batch_size": SAMPLES // MICRO_BATCHES, "gradient_accumulation_steps": MICRO_BATCHES}
    adamw = {"learning_rate": RATE, "weight_decay": DECAY, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
    told: dict[str, Any] = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    told |= {"lr_scheduler_type": "constant", "max_grad_norm": CLIP, "disable_tqdm": True, **dealt, **adamw}
    trainer = InOrder(model, TrainingArguments(mkdtemp(), **told), train_dataset=rows, callbacks=[Keep()])
    trainer.train()
    logged = trainer.state.log_history[0]
    return logged["loss"], float(logged["grad_norm"]), gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean-of-means", action="store_true", help="the bug of huggingface/transformers#34191")
    parser.add_argument("--decay-all", action="store_true", help="weight decay on norms too")
    parser.add_argument("--trainer", action="store_true", help="transformers' own Trainer takes the step")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config)
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.folder / "model")

    tokens, labels = batch(config.vocab_size)
    named = dict(model.named_parameters())
    if options.trainer:
        total, length, gradients = taken_by_trainer(model, tokens, labels)
    else:
        total, length, gradients = taken_by_loop(model, tokens, labels, options.mean_of_means, options.decay_all)

    save_file({"tokens": tokens, "labels": labels}, options.folder / "batch.safetensors")
    save_file(gradients, options.folder / "gradients.safetensors")
    save_file({name: x.detach().clone() for name, x in named.items()}, options.folder / "parameters.safetensors")
    told = {"loss": total, "gradient_norm": length, "learning_rate": RATE, "gradient_clip": CLIP}
    told |= {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": DECAY, "micro_batches": MICRO_BATCHES}
    (options.folder / "step.json").write_text(json.dumps({**told, "precision": "float32"}))


if __name__ == "__main__":
    main()
