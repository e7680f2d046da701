"""Initial weights depend on the seed and the parameter's name, and on nothing else."""

import math
from dataclasses import replace

import torch

from cuboid.model.initialize import initial_tensor, initialize
from cuboid.model.transformer import Transformer
from cuboid.spec.model import ModelSpec, load_model

MODEL = replace(load_model("tiny-llama"), layers=2)


def weights(model: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    module = Transformer(model)
    initialize(model, module, seed)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before() -> None:
    first = weights(MODEL, seed=7)
    torch.manual_seed(123)
    torch.randn(99)
    before = torch.get_rng_state()
    second = weights(MODEL, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_parameter_does_not_depend_on_the_others() -> None:
    deeper = weights(replace(MODEL, layers=3, tie_embeddings=True, qk_norm=True), seed=7)
    for name, tensor in weights(MODEL, seed=7).items():
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            # Only their deviation follows the depth.
            assert torch.allclose(tensor * math.sqrt(2 / 3), deeper[name], rtol=1e-5)
        elif name != "head.output.weight":
            assert torch.equal(tensor, deeper[name]), name


def test_names_and_seeds_give_different_weights() -> None:
    first, other = weights(MODEL, seed=7), weights(MODEL, seed=8)
    matrices = [name for name in first if first[name].ndim == 2]
    assert all(not torch.equal(first[name], other[name]) for name in matrices)
    drawn = [first[name].flatten()[:8].tolist() for name in matrices]
    assert len({tuple(values) for values in drawn}) == len(drawn)


def test_deviations_norms_and_biases() -> None:
    model = replace(load_model("tiny-gpt2"), layers=2, initial_std=0.05)
    found = weights(model, seed=0)
    for name, tensor in found.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            into_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = 0.05 / math.sqrt(4) if into_residual else 0.05
            assert abs(tensor.std().item() - expected) < 0.05 * expected, name


def test_one_tensor_can_be_drawn_alone() -> None:
    whole = weights(MODEL, seed=3)["layers.1.feed_forward.up.weight"]
    assert torch.equal(initial_tensor(MODEL, "layers.1.feed_forward.up.weight", tuple(whole.shape), 3), whole)
