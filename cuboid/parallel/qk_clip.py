"""QK-clip: heads whose attention logits could grow beyond a limit have their queries and keys scaled down.

No logit of a head is above the largest norm of its queries times the largest norm of its keys. These norms cost little
to find, whatever kernel computes attention and however context parallelism splits it, and their largest over ranks is
the same on any layout. Where their bound is above the limit, the head is scaled so that it meets the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cuboid.kernels.precision import wide
from cuboid.model.attention import HeadPeaks
from cuboid.parallel.collectives import all_reduce_maximum
from cuboid.parallel.groups import Group
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import Part


class LayerPeaks:
    """The peaks of all layers, heads of queries and then of keys; zero where another rank holds the layer or head."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self.keys = model.heads if model.latent is not None else model.kv_heads
        self.squares = torch.zeros(model.all_layers, model.heads + self.keys, dtype=wide(dtype), device=device)

    def begin_step(self) -> None:
        self.squares.zero_()

    def of(self, layer: int, parts: Sequence[Part]) -> HeadPeaks:
        """Views for one layer, of the heads that a rank holds. `parts`: its parameters."""
        model, latent = self._model, self._model.latent
        slices = {part.name.split(".attention.")[-1]: part.slice for part in parts}
        query = slices.get("query_up.weight") or slices["query.weight"]
        width = model.head_dim if latent is None else latent.qk_nope_dim + latent.qk_rope_dim
        key, key_width = query, width
        if latent is None:
            key, key_width = slices["key.weight"], model.head_dim
        row = self.squares[layer]
        return HeadPeaks(
            row[: model.heads][query.start // width : query.stop // width],
            row[model.heads :][key.start // key_width : key.stop // key_width],
        )

    def clip(self, units: Sequence[Unit], limit: float, finite: Tensor, world: Group) -> None:
        """Scale master weights, and those that matmuls use. `finite`: false changes nothing."""
        factors = dict(self._factors(all_reduce_maximum(self.squares.clone(), world), limit, finite))
        for unit in units:
            for shard in unit.optimizer_shards():
                if shard.part.name in factors:
                    _scale_rows(shard, factors[shard.part.name])

    def _factors(self, squares: Tensor, limit: float, finite: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Parameter -> what multiplies each of its rows."""
        model, latent = self._model, self._model.latent
        query, key = squares.split((model.heads, self.keys), 1)
        group = model.heads // self.keys
        width = model.head_dim if latent is None else latent.qk_nope_dim + latent.qk_rope_dim
        logit = (query * key.repeat_interleave(group, 1)).sqrt() / width**0.5
        keep = torch.where(finite, (limit / logit).clamp(max=1.0), 1.0)  # of each head's logits
        if latent is None:
            # Keys serve all heads of their group: as the most clipped head needs; other heads keep their own logits.
            shared = keep.view(-1, self.keys, group).amin(2).sqrt()
            of_query = keep / shared.repeat_interleave(group, 1)
            named = {"query": of_query, "key": shared}
            rows = {name: factor.repeat_interleave(width, 1) for name, factor in named.items()}
        else:
            # The rotated key is shared by all heads and stays; the rotated part of queries is scaled by all of it.
            root, one = keep.sqrt(), torch.ones_like(keep)
            lengths = (latent.qk_nope_dim, latent.qk_rope_dim), (latent.qk_nope_dim, latent.v_dim)
            up = "query_up" if latent.q_rank else "query"
            rows = {up: _by_part(root, keep, lengths[0]), "key_value_up": _by_part(root, one, lengths[1])}
        for name, found in rows.items():
            for layer, factor in enumerate(found):
                for kind in ("weight", "bias"):
                    yield f"layers.{layer}.attention.{name}.{kind}", factor


def _by_part(first: Tensor, second: Tensor, lengths: tuple[int, int]) -> Tensor:
    """Head by head so many rows of the one and of the other: (layers, rows)."""
    both = torch.stack((first, second), 2).flatten(1)
    counts = torch.tensor(lengths, device=first.device).repeat(first.shape[1])
    return both.repeat_interleave(counts, 1)


def _scale_rows(shard: OptimizerShard, factors: Tensor) -> None:
    part = shard.part
    columns = part.size // part.shape[0]
    first, last = shard.start // columns, -(-shard.stop // columns)
    rows = factors[part.slice.start + first : part.slice.start + last].to(wide(shard.master.dtype))
    begin = shard.start - first * columns
    scaled = shard.master * rows.repeat_interleave(columns)[begin : begin + shard.stop - shard.start]
    shard.set_master(scaled)
    if shard.weight is not None and not shard.is_halved:
        shard.weight.copy_(scaled)
