"""What is dropped: a function of seed, sequence, position, place and feature, as likely as asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.model.dropout import NUMBERS, Dropout, kept, name_dropouts, residual_dropout, token_keys
from cuboid.spec.run import build_run

CPU = torch.device("cpu")
LENGTH, WIDTH = 64, 96


def mask(
    numbers: range, positions: Tensor, place: str = "layers.3.attention", seed: int = 7, rate: float = 0.3
) -> Tensor:
    site = residual_dropout(rate, place, seed, CPU).site
    return kept(token_keys(numbers, positions), site, WIDTH, rate)


def test_any_part_of_the_tokens_has_the_mask_of_the_whole() -> None:
    whole = mask(range(5, 9), torch.arange(LENGTH)).view(4, LENGTH, WIDTH)
    places = torch.cat((torch.arange(0, 16), torch.arange(48, 64)))  # of a context-parallel rank
    assert mask(range(6, 8), places).view(2, 32, WIDTH).equal(whole[1:3, places])
    keys = token_keys(range(5, 9), torch.arange(LENGTH))
    site = residual_dropout(0.3, "layers.3.attention", 7, CPU).site
    assert kept(keys.chunk(2)[1], site, WIDTH, 0.3).equal(whole.flatten(0, 1).chunk(2)[1])


def test_it_is_murmurs_arithmetic_in_unsigned_numbers() -> None:
    """As numpy computes it: int32 products wrap around, shifts bring zeros in."""

    def mixed(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return bits ^ (bits >> np.uint32(16))

    keys, site = token_keys(range(3), torch.arange(LENGTH)), residual_dropout(0.3, "embedding", 0, CPU).site
    row = keys.numpy().view(np.uint32) ^ site.numpy().view(np.uint32)
    features = np.arange(WIDTH, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = mixed(mixed(row[:, :1] + features) ^ row[:, 1:])
    assert kept(keys, site, WIDTH, 0.3).numpy().tolist() == (bits.view(np.int32) >= round(0.3 * 2**32) - 2**31).tolist()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_nothing_follows_from_its_neighbour(rate: float) -> None:
    masks = [
        mask(range(8), torch.arange(LENGTH), rate=rate),
        mask(range(8, 16), torch.arange(LENGTH), rate=rate),
        mask(range(8), torch.arange(LENGTH), "layers.3.feed_forward", rate=rate),
        mask(range(8), torch.arange(LENGTH), "layers.4.attention", rate=rate),
        mask(range(8), torch.arange(LENGTH), seed=8, rate=rate),
    ]
    deviation = (rate * (1 - rate) / masks[0].numel()) ** 0.5
    found = [each.double() - (1 - rate) for each in masks]
    for each in found:
        assert abs(each.mean()) < 4 * deviation
        assert abs(each.mean(0)).max() < 5 * deviation * WIDTH**0.5, "each feature alike"
        assert abs(each.mean(1)).max() < 5.5 * deviation * each.shape[0] ** 0.5, "each token alike"
        for shift in (1, 2, 8):
            assert abs((each[:, shift:] * each[:, :-shift]).mean()) < 5 * deviation
            assert abs((each[shift:] * each[:-shift]).mean()) < 5 * deviation
    for other in found[1:]:
        assert abs((found[0] * other).mean()) < 5 * deviation


def test_gradients_pass_where_numbers_did_and_the_mean_stays() -> None:
    dropout, keys = residual_dropout(0.25, "embedding", 0, CPU), token_keys(range(8), torch.arange(LENGTH))
    x = torch.ones(8 * LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    y = dropout(x, keys)
    y.backward(torch.full_like(x, 3.0))
    assert x.grad is not None and x.grad.equal(3 * y.detach())
    assert y.mean().item() == pytest.approx(1, abs=0.01) and y.max().item() == pytest.approx(1 / 0.75)
    assert dropout(x, None) is x, "evaluation drops nothing"


def test_a_module_of_ones_own_draws_by_its_name_and_the_number_of_the_sequence() -> None:
    module = nn.ModuleDict({"one": Dropout(0.5), "two": Dropout(0.5)})
    name_dropouts(module, "layers.1", 3)
    x, batch = torch.ones(4, 6, 5), {NUMBERS: torch.arange(10, 14)}
    one = module["one"](x, batch)
    assert not one.equal(module["two"](x, batch)) and not one[0].equal(one[1])
    assert module["one"](x[2:], {NUMBERS: torch.arange(12, 14)}).equal(one[2:])
    assert module["one"](x, {}) is x
    with pytest.raises(UserError, match=r"Dropout\(1\.5\)"):
        Dropout(1.5)


@pytest.mark.parametrize("rate", ["1", "-0.1", "nan"])
def test_what_is_no_fraction_is_refused(rate: str) -> None:
    with pytest.raises(UserError, match=r"training\.dropout="):
        build_run({"model": "tiny-llama"}, [f"training.dropout={rate}"])
