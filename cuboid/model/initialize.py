"""Initial weights that depend on the seed, the parameter's name and the element's place in it, and on nothing else.

Every element is computed for itself from these, in integers until the last matmul: any part of a parameter has the
bits it has in the whole (invariant 1), on a processor and on a GPU, and no rank draws what it does not keep."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from cuboid.spec.model import INITIAL_STD, Family, Initialization, ModelSpec

HASHES, WORDS, WORD_BITS = 2, 4, 16
"""An element is the sum of all 16-bit words of two hashes: so near to a normal distribution that its kurtosis is 2.85
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
    if kind[1].endswith(("bias", "sinks")):
        return torch.zeros(kept, device=device)
    if kind[0].endswith("norm"):
        return (torch.zeros if model.unit_norms else torch.ones)(kept, device=device)
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


MEAN_OF_SUMS = HASHES * WORDS * (2**WORD_BITS - 1) // 2
DEVIATION_OF_SUMS = math.sqrt(HASHES * WORDS * (4**WORD_BITS - 1) / 12)


def _sums(key: str, places: Tensor) -> Tensor:
    """Whole numbers around zero, one for each place."""
    pairs = torch.zeros_like(places)
    for number in range(HASHES):
        hashed = hashes(key, places, number)
        # Two words at a time, each in half of the number, where their sum has room.
        pairs += hashed & EVERY_OTHER
        pairs += hashed.bitwise_right_shift_(WORD_BITS).bitwise_and_(EVERY_OTHER)
    sums = pairs & (2 ** (2 * WORD_BITS) - 1)
    sums += pairs.bitwise_right_shift_(2 * WORD_BITS)
    return sums.sub_(MEAN_OF_SUMS)


def initialize(model: ModelSpec, module: nn.Module, seed: int) -> None:
    """Fill a whole single-device model."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = initial_tensor(model, name, tuple(parameter.shape), seed, device=parameter.device)
            parameter.copy_(drawn)


# How wide each parameter is drawn, and how fast it learns: a recipe is a small table from the role of a matrix to a
# standard deviation, and one recipe, mup, has learning rates too.
#
# Pure functions of the model and the parameter's name, so that every layout draws the same.


DEFAULTS: dict[Family, Initialization] = {
    "llama": "width",
    "qwen2": "width",
    "qwen3": "width",
    "gpt2": "megatron",
    "mixtral": "width",
    "qwen3_moe": "width",
    "deepseek_v3": "width",
    "mistral": "width",
    "gemma2": "width",
    "gemma3_text": "width",
    "olmo2": "width",
    "olmo3": "width",
    "gpt_oss": "width",
}
"""What `model.initialization = "auto"` means."""

Role = Literal["tokens", "positions", "read", "up", "write", "router", "head"]


@dataclass(frozen=True)
class Matrix:
    """What a recipe knows of a parameter."""

    role: Role
    """read: takes from the residual stream or from a latent (queries, keys, values, gate); up: the linear half of a
    gated feed-forward block; write: adds to the residual stream (attention's output, down)."""
    fan_in: int
    """Numbers that one output sums over; 1 for a row that is looked up."""
    layer: int
    """Counted from 0; 0 outside of layers."""


@dataclass(frozen=True)
class Deviations:
    """One standard deviation for each role."""

    tokens: float
    positions: float
    read: float
    up: float
    write: float
    router: float
    head: float


def _megatron(model: ModelSpec, matrix: Matrix) -> Deviations:
    """GPT-2's and Megatron's: what is added to the residual stream is smaller, so that its variance does not grow with
    depth."""
    std = model.initial_std
    small = std / math.sqrt(2 * model.layers)
    return Deviations(tokens=std, positions=std, read=std, up=std, write=small, router=std, head=std)


def _flat(model: ModelSpec, matrix: Matrix) -> Deviations:
    """One for all. OLMo 2 was trained with 0.02, DeepSeek-V3 with 0.006."""
    std = model.initial_std
    return Deviations(tokens=std, positions=std, read=std, up=std, write=std, router=std, head=std)


def _depth(model: ModelSpec, matrix: Matrix) -> Deviations:
    """torchtitan's, and `llama_depth` of OLMo-core: later layers add less to a residual stream that begins at one."""
    std = model.initial_std
    small = std / math.sqrt(2 * (matrix.layer + 1))
    embedding, head = _embedding(model), model.hidden**-0.5
    return Deviations(embedding, embedding, read=std, up=small, write=small, router=small, head=head)


def _width(model: ModelSpec, matrix: Matrix) -> Deviations:
    """As `depth`, at any width: 1/√hidden in place of 0.02, which is the same at hidden 2,500. The logits of a wide
    model begin small, so that no step is lost on unlearning random ones: AdamW moves them in proportion to the
    width."""
    std = model.hidden**-0.5
    small = std / math.sqrt(2 * (matrix.layer + 1))
    embedding, head = _embedding(model), min(std, HEAD / model.hidden)
    return Deviations(embedding, embedding, read=std, up=std, write=small, router=small, head=head)


HEAD = 16.0
"""Times 1/hidden; docs/learning.md has what was measured around it."""


def _fan_in(model: ModelSpec, matrix: Matrix) -> Deviations:
    """Every matrix keeps the scale of what goes in, at any width; all layers together add as much as goes in."""
    std = matrix.fan_in**-0.5
    embedding, small = _embedding(model), std / math.sqrt(2 * model.layers)
    return Deviations(embedding, embedding, read=std, up=std, write=small, router=std, head=std)


def _zero_output(model: ModelSpec, matrix: Matrix) -> Deviations:
    """As `fan_in`, but every layer begins as the identity."""
    return replace(_fan_in(model, matrix), write=0.0)


def _mup(model: ModelSpec, matrix: Matrix) -> Deviations:
    """The maximal-update parametrisation (Tensor Programs V, table 3): as `fan_in`, but what leads out of the width, to
    a fixed number of logits, shrinks with 1/fan-in above the base width. A router is such an output, as the head is. No
    multiplier in the forward pass: an exported model computes the same. Attention keeps 1/√head_dim: head_dim is the
    same at all widths."""
    base = _fan_in(model, matrix)
    out = base.head * min(1.0, model.base_width / matrix.fan_in) ** 0.5
    return replace(base, router=out, head=out)


def _embedding(model: ModelSpec) -> float:
    """A tied embedding is small: the residual stream begins with it, and with a large one every token would predict
    itself. What the layers add then soon outweighs it."""
    return model.initial_std if model.tie_embeddings else 1.0


RECIPES: dict[Initialization, Callable[[ModelSpec, Matrix], Deviations]] = {
    "megatron": _megatron,
    "flat": _flat,
    "depth": _depth,
    "width": _width,
    "fan_in": _fan_in,
    "zero_output": _zero_output,
    "mup": _mup,
}


def recipe_of(model: ModelSpec) -> Initialization:
    """The name of the recipe that draws a model."""
    if model.initialization != "auto":
        return model.initialization
    default = DEFAULTS[model.family]
    # A deviation that somebody chose is used: `width` would pass it over.
    return "depth" if default == "width" and model.initial_std != INITIAL_STD else default


def standard_deviation(model: ModelSpec, name: str) -> float:
    """Of the initial elements of the matrix called `name`; 0: they are all zero."""
    matrix = matrix_of(model, name)
    return float(getattr(RECIPES[recipe_of(model)](model, matrix), matrix.role))


def learning_rate_factor(model: ModelSpec, name: str) -> float:
    """What multiplies the learning rate of a parameter. AdamW moves every element alike, so the output of a matrix
    moves in proportion to its fan-in; with mup it moves alike at any width. Embeddings and vectors sum over nothing."""
    if recipe_of(model) != "mup" or name.endswith(("bias", "norm.weight", ".sinks")):
        return 1.0
    matrix = matrix_of(model, name)
    return 1.0 if matrix.role in ("tokens", "positions") else model.base_width / matrix.fan_in


def matrix_of(model: ModelSpec, name: str) -> Matrix:
    """`name`: as the whole model calls a parameter that is neither a norm nor a bias."""
    path = name.removesuffix(".weight").split(".")
    if path[0] == "embedding":
        return Matrix("tokens" if path[1] == "tokens" else "positions", 1, 0)
    if path[0] == "head":
        return Matrix("head", model.hidden, 0)
    layer, inside = int(path[1]), path[3:]
    if path[2] == "projection":
        return Matrix("read", 2 * model.hidden, layer)
    if path[2] == "attention":
        return _attention_matrix(model, inside[0], layer)
    if inside[-1] == "router":
        return Matrix("router", model.hidden, layer)
    if inside[-1] == "down":
        return Matrix("write", _feed_forward_width(model, inside[0]), layer)
    return Matrix("up" if inside[-1] == "up" and model.is_gated else "read", model.hidden, layer)


def _attention_matrix(model: ModelSpec, name: str, layer: int) -> Matrix:
    latent = model.latent
    if name == "output":
        return Matrix("write", model.heads * (latent.v_dim if latent else model.head_dim), layer)
    if latent and name in ("query_up", "key_value_up"):
        return Matrix("read", latent.q_rank if name == "query_up" else latent.kv_rank, layer)
    return Matrix("read", model.hidden, layer)


def _feed_forward_width(model: ModelSpec, block: str) -> int:
    if model.mixture is None or block not in ("experts", "shared"):
        return model.ffn
    return model.mixture.expert_ffn if block == "experts" else model.mixture.shared_ffn


# Random numbers that depend on a key and a place alone: SplitMix64 on tensors.
#
# Any rank computes the number of any place, in integers, so that no layout and no device changes it.


GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashes(key: str, places: Tensor, number: int = 0) -> Tensor:
    """64 random bits for each place. `number`: 0 to 3, of independent ones with the same key."""
    return hashed(key_number(key, number), places)


def key_number(key: str, number: int = 0) -> int:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[8 * number : 8 * number + 8], "little", signed=True)


def hashed(key: int, places: Tensor) -> Tensor:
    """64 random bits for each place."""
    bits = places * _signed(GOLDEN) + key
    bits ^= shifted(bits, 30)
    bits *= _signed(FIRST)
    bits ^= shifted(bits, 27)
    bits *= _signed(SECOND)
    bits ^= shifted(bits, 31)
    return bits


def shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    """The same 64 bits as an int64."""
    return constant - (1 << 64)
