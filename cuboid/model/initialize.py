"""Initial weights that depend on the seed, the parameter's name and the element's place in it, and on nothing else.

Every element is computed for itself from these, in integers until the last matmul: any part of a parameter has the
bits it has in the whole (invariant 1), on a processor and on a GPU, and no rank draws what it does not keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cuboid.model.hashing import hashes
from cuboid.model.recipes import standard_deviation
from cuboid.spec.model import ModelSpec

HASHES, PIECES, PIECE_BITS = 2, 4, 16
"""An element is the sum of all 16-bit pieces of two hashes: so near to a normal distribution that its kurtosis is 2.85
in place of 3, and never further out than 4.9 deviations."""
EVERY_OTHER = 0x0000FFFF0000FFFF
BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements computed at a time: a processor keeps them in its cache."""

CPU = torch.device("cpu")


def initial_tensor(
    model: ModelSpec,
    name: str,
    shape: tuple[int, ...],
    seed: int,
    part: tuple[int, range] | None = None,
    device: torch.device = CPU,
) -> Tensor:
    """The initial value of the parameter `name` in float32; `part`: of one dimension only this range."""
    dimension, wanted = part or (0, range(shape[0]))
    kept = (*shape[:dimension], len(wanted), *shape[dimension + 1 :])
    kind = name.rsplit(".", 2)[-2:]
    if kind[1] == "bias":
        return torch.zeros(kept, device=device)
    if kind[0].endswith("norm"):
        return torch.ones(kept, device=device)
    deviation = standard_deviation(model, name)
    if not deviation:
        return torch.zeros(kept, device=device)
    drawn = torch.empty(math.prod(kept), device=device)
    inner = math.prod(shape[dimension + 1 :])
    block = BLOCK[device.type]
    for begin in range(0, drawn.numel(), block):
        some = drawn[begin : begin + block]
        places = torch.arange(begin, begin + some.numel(), device=device)
        if dimension:  # what lies before a row of this part in the whole: all other parts of the rows above it
            rows = places.div(len(wanted) * inner, rounding_mode="floor")
            places += rows.mul_((shape[dimension] - len(wanted)) * inner)
        places += wanted.start * inner
        some.copy_(_sums(f"{seed}/{name}", places)).mul_(deviation / DEVIATION_OF_SUMS)
    return drawn.view(kept)


MEAN_OF_SUMS = HASHES * PIECES * (2**PIECE_BITS - 1) // 2
DEVIATION_OF_SUMS = math.sqrt(HASHES * PIECES * (4**PIECE_BITS - 1) / 12)


def _sums(key: str, places: Tensor) -> Tensor:
    """Whole numbers around zero, one for each place."""
    pairs = torch.zeros_like(places)
    for number in range(HASHES):
        hashed = hashes(key, places, number)
        # Two pieces at a time, each in half of the number, where their sum has room.
        pairs += hashed & EVERY_OTHER
        pairs += hashed.bitwise_right_shift_(PIECE_BITS).bitwise_and_(EVERY_OTHER)
    sums = pairs & (2 ** (2 * PIECE_BITS) - 1)
    sums += pairs.bitwise_right_shift_(2 * PIECE_BITS)
    return sums.sub_(MEAN_OF_SUMS)


def initialize(model: ModelSpec, module: nn.Module, seed: int) -> None:
    """Fill a whole single-device model."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = initial_tensor(model, name, tuple(parameter.shape), seed, device=parameter.device)
            parameter.copy_(drawn)
