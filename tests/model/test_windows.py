"""Attention in a window and with sinks equals the formula, written out; each way of computing a block of it agrees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.attention_operation import attention_mix
from cuboid.model.batch import Documents
from cuboid.model.flash_attention import Attended, attend, attend_backward, plain_backward, plain_forward
from cuboid.spec.load import build_model

LENGTH, HEADS, KV_HEADS, WIDTH = 12, 4, 2, 6


def written_out(
    query: Tensor, key: Tensor, value: Tensor, window: int, sinks: Tensor | None, ids: Tensor | None
) -> Tensor:
    """One query at a time."""
    rows = []
    for sequence in range(query.shape[0]):
        for place in range(LENGTH):
            for head in range(HEADS):
                first = max(0, place - window + 1) if window else 0
                seen = [
                    other
                    for other in range(first, place + 1)
                    if ids is None or ids[sequence, other] == ids[sequence, place]
                ]
                kv = head * KV_HEADS // HEADS
                scores = key[sequence, seen, kv] @ query[sequence, place, head] / math.sqrt(WIDTH)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                weights = scores.softmax(0)[: len(seen)]
                rows.append(weights @ value[sequence, seen, kv])
    return torch.stack(rows).view(query.shape[0], LENGTH, HEADS, WIDTH)


@pytest.mark.parametrize("window", [0, 1, 4, 30])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_formula(window: int, has_sinks: bool, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = drawn(2, LENGTH, HEADS, WIDTH), *(drawn(2, LENGTH, KV_HEADS, WIDTH) for _ in range(2))
    inputs = [query, key, value, *([drawn(HEADS)] if has_sinks else [])]
    sinks = inputs[3] if has_sinks else None
    ids = (torch.rand(2, LENGTH, generator=generator) < 0.3).long().cumsum(1) if packed else None
    gradient = torch.randn(2, LENGTH, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    expected = written_out(query, key, value, window, sinks, ids)
    edges = None if ids is None else Documents(ids).edges(query.device)
    found = attention_mix(query, key, value, edges, window, sinks)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    pairs = (torch.autograd.grad(each, inputs, gradient) for each in (found, expected))
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "since"), [(8, 8, True, -3), (5, 9, False, 4), (9, 3, False, -6)]
)
def test_plain_blocks_equal_fused_ones(queries: int, keys: int, causal: bool, since: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, queries, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, keys, KV_HEADS, WIDTH, generator=generator, dtype=torch.float64).unbind()
    fused, plain = attend(query, key, value, causal, None, since), plain_forward(query, key, value, causal, None, since)
    for one, other in zip(fused, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    gradient, attended = torch.randn_like(query), Attended(query, key, value, *plain)
    both = (each(gradient, attended, causal, None, since) for each in (attend_backward, plain_backward))
    for one, other in zip(*both, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


SIZES = {"hidden": 32, "layers": 5, "heads": 4, "ffn": 48, "vocab": 64}


def test_windows_repeat_over_layers() -> None:
    model = build_model({**SIZES, "windows": [7, 7, 0]})
    assert [model.window_of(layer) for layer in range(5)] == [7, 7, 0, 7, 7]
    assert [build_model(SIZES).window_of(layer) for layer in range(5)] == [0] * 5


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"windows": [4, -1]}, "has a number that is no window"),
        (
            {"latent": {"q_rank": 0, "kv_rank": 8, "qk_nope_dim": 4, "qk_rope_dim": 4, "v_dim": 4}, "sinks": True},
            "model.sinks",
        ),
    ],
)
def test_what_no_model_has(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_model({**SIZES, **table})
