"""Packed documents that do not see one another are as good as documents trained one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from cuboid.model.attention_operation import attention_mix
from cuboid.model.batch import Documents
from cuboid.model.flash_attention import (
    TOGETHER,
    Attended,
    _runs,
    attend,
    attend_backward,
    plain_backward,
    plain_forward,
)
from cuboid.model.initialize import initialize
from cuboid.model.rope import PositionTable
from cuboid.model.transformer import Transformer
from cuboid.spec.model import load_model
from cuboid.spec.training import DataSpec

IDS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
LENGTHS = [3, 1, 4, 7, 1]
CPU = torch.device("cpu")


def test_lengths_places_and_edges() -> None:
    documents = Documents(IDS)
    assert documents.lengths.tolist() == LENGTHS
    assert documents.index.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0]]
    edges = documents.edges(CPU)
    assert edges.places.tolist() == [0, 3, 4, 8, 15, *[16] * 12]
    assert edges.sizes.tolist() == [5, 7]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-qwen3"])
def test_packed_documents_equal_documents_one_by_one(name: str) -> None:
    spec = load_model(name)
    model = Transformer(spec).double()
    initialize(spec, model, seed=3)
    tokens = torch.randint(0, spec.vocab, IDS.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, spec.vocab, IDS.shape, generator=torch.Generator().manual_seed(1))
    table = PositionTable(spec, 8, torch.float64, CPU)
    data = DataSpec(attention_within_documents=True, positions_within_documents=True)
    packed = model.loss(tokens, labels, table.of(torch.arange(8), IDS, data))
    apart = sum(
        model.loss(inputs.unsqueeze(0), targets.unsqueeze(0))
        for inputs, targets in zip(tokens.flatten().split(LENGTHS), labels.flatten().split(LENGTHS), strict=True)
    )
    assert packed.item() == pytest.approx(apart.item(), rel=1e-12)
    assert packed.item() != pytest.approx(model.loss(tokens, labels).item(), rel=1e-6)
    # Rotary positions are relative, up to the rounding of their float32 tables; learned ones are not.
    going_on = table.of(torch.arange(8), IDS, DataSpec(attention_within_documents=True))
    close = model.loss(tokens, labels, going_on).item() == pytest.approx(packed.item(), rel=1e-6)
    assert close == (spec.positions == "rope")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "documents"])
@pytest.mark.parametrize("kernels", [(attend, attend_backward), (plain_forward, plain_backward)])
def test_a_block_equals_plain_attention(kernels: tuple[Any, Any], kind: str, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    key = torch.randn(2, 8, kv_heads, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    value = torch.randn(2, 8, kv_heads, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    documents = Documents(IDS) if kind == "documents" else None
    edges = documents.edges(CPU) if documents else None
    seen, sums = kernels[0](query, key, value, kind != "full", edges)
    mask = torch.ones(8, 8, dtype=torch.bool) if kind == "full" else torch.ones(8, 8, dtype=torch.bool).tril()
    mask = mask & (IDS.unsqueeze(2) == IDS.unsqueeze(1)).unsqueeze(1) if documents else mask
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(seen, expected, atol=1e-12)
    gradient = torch.randn(seen.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    with torch.no_grad():
        found = kernels[1](gradient, Attended(query, key, value, seen, sums), kind != "full", edges)
    assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(found, wanted, strict=True))
    if documents is not None:
        again = torch.autograd.grad(attention_mix(query, key, value, edges), (query, key, value), gradient)
        assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(again, wanted, strict=True))


def test_on_a_cpu_documents_cost_what_they_are() -> None:
    """Short ones are computed together, long ones alone; nothing is as large as a sequence."""
    lengths = torch.tensor([150, 3, 5, 100, 20, 1, 200, 90, 90, 365])
    documents = Documents(torch.arange(10).repeat_interleave(lengths).view(2, -1))
    edges = documents.edges(CPU)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 512, 4, 6, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 512, 2, 6, dtype=torch.float64, generator=generator).unbind()
    for since in (None, -6):
        runs = list(_runs(edges, since, query))
        assert (
            sum((here.stop - here.start) ** 2 for here, _ in runs)
            <= int(documents.lengths.square().sum()) + TOGETHER * 1024
        )
        alone = [here.stop - here.start for here, mask in runs if mask is None]
        assert alone == ([150, 1, 200, 90, 365] if since is None else [])
        ours, plain = (each(query, key, value, True, edges, since) for each in (attend, plain_forward))
        gradient, attended = torch.randn(query.shape, generator=generator).double(), Attended(query, key, value, *plain)
        ours += attend_backward(gradient, attended, True, edges, since)
        plain += plain_backward(gradient, attended, True, edges, since)
        assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(ours, plain, strict=True))
