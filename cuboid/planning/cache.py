"""What a generation keeps of the tokens it has seen: keys and values of each layer, or the latents they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import kv_part_count


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


def cache_shape(model: ModelSpec, layout: Layout, slots: int, length: int) -> CacheShape:
    """`slots`: sequences of one replica at a time; `length`: tokens of each, of which context ranks keep a part."""
    places = -(-length // layout.cp)
    if model.latent is not None:  # every tensor rank keeps all: its heads are made from the same latents
        return CacheShape(slots, 1, places, model.latent.kv_rank + model.latent.qk_rope_dim, 0)
    heads = model.kv_heads // kv_part_count(model, layout.tp)
    return CacheShape(slots, heads, places, model.head_dim, model.head_dim)


def cache_bytes(model: ModelSpec, layout: Layout, layers: int, slots: int, length: int, item_bytes: int) -> int:
    """Of a rank with so many layers."""
    return layers * cache_shape(model, layout, slots, length).numbers * item_bytes
