"""The single-device model: causal, masked labels do not count, tied embeddings are one tensor, bf16 is close."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from cuboid.model.initialize import initialize
from cuboid.model.transformer import IGNORED, Transformer
from cuboid.spec.model import ModelSpec, load_model

NAMES = ("tiny-llama", "tiny-gpt2", "tiny-qwen3")


def make(name: str, dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    model: ModelSpec = replace(load_model(name), **{"layers": 2, "initial_std": 0.2, **changes})
    module = Transformer(model)
    initialize(model, module, seed=0)
    return module.to(dtype)


def random_tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 259, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_the_catalog_counts_what_the_model_holds(name: str) -> None:
    module = make(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == module.model.parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_later_token_does_not_change_earlier_logits(name: str) -> None:
    module, tokens = make(name), random_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 259
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    assert before.shape == (2, 12, 259)
    assert torch.equal(before[:, :7], after[:, :7])
    for position in range(7, 12):
        assert not torch.allclose(before[:, position], after[:, position], atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_a_batch_do_not_see_each_other(name: str) -> None:
    module, tokens = make(name), random_tokens(batch=3)
    with torch.no_grad():
        together = module(tokens)
        alone = torch.cat([module(tokens[index : index + 1]) for index in range(3)])
    assert torch.allclose(together, alone, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_masked_labels_do_not_count(name: str) -> None:
    module, tokens = make(name), random_tokens()
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = IGNORED
    labels[0, 3:8] = IGNORED
    loss = module.loss(tokens, labels)
    losses = functional.cross_entropy(module(tokens).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    assert torch.allclose(loss, losses[labels.flatten() != IGNORED].sum(), rtol=1e-12)


def test_a_batch_without_labels_costs_nothing_and_teaches_nothing() -> None:
    module, tokens = make("tiny-llama"), random_tokens()
    loss = module.loss(tokens, torch.full_like(tokens, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in module.parameters() if parameter.grad is not None)


def test_the_loss_is_a_sum_over_micro_batches() -> None:
    module, tokens = make("tiny-llama"), random_tokens(batch=4)
    labels = tokens.roll(-1, dims=1)
    labels[1, 2:] = IGNORED
    parts = sum(module.loss(tokens[index : index + 1], labels[index : index + 1]) for index in range(4))
    assert torch.allclose(module.loss(tokens, labels), parts, rtol=1e-12)


def test_tied_embeddings_are_one_tensor() -> None:
    tied, untied = make("tiny-llama", tie_embeddings=True), make("tiny-llama")
    assert tied.head.output.weight is tied.embedding.tokens.weight
    assert "head.output.weight" not in dict(tied.named_parameters())
    assert untied.head.output.weight is not untied.embedding.tokens.weight
    # Both uses add to one gradient: that of two equal, separate tensors together.
    with torch.no_grad():
        untied.embedding.tokens.weight.copy_(tied.embedding.tokens.weight)
        untied.head.output.weight.copy_(tied.embedding.tokens.weight)
    tokens = random_tokens()
    for module in (tied, untied):
        module.loss(tokens, tokens.roll(-1, dims=1)).backward()
    apart = untied.head.output.weight.grad + untied.embedding.tokens.weight.grad
    assert torch.allclose(tied.embedding.tokens.weight.grad, apart, rtol=1e-10, atol=1e-12)


# Torch says so where the processor has no bf16 and its matmuls take a slower way.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_close_to_float32(name: str) -> None:
    exact = make(name, torch.float32, initial_std=0.02)
    rounded = make(name, torch.bfloat16, initial_std=0.02)
    tokens = random_tokens()
    labels = tokens.roll(-1, dims=1)
    with torch.no_grad():
        logits, coarse = exact(tokens), rounded(tokens)
        assert coarse.dtype == torch.bfloat16
        assert (coarse - logits).abs().max() < 0.03 * logits.abs().max()
        loss, coarse_loss = exact.loss(tokens, labels), rounded.loss(tokens, labels)
    assert coarse_loss.dtype == torch.float32
    assert abs(coarse_loss - loss) < 2e-3 * loss
