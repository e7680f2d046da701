"""Initial weights depend on the seed and the parameter's name, and on nothing else; recipes say how wide they are."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch

from cuboid.errors import UserError
from cuboid.model.initialize import (
    RECIPES,
    initial_tensor,
    initialize,
    learning_rate_factor,
    matrix_of,
    recipe_of,
    standard_deviation,
)
from cuboid.model.transformer import Transformer
from cuboid.spec.load import catalog_models
from cuboid.spec.model import Initialization, ModelSpec, load_model

MODEL = replace(load_model("tiny-llama"), layers=2, initialization="megatron")
MIXTURE = replace(load_model("tiny-mixtral"), layers=2, initialization="megatron")
TINY = [name for name in catalog_models() if name.startswith("tiny-")]


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
    model = replace(load_model("tiny-gpt2"), layers=2, initial_std=0.05, initialization="megatron")
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


def test_any_part_has_the_bits_of_the_whole() -> None:
    shape, name = (6, 7, 5), "layers.0.feed_forward.experts.up"
    whole = initial_tensor(MIXTURE, name, shape, 3)
    for dimension, length in enumerate(shape):
        for start in range(length):
            for stop in range(start, length + 1):
                drawn = initial_tensor(MIXTURE, name, shape, 3, (dimension, range(start, stop)))
                assert torch.equal(drawn, whole.narrow(dimension, start, stop - start))


def test_blocks_leave_no_seam_and_the_distribution_is_nearly_normal() -> None:
    name, shape = "embedding.tokens.weight", (600, 500)  # several blocks
    whole = initial_tensor(MODEL, name, shape, 3)
    assert torch.equal(initial_tensor(MODEL, name, shape, 3, (1, range(499, 500))), whole[:, 499:])
    values = (whole.double() / MODEL.initial_std).flatten()
    assert values.unique().numel() > 100_000
    assert abs(values.mean()) < 0.01
    assert abs(values.var() - 1) < 0.01
    assert abs((values**4).mean() - 2.85) < 0.05
    assert abs((values[:-1] * values[1:]).mean()) < 0.01


def test_elements_are_what_whole_numbers_of_any_size_say() -> None:
    """The tensors' matmuls overflow on purpose, and must wrap as two's complement does."""
    name, limit = "embedding.tokens.weight", 2**64
    whole = initial_tensor(MODEL, name, (3, 4), 11).flatten()
    keys = hashlib.sha256(f"11/{name}".encode()).digest()
    for place in range(12):
        total = -8 * 65535 // 2
        for start in (0, 8):
            x = (place * 0x9E3779B97F4A7C15 + int.from_bytes(keys[start : start + 8], "little")) % limit
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % limit
            x = (x ^ x >> 27) * 0x94D049BB133111EB % limit
            x ^= x >> 31
            total += sum(x >> 16 * piece & 65535 for piece in range(4))
        factor = MODEL.initial_std / math.sqrt(8 * (4**16 - 1) / 12)
        assert whole[place].item() == (torch.tensor(float(total)) * factor).item()


def drawn_by(name: str, recipe: Initialization) -> ModelSpec:
    """Tied embeddings and a recipe that cannot have them: not tied."""
    model = load_model(name)
    tied = model.tie_embeddings and recipe not in ("zero_output", "mup")
    return replace(model, layers=3, initialization=recipe, tie_embeddings=tied)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", TINY)
def test_every_matrix_is_as_wide_as_its_recipe_says(name: str, recipe: Initialization) -> None:
    model = drawn_by(name, recipe)
    for parameter, tensor in weights(model, seed=1).items():
        if tensor.ndim < 2 or parameter.endswith("bias"):
            assert tensor.unique().numel() == 1, parameter
            continue
        expected = standard_deviation(model, parameter)
        if not expected:
            assert torch.equal(tensor.view(torch.int32), torch.zeros_like(tensor, dtype=torch.int32)), parameter
        assert abs(tensor.std().item() - expected) <= 0.1 * expected, parameter
        # What a recipe takes for the fan-in is what the matmul sums over.
        if not parameter.startswith("embedding."):
            assert matrix_of(model, parameter).fan_in == tensor.shape[-1], parameter


def test_recipes_by_role() -> None:
    """Deviations of a Llama's third layer of four, written out."""
    model = replace(load_model("tiny-llama"), layers=4)
    names = {
        "tokens": "embedding.tokens.weight",
        "query": "layers.2.attention.query.weight",
        "gate": "layers.2.feed_forward.gate.weight",
        "up": "layers.2.feed_forward.up.weight",
        "output": "layers.2.attention.output.weight",
        "down": "layers.2.feed_forward.down.weight",
        "head": "head.output.weight",
    }
    eighth, inner = 64**-0.5, 192**-0.5
    expected: dict[Initialization, list[float]] = {
        "megatron": [0.02, 0.02, 0.02, 0.02, 0.02 / 8**0.5, 0.02 / 8**0.5, 0.02],
        "flat": [0.02] * 7,
        "depth": [1.0, 0.02, 0.02, 0.02 / 6**0.5, 0.02 / 6**0.5, 0.02 / 6**0.5, eighth],
        "width": [1.0, eighth, eighth, eighth, eighth / 6**0.5, eighth / 6**0.5, eighth],
        "fan_in": [1.0, eighth, eighth, eighth, eighth / 8**0.5, inner / 8**0.5, eighth],
        "zero_output": [1.0, eighth, eighth, eighth, 0.0, 0.0, eighth],
    }
    for recipe, deviations in expected.items():
        found = [standard_deviation(replace(model, initialization=recipe), name) for name in names.values()]
        assert found == pytest.approx(deviations), recipe


def test_gelu_has_no_linear_half_and_experts_and_latents_have_fans_of_their_own() -> None:
    gpt2 = replace(load_model("tiny-gpt2"), initialization="depth")
    assert standard_deviation(gpt2, "layers.5.feed_forward.up.weight") == 0.02
    assert standard_deviation(gpt2, "embedding.positions.weight") == 0.02  # tied, and positions are as tokens
    deepseek = replace(load_model("tiny-deepseek"), initialization="fan_in")
    for name, fan_in in {
        "attention.query_up.weight": 32,
        "attention.key_value_up.weight": 24,
        "feed_forward.experts.up": 64,
        "feed_forward.router.weight": 64,
    }.items():
        assert standard_deviation(deepseek, f"layers.3.{name}") == pytest.approx(fan_in**-0.5), name


@pytest.mark.parametrize("recipe", ["auto", *RECIPES])
@pytest.mark.parametrize("name", TINY)
def test_the_first_loss_is_near_that_of_a_guess(name: str, recipe: Initialization) -> None:
    model = drawn_by(name, recipe)
    module = Transformer(model)
    initialize(model, module, 1)
    tokens = torch.randint(0, model.vocab, (4, 33), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = module.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).item() / 128
    assert abs(loss - math.log(model.vocab)) < 0.7


def test_auto_is_what_the_family_has_and_what_cannot_work_is_refused() -> None:
    llama = load_model("llama3-8b")
    assert recipe_of(llama) == "width"
    assert recipe_of(replace(llama, initial_std=0.006)) == "depth", "a deviation that somebody chose is used"
    assert standard_deviation(llama, "head.output.weight") == 16 / 4096
    assert recipe_of(replace(load_model("llama3-8b"), initialization="flat")) == "flat"
    for recipe in ("zero_output", "mup"):
        with pytest.raises(UserError, match=f"initialization={recipe} with tie_embeddings=true"):
            replace(load_model("tiny-gpt2"), initialization=recipe)
    with pytest.raises(UserError, match="base_width=128 does nothing with initialization=auto; use initialization=mup"):
        replace(load_model("tiny-llama"), base_width=128)


def test_the_maximal_update_parametrisation_by_role() -> None:
    model = replace(load_model("tiny-deepseek"), initialization="mup", base_width=16)
    layer = "layers.3."
    factors = {
        "embedding.tokens.weight": 1.0,
        f"{layer}attention_norm.weight": 1.0,
        f"{layer}attention.query_down_norm.weight": 1.0,
        f"{layer}feed_forward.router.bias": 1.0,
        f"{layer}attention.query_down.weight": 16 / 64,
        f"{layer}attention.query_up.weight": 16 / 32,
        f"{layer}attention.key_value_up.weight": 16 / 24,
        f"{layer}attention.output.weight": 16 / 64,
        f"{layer}feed_forward.router.weight": 16 / 64,
        f"{layer}feed_forward.experts.gate": 16 / 64,
        f"{layer}feed_forward.experts.down": 16 / 24,
        f"{layer}feed_forward.shared.down.weight": 16 / 24,
        "layers.0.feed_forward.down.weight": 16 / 192,
        "head.output.weight": 16 / 64,
    }
    assert {name: learning_rate_factor(model, name) for name in factors} == factors
    other = replace(model, initialization="fan_in", base_width=256)
    assert {learning_rate_factor(other, name) for name in factors} == {1.0}
    # Twice the width: half the deviation of what leads out of it, and 1/√2 of the others.
    wide = replace(model, hidden=128)
    for name in ("head.output.weight", f"{layer}feed_forward.router.weight"):
        assert standard_deviation(wide, name) == pytest.approx(standard_deviation(model, name) / 2)
    gate = f"{layer}feed_forward.experts.gate"
    assert standard_deviation(wide, gate) == pytest.approx(standard_deviation(model, gate) / 2**0.5)
    base = replace(model, base_width=64)
    assert standard_deviation(base, "head.output.weight") == standard_deviation(other, "head.output.weight")
