"""Rotary position embedding, with the frequency scaling of Llama 3 and of YaRN.

The tables are made in float32 whatever the model's precision, as every public checkpoint was trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuboid.kernels.pinned_memory import to_device
from cuboid.model.batch import Documents, Edges
from cuboid.spec.model import ModelSpec, RopeScaling, YarnScaling
from cuboid.spec.training import DataSpec


@dataclass(frozen=True)
class Positions:
    """What a layer must know of the tokens it sees: where each stands in its sequence. A first dimension of one stands
    for all sequences."""

    index: Tensor
    """(sequences, length)"""
    cosine: Tensor | None
    """(sequences, length, 1, head_dim), the 1 for heads; None where positions are learned."""
    sine: Tensor | None
    documents: Documents | None = None
    """Of whole sequences, where attention stays inside documents."""
    windowed: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for layers with a window, where these rotate otherwise."""
    dropout: Tensor | None = None
    """Of the tokens of the residual stream that this rank holds, what dropout draws from (`dropout.token_keys`); None
    drops nothing."""
    edges: Edges | None = None
    """Of `documents`, as kernels read them."""

    def rotation(self, windowed: bool) -> tuple[Tensor | None, Tensor | None]:
        """Cosine and sine for layers with a window, or for those without."""
        return self.windowed if windowed and self.windowed is not None else (self.cosine, self.sine)

    @property
    def length(self) -> int:
        return self.index.shape[1]


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended smoothly."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_positions / scaling.low_frequency_factor
    shortest = scaling.original_positions / scaling.high_frequency_factor
    blend = (scaling.original_positions / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)


def yarn_frequencies(periods: Tensor, yarn: YarnScaling, theta: float) -> Tensor:
    """Numbers that rotate slowly are slowed by `factor`, fast ones kept, a linear ramp between."""
    pairs = periods.shape[0]

    def number_that_turns(times: float) -> float:
        return pairs * math.log(yarn.original_positions / (times * 2 * math.pi)) / math.log(theta)

    low, high = number_that_turns(yarn.beta_fast), number_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (yarn.factor * periods) * slowed + 1.0 / periods * (1 - slowed)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(yarn: YarnScaling) -> float:
    """What rotated queries and keys are multiplied by."""
    if yarn.attention_factor:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
    return yarn_magnitude(yarn.factor)


def rope_frequencies(model: ModelSpec) -> Tensor:
    """By how much each pair of numbers rotates from one position to the next."""
    exponents = torch.arange(0, model.rope_dim, 2, dtype=torch.int64).float() / model.rope_dim
    periods = model.rope_theta**exponents
    if model.yarn is not None:
        return yarn_frequencies(periods, model.yarn, model.rope_theta)
    frequencies = 1.0 / periods / model.rope_factor
    return frequencies if model.rope_scaling is None else scaled_frequencies(frequencies, model.rope_scaling)


class PositionTable:
    """The rotation of every place in a sequence, made once."""

    def __init__(self, model: ModelSpec, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._length, self._device = length, device
        self._cosine: Tensor | None = None
        self._sine: Tensor | None = None
        if model.positions == "rope":
            frequencies = rope_frequencies(model)
            magnitude = attention_factor(model.yarn) if model.yarn is not None else 1.0
            self._cosine, self._sine = _table(frequencies, magnitude, length, dtype, device)
        self._windowed: tuple[Tensor, Tensor] | None = None
        if model.window_rope_theta:
            plain = replace(model, rope_theta=model.window_rope_theta, rope_factor=1.0, rope_scaling=None, yarn=None)
            self._windowed = _table(rope_frequencies(plain), 1.0, length, dtype, device)

    def at(self, index: Tensor, documents: Documents | None = None) -> Positions:
        """`index`: (sequences, length)."""
        index = to_device(index, self._device)
        edges = None if documents is None else documents.edges(self._device)
        if self._cosine is None or self._sine is None:
            return Positions(index, None, None, documents, edges=edges)
        windowed = None if self._windowed is None else (self._windowed[0][index], self._windowed[1][index])
        return Positions(index, self._cosine[index], self._sine[index], documents, windowed, edges=edges)

    def of(self, places: Tensor, ids: Tensor | None, data: DataSpec, cut: int = 0) -> Positions:
        """Of these places of every sequence, whose tokens belong to the documents `ids` (sequences, whole length).
        `cut`: that of the micro-batch."""
        if ids is None or not (data.uses_documents or cut):
            return self.at(places.unsqueeze(0))
        if cut:
            whole = Documents(torch.zeros_like(ids)).cut(cut)
            documents = Documents(ids).cut(cut)
            index = (documents if data.positions_within_documents else whole).index[:, places]
            return self.at(index, documents if data.attention_within_documents else whole)
        documents = Documents(ids)
        index = documents.index[:, places] if data.positions_within_documents else places.unsqueeze(0)
        return self.at(index, documents if data.attention_within_documents else None)


def _table(
    frequencies: Tensor, magnitude: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every place."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return (angles.cos() * magnitude).to(device, dtype), (angles.sin() * magnitude).to(device, dtype)


def make_positions(model: ModelSpec, length: int, dtype: torch.dtype, device: torch.device) -> Positions:
    """Of whole sequences."""
    return PositionTable(model, length, dtype, device).at(torch.arange(length).unsqueeze(0))


def rotate(x: Tensor, positions: Positions, windowed: bool = False) -> Tensor:
    """x: (batch, length, heads, head_dim). `windowed`: of a layer with a window."""
    cosine, sine = positions.rotation(windowed)
    return x if cosine is None or sine is None else rotated(x, cosine, sine)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def neighbours_apart(x: Tensor) -> Tensor:
    """From weights whose pairs are neighbours to pairs half a head apart, which `rotate` rotates."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
