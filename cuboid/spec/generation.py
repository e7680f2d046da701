"""What a generation is asked for: which model on which layout, and how each next token is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Literal

from cuboid.errors import UserError
from cuboid.spec.coding import check_types, require_at_least, require_at_most
from cuboid.spec.fitting import check_model
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.sharding import kv_part_count

DIMENSIONS = ("dp", "tp", "pp", "cp", "ep")
"""What a layout for generation can say; the rest belongs to training."""

MOST_TOKENS = 1 << 24
"""Of one text."""

MOST_TOKENS = 1 << 24
"""Of one text."""


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How the next token is chosen from a model's logits, in the order of the fields."""

    max_tokens: int = 64
    """Most tokens that follow a prompt."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stand in the text so far are divided by it, or multiplied where negative."""
    temperature: float = 0.0
    """Divides logits; 0 is greedy, the likeliest token, of equals the first."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens with at least this part of the likeliest one's probability."""
    stop: tuple[str, ...] = ()
    """Text before which a result ends."""
    seed: int = 0
    """With the number of the prompt and the place in the text it decides every random number."""

    def __post_init__(self) -> None:
        check_types(self, "sampling")
        require_at_least(1, self, "sampling", ("max_tokens",))
        require_at_most({"max_tokens": MOST_TOKENS}, self, "sampling")
        require_at_least(0, self, "sampling", ("temperature", "top_k", "seed"))
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition-penalty={self.repetition_penalty} is not positive; use 1.0 for none, or 1.1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p={self.top_p} is no probability above 0; use 1.0 for all tokens, or 0.9")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min-p={self.min_p} is no probability; use 0 for all tokens, or 0.05")
        if "" in self.stop:
            raise UserError('stop="" stands everywhere; name the text that ends a result')


@dataclass(frozen=True, kw_only=True)
class SamplesSpec:
    """Text that the model writes now and then during training, into samples.jsonl of the run's folder."""

    every: int = 0
    """Steps between samples; 0 is never."""
    prompts: tuple[str, ...] = ("def ",)
    """What each of them continues with."""
    max_tokens: int = 64
    """Tokens of each."""
    temperature: float = 0.0
    """0 is greedy; else the training's seed decides the random numbers, the same at every step."""

    def __post_init__(self) -> None:
        check_types(self, "samples")
        require_at_least(0, self, "samples", ("every", "temperature"))
        require_at_least(1, self, "samples", ("max_tokens",))
        require_at_most({"max_tokens": MOST_TOKENS}, self, "samples")
        if self.every and not self.prompts:
            raise UserError('samples.prompts=[] has nothing to continue; write prompts = ["def "], or use every=0')
        if self.every and not all(self.prompts):
            raise UserError("samples.prompts has an empty one; write at least one character in each")

    def is_due(self, step: int) -> bool:
        """Whether text is written after this many steps."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """Everything a rank needs but the prompts."""

    model: ModelSpec
    layout: Layout
    weights: str
    """hf:FOLDER or a checkpoint; empty: random ones."""
    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries collectives, as in a training."""
    slots: int
    """Sequences in the cache of one replica at a time."""
    length: int
    """Tokens of each, prompt and result together."""
    chunk: int = 512
    """Most tokens of prompts in one forward pass."""
    draft: int = 0
    """Tokens that prediction layers draft behind each that is written; the model reads them with it, and keeps those
    that it would have written."""

    def __post_init__(self) -> None:
        check_types(self, "generation")
        require_at_least(1, self, "generation", ("slots", "length", "chunk"))
        require_at_least(0, self, "generation", ("draft",))
        require_at_most({"slots": 1 << 20, "length": MOST_TOKENS, "chunk": MOST_TOKENS}, self, "generation")
        check_layout(self.layout, self.model)
        most = self.model.prediction_layers
        if self.draft > most:
            instead = f"use draft={most} or less" if most else "use draft=0, or a model with model.prediction_layers"
            raise UserError(
                f"draft={self.draft} is more than the {most} prediction layers of {self.model.name}; {instead}"
            )
        if self.draft and any(self.model.windows):
            raise UserError(f"draft={self.draft} is not for model.windows={list(self.model.windows)}; use draft=0")

    @property
    def batches(self) -> int:
        """Batches in flight: one for each stage, so that none waits, where there are slots enough."""
        return min(self.layout.pp, self.slots)


def parse_layout(text: str) -> Layout:
    """A layout for generation, from its string."""
    return Layout.parse(text).changed(sequence_parallel=False)


def plain_layout(layout: Layout) -> Layout:
    """What generation needs of a training's layout."""
    return Layout(**{name: getattr(layout, name) for name in DIMENSIONS}, sequence_parallel=False)


def check_layout(layout: Layout, model: ModelSpec) -> None:
    plain = plain_layout(layout)
    for field in fields(Layout):
        if getattr(layout, field.name) != getattr(plain, field.name):
            raise UserError(
                f"{field.name}={getattr(layout, field.name)} belongs to training; use {', '.join(DIMENSIONS)} only"
            )
    if isinstance(model, PythonModelSpec) and layout.world_size != layout.dp:
        raise UserError(f"{layout} splits a model of one's own, which generation does not; use dp only")
    check_model(layout, model)


# What a generation keeps of the tokens it has seen: keys and values of each layer, or the latents they are made of.


@dataclass(frozen=True)
class CacheShape:
    """Of one layer on one rank."""

    slots: int
    heads: int
    places: int
    """Tokens of each sequence that this rank keeps."""
    key: int
    """Numbers of a key."""
    value: int
    """Numbers of a value; 0: it is the beginning of the key, as with latents."""

    @property
    def numbers(self) -> int:
        return prod((self.slots, self.heads, self.places, self.key + self.value))


def cache_shape(model: ModelSpec, layout: Layout, slots: int, length: int, window: int = 0) -> CacheShape:
    """`slots`: sequences of one replica at a time; `length`: tokens of each, of which context ranks keep a part, and
    layers with a window the last ones."""
    places = -(-(min(length, window) if window else length) // layout.cp)
    if model.latent is not None:  # every tensor rank keeps all: its heads are made from the same latents
        return CacheShape(slots, 1, places, model.latent.kv_rank + model.latent.qk_rope_dim, 0)
    heads = model.kv_heads // kv_part_count(model, layout.tp)
    return CacheShape(slots, heads, places, model.head_dim, model.head_dim)


def cache_bytes(
    model: ModelSpec, layout: Layout, layers: Iterable[int], slots: int, length: int, item_bytes: int
) -> int:
    """Of a rank with these layers."""
    windows = Counter(map(model.window_of, layers))
    numbers = (count * cache_shape(model, layout, slots, length, window).numbers for window, count in windows.items())
    return sum(numbers) * item_bytes
