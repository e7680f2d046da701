"""Which part of each parameter a tensor rank holds: all of it, once, whole heads together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cuboid.model.linear import declared_split
from cuboid.model.transformer import Transformer
from cuboid.spec.load import catalog_models
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.run import build_run
from cuboid.spec.sharding import Declared, ShardingRank, heads, kv_part_count, units, vocabulary_rows

MODELS = ["tiny-llama", "tiny-gpt2", "tiny-qwen3"]


def declared(model: ModelSpec) -> dict[str, Declared]:
    """What the modules themselves say."""
    with torch.device("meta"):
        whole = Transformer(model)
    table = {}
    for name, parameter in whole.named_parameters():
        split = declared_split(whole, name)
        assert split is not None, f"{name} does not say how it is split"
        table[name] = Declared(tuple(parameter.shape), split)
    return table


@pytest.mark.parametrize("name", sorted(catalog_models()))
def test_the_planner_knows_what_modules_declare(name: str) -> None:
    """Names, shapes and splits, in the order the modules have them; a few layers of each kind do."""
    model = load_model(name)
    dense = model.mixture.first_dense_layers if model.mixture is not None else 0
    model = replace(model, layers=min(model.layers, dense + 2))
    planned = {}
    for unit in units(model, range(model.all_layers), first=True, last=True):
        planned |= unit.parameters
    assert planned == declared(model)


@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_held(name: str, tensor_size: int) -> None:
    """By exactly one rank where it is its own, else by as many as its sharing says."""
    model = load_model(name)
    for parameter, (shape, split) in declared(model).items():
        ranks = [ShardingRank(tensor_size, index, sequence_parallel=True) for index in range(tensor_size)]
        cuts = [split.slice_of(parameter, shape, rank) for rank in ranks]
        assert len({(cut.dimension, cut.length, cut.sharing, cut.partial_gradient) for cut in cuts}) == 1
        holders = [0] * shape[cuts[0].dimension]
        for cut in cuts:
            assert 0 <= cut.start <= cut.stop <= shape[cut.dimension]
            assert cut.stop - cut.start <= cut.length
            for place in range(cut.start, cut.stop):
                holders[place] += 1
        expected = {"own": 1, "tensor": tensor_size, "kv": tensor_size // kv_part_count(model, tensor_size)}
        assert set(holders) == {expected[cuts[0].sharing]}, parameter


@pytest.mark.parametrize("tensor_size", [2, 4, 8])
def test_what_is_split_and_what_is_not(tensor_size: int) -> None:
    model = load_model("tiny-gpt2")
    whole = set()
    for parameter, (shape, split) in declared(model).items():
        cut = split.slice_of(parameter, shape, ShardingRank(tensor_size, 1))
        if cut.sharing == "tensor":
            assert cut.local_shape(shape) == shape
            assert not cut.partial_gradient, "without sequence parallelism every rank sees every token"
            by_token = ShardingRank(tensor_size, 1, sequence_parallel=True)
            assert split.slice_of(parameter, shape, by_token).partial_gradient
            whole.add(parameter.split(".", 2)[-1] if parameter.startswith("layers") else parameter)
        else:
            assert torch.Size(cut.local_shape(shape)).numel() >= torch.Size(shape).numel() // tensor_size
    assert all("norm" in parameter or "position" in parameter or parameter.endswith("bias") for parameter in whole), (
        whole
    )


@pytest.mark.parametrize(("kv_heads", "tensor_size", "parts"), [(8, 4, 4), (2, 8, 2), (1, 8, 1), (4, 4, 4), (6, 4, 2)])
def test_key_value_heads_are_split_as_far_as_they_go(kv_heads: int, tensor_size: int, parts: int) -> None:
    model = build_run(
        {"model": "tiny-llama"}, ["model.heads=24", "model.head_dim=4", f"model.kv_heads={kv_heads}"]
    ).model
    assert kv_part_count(model, tensor_size) == parts
    shape = (kv_heads * model.head_dim, model.hidden)
    for index in range(tensor_size):
        keys = heads(kv_heads).slice_of("layers.0.attention.key.weight", shape, ShardingRank(tensor_size, index))
        assert keys.length == kv_heads // parts * model.head_dim, "whole heads"
        assert keys.sharing == ("own" if parts == tensor_size else "kv")
        # The query heads of this rank read key-value heads that it holds.
        held, group = model.heads // tensor_size, model.heads // kv_heads
        needed = {head // group for head in range(index * held, (index + 1) * held)}
        assert needed <= set(range(keys.start // model.head_dim, keys.stop // model.head_dim))


@pytest.mark.parametrize(("vocabulary", "size"), [(259, 2), (259, 8), (256, 4), (9, 8), (3, 8), (1, 2)])
def test_the_vocabulary_is_padded_to_equal_parts(vocabulary: int, size: int) -> None:
    parts = [vocabulary_rows(vocabulary, size, index) for index in range(size)]
    length = -(-vocabulary // size)
    assert sum(rows for _, rows in parts) == vocabulary
    assert [row for start, rows in parts for row in range(start, start + rows)] == list(range(vocabulary))
    assert all(0 <= rows <= length for _, rows in parts)
